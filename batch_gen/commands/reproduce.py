"""`batch-gen reproduce`: one clip again, from its record alone, and whether it is the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import click
from pydantic import ValidationError

from batch_gen.adapters import find_adapters
from batch_gen.checkpoint import Checkpoint, open_checkpoint
from batch_gen.config import Settings, load_preset, resolve
from batch_gen.encode import FramesHash
from batch_gen.engine import DenoiseOptions, Slab, Step, render
from batch_gen.errors import EXIT_CHECK_FAILED, EXIT_OK, CheckFailed, UsageError
from batch_gen.images import ImageReader, images_of
from batch_gen.launch import RemoteEngine
from batch_gen.placement import rank_threads, spec_of
from batch_gen.prepare import store_options
from batch_gen.reach import reach
from batch_gen.records import Record
from batch_gen.request import RenderRequest
from batch_gen.runfile import RunFile, load_run
from batch_gen.scratch import open_scratch
from batch_gen.storage.address import check_address
from batch_gen.storage.base import open_store
from batch_gen.worker import numerics_key

RESTORED: Final = (
    *("device", "mesh", "attention", "tp_sequence_parallel", "kernels", "compile", "compile_backend", "threads"),
)
"""Operational settings that can change bits, all that `numerics` names; the run's hold unless a flag says otherwise."""


@dataclass(frozen=True, slots=True)
class Original:
    """A record and the run that it belongs to."""

    record: Record
    run: RunFile


def reproduce(record: str, given: Mapping[str, Any], as_json: bool) -> int:
    """Render the record's clip again and compare frames hashes; exit 5 when they differ."""
    original = load_original(record, given)
    check_integrity(original)
    checkpoint = checkpoint_of(original, given)
    settings = settings_of(original, checkpoint, given)
    check_adapters(original, settings)
    root = open_store(record.rpartition("/clips/")[0] or ".", store_options(settings))
    reader = ImageReader(root, store_options(settings))
    rendered = render_hash(original.record, settings, checkpoint, reader)
    same_numerics = numerics_key(settings) == original.record.numerics_key
    equal = rendered == original.record.frames_hash
    body = {
        "clip_id": original.record.clip_id,
        "equal": equal,
        "same_numerics": same_numerics,
        "frames_hash": rendered,
        "recorded": original.record.frames_hash,
    }
    click.echo(json.dumps(body, indent=1) if as_json else explain(body))
    return EXIT_OK if equal else EXIT_CHECK_FAILED


def explain(body: Mapping[str, Any]) -> str:
    """The outcome in a sentence."""
    if body["equal"]:
        return f"{body['clip_id']}: equal, frame for frame ({body['frames_hash'][:16]})"
    why = "" if body["same_numerics"] else "; this machine's numerics differ from the record's, so bits may differ"
    return f"{body['clip_id']}: NOT equal: {body['frames_hash'][:16]}, recorded {body['recorded'][:16]}{why}"


def load_original(path: str, given: Mapping[str, Any]) -> Original:
    """Read a record and its run.json, from a folder or S3.

    Raises:
        UsageError: there is no such record under an output root.
        CheckFailed: it is no record.
    """
    check_address("the record's address", path)
    root, separator, key = path.rpartition("/clips/")
    if not separator:
        raise UsageError(f"{path}: expected the path or URL of a record, OUT/clips/<2 hex>/<clip_id>.json")
    store = open_store(root or ".", reach(given))
    blob, run = store.get(f"clips/{key}"), load_run(store)
    if blob is None or run is None:
        raise UsageError(f"{path}: no such record, or no run.json in {root}")
    try:
        return Original(Record.model_validate_json(blob.body), run)
    except ValidationError as error:
        raise CheckFailed(
            f"{path} is no record: {error.error_count()} faults, first {error.errors()[0]['msg']}"
        ) from error


def check_integrity(original: Original) -> None:
    """A record whose parts contradict each other was changed by somebody.

    Raises:
        CheckFailed: naming the part.
    """
    record, run = original.record, original.run
    try:
        request = RenderRequest.from_json(record.request)
    except (TypeError, ValueError) as error:
        raise CheckFailed(f"record of {record.clip_id}: its request is damaged: {error}") from error
    if request.digest != record.request_digest:
        raise CheckFailed(f"record of {record.clip_id}: its request does not have its digest; the record was changed")
    if request.clip_id != record.clip_id or run.fingerprint != record.fingerprint:
        raise CheckFailed(f"record of {record.clip_id}: it belongs to another clip or another run")


def checkpoint_of(original: Original, given: Mapping[str, Any]) -> Checkpoint:
    """The run's checkpoint, by name or as told.

    Raises:
        UsageError: it is another one.
    """
    checkpoint = open_checkpoint(str(given.get("model") or original.run.profile["model"]), reach(given))
    if checkpoint.digest != original.run.settings["checkpoint"]:
        wanted = original.run.settings["checkpoint"][:12]
        raise UsageError(f"--model {checkpoint.name} has digest {checkpoint.digest[:12]}, the run's has {wanted}")
    return checkpoint


def settings_of(original: Original, checkpoint: Checkpoint, given: Mapping[str, Any]) -> Settings:
    """The run's settings, on this machine."""
    run = original.run
    semantic = {key: value for key, value in run.settings.items() if key not in ("checkpoint", "preset", "lora")}
    kept = {key: run.profile.get(key) for key in RESTORED}  # what an older run did not know had its default then
    kept["lora"] = run.profile.get("lora", ())  # the fingerprint knows digests; where the files were is told here
    kept["mesh"] = ",".join(f"{axis}={degree}" for axis, degree in run.profile["mesh"].items())
    layers = {**kept, **semantic, **given, "model": checkpoint.name, "out": "reproduce", "replicas": 1}
    preset = load_preset(str(run.settings["preset"]), checkpoint.preset)
    known = {key: value for key, value in layers.items() if value is not None}
    settings = resolve(known, preset, run.profile["profile"])
    if settings.threads is None:  # a rank of the run had its share of the cores, also where replicas took theirs
        shared = settings.model_copy(update={"replicas": int(run.profile.get("replicas") or 1)})
        settings = settings.model_copy(update={"threads": rank_threads(shared)})
    return settings


def check_adapters(original: Original, settings: Settings) -> None:
    """The adapters must be the run's.

    Raises:
        UsageError: A file holds something else now.
    """
    found = [adapter.identity for adapter in find_adapters(settings.lora, store_options(settings))]
    if found != original.run.settings.get("lora", []):
        raise UsageError(f"--lora: {found} are not the run's adapters {original.run.settings.get('lora', [])}")


def render_hash(record: Record, settings: Settings, checkpoint: Checkpoint, reader: ImageReader) -> str:
    """Render the clip and hash its frames."""
    request = RenderRequest.from_json(record.request)
    images, _ = images_of(request, reader, settings.resize)
    with open_scratch(settings.scratch) as folder:
        engine = RemoteEngine(spec_of(settings, checkpoint, folder / "ranks", 0))
        try:
            digest = FramesHash(request.num_frames, request.height, request.width)
            for event in render(engine, request, DenoiseOptions(images=tuple(images))):
                if isinstance(event, Slab):
                    digest.update(event.frames)
                elif isinstance(event, Step):
                    click.echo(f"\r{event.stage} {event.index}/{event.total}", nl=False, err=True)
            click.echo("", err=True)
            return digest.hexdigest()
        finally:
            engine.close()
