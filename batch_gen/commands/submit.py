"""`batch-gen submit`: a checked manifest becomes an array job."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from batch_gen.config import read_job_file
from batch_gen.errors import EXIT_AGAIN, EXIT_OK, ConfigError, UsageError
from batch_gen.prepare import Prepared, prepare, store_options
from batch_gen.storage.base import Store, open_store
from batch_gen.submit import limits
from batch_gen.submit.definition import SCRATCH, Fleet, job_definition, submission, worker_command
from batch_gen.submit.local import run_local
from batch_gen.submit.upload import upload_files

JOBS_PREFIX = "submit/jobs/"
# `out` and `model` are given as prepared, the job file becomes flags, the other two are the container's.
_NOT_FOR_WORKERS = ("out", "model", "config", "shard", "scratch")
_LOCAL_FILES = ("ids", "block_list")


def submit(sources: Sequence[str], given: Mapping[str, Any], fleet_options: Mapping[str, Any], *, dry_run: bool) -> int:
    """Check everything, then submit (or print, or run here)."""
    prepared = prepare(sources, given)
    local = int(fleet_options.get("local") or 0)
    if not local:
        refuse_local_paths(prepared)
        if not dry_run and not fleet_options.get("image"):
            raise UsageError("--image must be given: the container image by digest (repository@sha256:...)")
    fleet = fleet_of(fleet_options, prepared)
    definition = job_definition(fleet)
    store = open_store(prepared.settings.out, store_options(prepared.settings))
    if local:
        return _run_here(sources, given, prepared, local, definition)
    urls = upload_files(store, sources, dry_run=True)
    command = worker_command(urls, {**_worker_options(given, prepared), "out": prepared.settings.out})
    body = submission(fleet, job_name(prepared), definition["jobDefinitionName"], command)
    refuse(faults_of(fleet, definition, body))
    if dry_run:
        click.echo(json.dumps({"jobDefinition": definition, "submitJob": body}, indent=1))
        return EXIT_OK
    upload_files(store, sources)
    return _submit(store, fleet_options, definition, body, prepared)


def fleet_of(options: Mapping[str, Any], prepared: Prepared) -> Fleet:
    """The fleet from the command's options."""
    hours = prepared.settings.max_hours
    return Fleet(
        queue=options.get("queue") or "batch-gen",
        image=options.get("image") or "batch-gen@sha256:" + "0" * 64,
        job_role=options.get("job_role"),
        execution_role=options.get("execution_role"),
        num_nodes=int(options.get("nodes") or 1),
        attempts=int(options.get("attempts") or 10),
        deadline_s=None if hours is None else hours * 3600.0,
        tags={"batch-gen-run": job_name(prepared), **dict(map(tag_of, options.get("tag") or ()))},
    )


def tag_of(text: str) -> tuple[str, str]:
    """Key and value of a `--tag`."""
    key, found, value = text.partition("=")
    if not found or not key:
        raise UsageError(f"--tag {text}: expected KEY=VALUE")
    return key, value


def faults_of(fleet: Fleet, definition: Mapping[str, Any], body: Mapping[str, Any]) -> Iterable[str]:
    """Every limit of AWS that this submission would break."""
    yield from limits.array_faults(fleet.num_nodes)
    yield from limits.definition_faults(definition)
    yield from limits.name_faults(body["jobName"], "job")
    yield from limits.size_faults(body)
    if fleet.deadline_s is not None:
        yield from limits.timeout_faults(definition["timeout"]["attemptDurationSeconds"], fleet.deadline_s)
    if "@sha256:" not in fleet.image:
        yield f"--image {fleet.image}: name the image by digest (repository@sha256:...), tags move"


def refuse(faults: Iterable[str]) -> None:
    """Raise ConfigError with all faults at once."""
    found = list(faults)
    if found:
        raise ConfigError("AWS Batch would not take this; nothing was submitted:\n  " + "\n  ".join(found))


def refuse_local_paths(prepared: Prepared) -> None:
    """A fleet reads from S3 alone.

    Raises:
        UsageError: output, weights, adapters, lists or images on this machine.
    """
    for key in _LOCAL_FILES:
        if (path := getattr(prepared.settings, key)) is not None:
            raise UsageError(f"--{key.replace('_', '-')} {path}: a fleet cannot read files of this machine")
    for adapter in prepared.settings.lora:
        if not adapter.startswith("s3://"):
            raise UsageError(f"--lora {adapter}: a fleet needs an s3:// file")
    if not prepared.settings.out.startswith("s3://"):
        raise UsageError(f"--out {prepared.settings.out}: a fleet needs an s3:// output")
    model = prepared.settings.model
    if prepared.checkpoint.folder is not None and not model.startswith("s3://") and model not in ("pocket", "tiny"):
        raise UsageError(f"--model {model}: a fleet needs an s3:// prefix or a built-in name")
    for row in prepared.rows():
        for column in ("image", "last_image"):
            value = getattr(row.request, column)
            if value is not None and not value.startswith(("s3://", "bytes:")):
                raise UsageError(f"{row.source}, row {row.row}, {column} = {value}: a fleet needs s3:// images")


def job_name(prepared: Prepared) -> str:
    """A name from the output root: letters, digits and dashes."""
    plain = "".join(char if char.isascii() and char.isalnum() else "-" for char in prepared.settings.out)
    return f"batch-gen-{plain.removeprefix('s3---')}"[:120].rstrip("-")


def _worker_options(given: Mapping[str, Any], prepared: Prepared) -> dict[str, Any]:
    told = {**read_job_file(given.get("config")), **given}
    options = {key: value for key, value in told.items() if key not in _NOT_FOR_WORKERS and value is not None}
    return {"scratch": SCRATCH, **options, "model": prepared.settings.model}


def _submit(
    store: Store, options: Mapping[str, Any], definition: Mapping[str, Any], body: dict[str, Any], prepared: Prepared
) -> int:
    from batch_gen.submit.batch import Batch

    batch = Batch(options.get("region"), options.get("batch_endpoint"))
    arn, is_new = batch.ensure_definition(definition)
    job_id = batch.submit({**body, "jobDefinition": arn})
    when = datetime.now(UTC).isoformat(timespec="seconds")
    nodes = body.get("arrayProperties", {}).get("size", 1)
    note = {"job_id": job_id, "definition": arn, "submitted": when, "nodes": nodes}
    store.create(f"{JOBS_PREFIX}{job_id}.json", json.dumps(note, indent=1).encode(), content_type="application/json")
    click.echo(f"job        {job_id} ({nodes} nodes), definition {'registered' if is_new else 'reused'}: {arn}")
    click.echo(f"next       batch-gen status {prepared.settings.out}")
    return EXIT_OK


def _run_here(
    sources: Sequence[str], given: Mapping[str, Any], prepared: Prepared, local: int, definition: Mapping[str, Any]
) -> int:
    options = {key: value for key, value in given.items() if key not in ("out", "shard")}
    command = worker_command(sources, {**options, "model": prepared.settings.model, "out": prepared.settings.out})
    children = run_local(command, local, definition["retryStrategy"])
    for child in children:
        click.echo(f"child {child.index}: exit codes {', '.join(map(str, child.exit_codes))}")
    codes = [child.exit_codes[-1] for child in children]
    return max(codes) if max(codes) != 137 else EXIT_AGAIN
