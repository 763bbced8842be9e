"""What `run`, `plan` and `validate` do alike before anything is spent: settings, checkpoint, checked manifest."""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batch_gen import checkpoint as checkpoints
from batch_gen.adapters import find_adapters
from batch_gen.blocklist import read_block_list
from batch_gen.checkpoint import Checkpoint
from batch_gen.chunks import PlanRow
from batch_gen.config import Preset, Settings, default_profile, load_preset, preset_names, resolve
from batch_gen.environment import worker_hint
from batch_gen.errors import ConfigError, UsageError
from batch_gen.estimate.choose import (
    Work,
    check_latents,
    check_memory,
    check_model_mesh,
    degrees_of,
    preset_work,
    question_of,
    with_mesh,
)
from batch_gen.estimate.published import published_checkpoint
from batch_gen.estimate.ranking import Question
from batch_gen.image_checks import ImageTable, check_images
from batch_gen.images import ImageReader
from batch_gen.interruption import parse_moment
from batch_gen.job_file import check_texts, read_job_file
from batch_gen.manifest import (
    Manifest,
    ManifestOptions,
    ManifestSource,
    local_source,
    parse_overrides,
    read_ids,
    read_manifest,
)
from batch_gen.notify import check_target
from batch_gen.reach import REACH, reach
from batch_gen.request import Bucket, SamplingDefaults, clean_prompt
from batch_gen.storage.address import check_address
from batch_gen.storage.base import StoreOptions, open_store
from batch_gen.telemetry import outlets
from models.parallel.layout import LayoutError, check_routable, plan_replicas


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that is known before the first weight is read."""

    settings: Settings
    preset: Preset
    checkpoint: Checkpoint
    manifest: Manifest
    inputs: str
    images: ImageTable = field(default_factory=ImageTable)
    work: Work = field(default_factory=dict)

    def rows(self) -> Iterator[PlanRow]:
        """The wanted requests with their places, anew at every call."""
        for location, request in self.manifest.iter_located_requests():
            source = self.manifest.files[location.file_index].source.name
            yield PlanRow(self.images.placed(request), source, location.row_group, location.row)

    def num_blocked(self) -> int:
        """Clips that the block list will set aside."""
        block_list = read_block_list(self.settings.block_list)
        if block_list is None:
            return 0
        return sum(block_list.match(row.request.prompt) is not None for row in self.rows())

    @property
    def question(self) -> Question | None:
        """What the estimate is asked about this run; None for the fake engine."""
        return question_of(self.settings, self.checkpoint, self.work)

    def fingerprint_settings(self) -> dict[str, Any]:
        """The settings that form the run's fingerprint."""
        adapters = [found.identity for found in find_adapters(self.settings.lora, store_options(self.settings))]
        return {"checkpoint": self.checkpoint.digest, **self.settings.semantic(), "lora": adapters}


def prepare(sources: Sequence[str], given: Mapping[str, Any], *, weights: bool = True) -> Prepared:
    """Resolve settings, find the checkpoint and check the whole manifest.

    Args:
        sources: manifest files, folders or s3:// URLs.
        given: the flags that somebody set, by key.
        weights: False where nothing is rendered: weights are neither fetched nor hashed, the digest is empty.

    Raises:
        UsageError, ConfigError, CheckpointError, ManifestError: exit code 2; nothing was started.
    """
    for source in sources:
        check_address("a manifest's address", source)
    layers = layers_of(given)
    layers["out"] = default_out(sources) if layers.get("out") is None else str(layers["out"])
    settings, preset, checkpoint = resolve_run(layers, weights=weights)
    options = manifest_options(settings, preset, checkpoint)
    manifest = read_manifest(manifest_sources(sources, settings), preset.sampling, checkpoint.limits, options)
    images = check_images(manifest, ImageReader(None, store_options(settings)), settings.resize)
    work = work_of(manifest, images)
    settings = place(settings, checkpoint, work, layers)
    check_step_cache(settings, manifest)
    return Prepared(settings, preset, checkpoint, manifest, inputs_digest(manifest, settings, preset), images, work)


def work_of(manifest: Manifest, images: ImageTable) -> Work:
    """Clips by shape, steps and guidance: by columns, or clip by clip where images decide the sizes."""
    if images.rule != "fit" or not images.sizes:
        return manifest.survey.work
    found: Counter[tuple[Bucket, int, bool]] = Counter()
    for _, request in manifest.iter_located_requests():
        clip = images.placed(request)
        found[clip.bucket, clip.steps, max(clip.guidance_high, clip.guidance_low) > 1] += 1
    return found


def layers_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Job file and flags, flags over it.

    Raises:
        ConfigError: the job file is wrong. UsageError: an empty text, an address that is none or may hold a secret.
    """
    check_texts(given)
    layers = {**read_job_file(given.get("config"), reach(given)), **given}
    check_texts(layers)
    reach(layers)
    return layers


def prepare_preset(given: Mapping[str, Any]) -> tuple[Settings, Checkpoint, Work]:
    """As `prepare` for a plan without a manifest: one clip of the preset.

    Raises:
        UsageError, ConfigError, CheckpointError, MemoryTooSmall: exit code 2.
    """
    layers = {"out": "", **layers_of(given)}
    settings, preset, checkpoint = resolve_run(layers, weights=False)
    work = preset_work(preset, checkpoint)
    return place(settings, checkpoint, work, layers), checkpoint, work


def resolve_run(layers: Mapping[str, Any], *, weights: bool = True) -> tuple[Settings, Preset, Checkpoint]:
    """Find the checkpoint, its preset and all settings; `--mesh auto` is one rank until `place`."""
    model = str(layers.get("model") or checkpoints.default_model(str(layers["out"])))
    checkpoint = published_checkpoint(model) or checkpoints.open_checkpoint(model, reach(layers), weights=weights)
    preset = load_preset(str(layers.get("preset") or checkpoint.preset), checkpoint.preset)
    values = {**layers, "model": model}
    if is_auto(layers):
        replicas = layers.get("replicas")  # kept, so that its bounds are checked; the profile's belong to its mesh
        values |= {"mesh": "tp=1", "replicas": 1 if replicas is None else replicas}
    settings = resolve(values, preset, str(layers.get("profile") or default_profile()))
    check_combinations(settings)
    check_model_mesh(settings, checkpoint)
    return settings, preset, checkpoint


def is_auto(layers: Mapping[str, Any]) -> bool:
    """Whether the mesh is to be chosen."""
    return str(layers.get("mesh", "")).strip() == "auto"


def place(settings: Settings, checkpoint: Checkpoint, work: Work, layers: Mapping[str, Any]) -> Settings:
    """Choose the mesh for `--mesh auto`; other settings stay as they are.

    Raises:
        ConfigError: the mesh does not divide the model. MemoryTooSmall: no mesh fits.
    """
    question = question_of(settings, checkpoint, work) if is_auto(layers) else None
    if question is None:
        return settings
    replicas = layers.get("replicas")
    settings = with_mesh(settings, question, None if replicas is None else int(replicas))
    check_mesh(settings)
    return settings


def check_run_memory(prepared: Prepared) -> None:
    """On Neuron what does not fit is known before the start; elsewhere, what never could.

    Raises:
        MemoryTooSmall: exit code 2, unless `--ignore-memory`.
    """
    check_work_memory(prepared.settings, prepared.checkpoint, prepared.manifest.survey.work)


def check_work_memory(settings: Settings, checkpoint: Checkpoint, work: Work) -> None:
    """As `check_run_memory`, of clips that need not come from a manifest."""
    question = question_of(settings, checkpoint, work)
    if question is not None:
        check = check_memory if settings.device == "neuron" else check_latents
        check(settings, question)


def check_combinations(settings: Settings) -> None:
    """Settings that make sense only together; everything that can be refused is refused before the start."""
    if settings.max_cost is not None and settings.price_per_hour is None:
        raise UsageError("--max-cost needs --price-per-hour: what an hour of this machine costs")
    if settings.on_clip is not None:
        check_target(settings.on_clip)
    outlets(emf=settings.emf, prometheus=settings.prometheus)
    check_compile(settings)
    check_clips_per_step(settings)
    read_block_list(settings.block_list)
    if settings.drain_at is not None:
        parse_moment(settings.drain_at)
    if settings.shard is not None:
        worker_hint(settings.shard)
    find_adapters(settings.lora, store_options(settings))
    check_mesh(settings)
    if settings.mesh.num_ranks > 1 and settings.model.partition(":")[0] == "fake":
        raise UsageError("--model fake has no mesh; leave --mesh out")


def check_compile(settings: Settings) -> None:
    """What is compiled, by what, and where compiled graphs come from.

    Raises:
        ConfigError: settings that contradict each other.
    """
    if settings.device == "neuron" and settings.compile_backend == "inductor":
        raise ConfigError("--compile-backend inductor: device neuron has its own compiler; use auto")
    if settings.compile == "off" and settings.graphs is not None:
        raise ConfigError("--graphs needs --compile block or model; with --compile off there are no graphs")
    if settings.graphs_digest is not None and settings.graphs is None:
        raise ConfigError("--graphs-digest needs --graphs: the store that holds them")


def check_clips_per_step(settings: Settings) -> None:
    """Clips go together only where each of them can have the bits that it has alone.

    Raises:
        ConfigError: with the setting that stands in the way.
    """
    if settings.clips_per_step == 1:
        return
    reasons = {
        "--mesh with several ranks": settings.mesh.num_ranks > 1,
        "--compile, whose graphs are of one clip": settings.compile != "off",
        "--step-cache, which decides clip by clip": settings.step_cache is not None,
    }
    for reason, stands in reasons.items():
        if stands:
            raise ConfigError(
                f"--clips-per-step {settings.clips_per_step} does not go with {reason}; use --clips-per-step 1"
            )


def check_step_cache(settings: Settings, manifest: Manifest) -> None:
    """Step caching must be able to do something for every clip.

    Raises:
        ConfigError: With the first row that is too short for it, or a setting that it cannot work with.
    """
    if settings.step_cache is None:
        return
    if settings.compile == "model":
        raise ConfigError("--step-cache decides between blocks; it cannot work with --compile model: use block or off")
    for location, request in manifest.iter_located_requests():
        if request.steps <= settings.step_cache_warm_up:
            where = f"{manifest.files[location.file_index].source.name}, row {location.row}"
            raise ConfigError(
                f"--step-cache: {where} has {request.steps} steps, all of them within --step-cache-warm-up "
                f"{settings.step_cache_warm_up}; leave the cache out or lower the warm-up"
            )


def check_mesh(settings: Settings) -> None:
    """The mesh and its replicas must have a place on the device.

    Raises:
        ConfigError: with every factor, and what to use instead.
    """
    degrees = degrees_of(settings)
    num_cores = None if settings.device == "neuron" else degrees.size * settings.replicas
    try:
        layouts = plan_replicas(settings.layout, degrees, settings.replicas, num_cores)
        if settings.device == "neuron" and not settings.profile.startswith("trn3"):
            for layout in layouts:
                check_routable(layout)
    except LayoutError as error:
        raise ConfigError(f"mesh {settings.mesh}, {settings.replicas} replicas: {error}") from error


def default_out(sources: Sequence[str]) -> str:
    """`./<manifest stem>-out`."""
    if not sources:
        raise UsageError("no manifest given; example: batch-gen run manifest.parquet")
    return f"{Path(sources[0].rstrip('/')).stem}-out"


def manifest_options(settings: Settings, preset: Preset, checkpoint: Checkpoint) -> ManifestOptions:
    """How the manifest is read under these settings."""
    return ManifestOptions(
        run_seed=settings.run_seed,
        preset=preset.name,
        presets=row_presets(preset, checkpoint),
        overrides=parse_overrides(settings.override, checkpoint.limits),
        where=settings.where,
        ids=read_ids(Path(settings.ids)) if settings.ids else None,
        limit=settings.limit,
        fold_case=not settings.out.startswith("s3://"),
        count_tokens=None if settings.no_token_check else token_counter(checkpoint),
        long_prompt=settings.long_prompt,
    )


def row_presets(preset: Preset, checkpoint: Checkpoint) -> dict[str, SamplingDefaults]:
    """Presets that a row may name: those that differ from the run's in sampling values alone."""
    found = {}
    for name in preset_names():
        other = load_preset(name, checkpoint.preset)
        if (other.architecture, other.dtype, other.solver) == (preset.architecture, preset.dtype, preset.solver):
            found[name] = other.sampling
    return found


def token_counter(checkpoint: Checkpoint) -> Any:
    """Counts tokens with the checkpoint's own tokenizer, without torch; None where it has no tokenizer.json."""
    if checkpoint.folder is None or not (checkpoint.folder / "tokenizer" / "tokenizer.json").exists():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint.folder / "tokenizer" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def count(prompts: Sequence[str]) -> list[int]:
        cleaned = [clean_prompt(prompt) for prompt in prompts]
        return [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(cleaned)]

    return count


def manifest_sources(sources: Sequence[str], settings: Settings) -> list[ManifestSource]:
    """Local files as they are; files on S3 are copied to this machine first."""
    if not sources:
        raise UsageError("no manifest given; example: batch-gen run manifest.parquet")
    return [_fetched(source, settings) if source.startswith("s3://") else local_source(source) for source in sources]


def store_options(settings: Settings) -> StoreOptions:
    """How the settings want stores to be reached."""
    return reach({name: getattr(settings, name) for name in REACH})


def inputs_digest(manifest: Manifest, settings: Settings, preset: Preset) -> str:
    """Digest of the manifest's bytes and of everything that selects and fills its rows."""
    digest = hashlib.sha256()
    for file in manifest.files:
        with file.source.path.open("rb") as body:
            digest.update(hashlib.file_digest(body, "sha256").digest())
    selection = [settings.limit, settings.where, list(settings.override), settings.run_seed]
    selection += [Path(settings.ids).read_text("utf-8-sig") if settings.ids else None, str(preset.sampling)]
    digest.update(json.dumps(selection).encode())
    return digest.hexdigest()


def _fetched(url: str, settings: Settings) -> ManifestSource:
    folder = Path(tempfile.mkdtemp(prefix="batch-gen-manifest-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    root, _, name = url.rpartition("/")
    if not name or root == "s3:/":
        return _fetched_folder(url.rstrip("/"), settings, folder)
    store = open_store(root, store_options(settings))
    if store.download(name, folder / name) is None:
        return _fetched_folder(url, settings, folder)
    return ManifestSource(folder / name, url, root)


def _fetched_folder(url: str, settings: Settings, folder: Path) -> ManifestSource:
    store = open_store(url, store_options(settings))
    keys = [listed.key for listed in store.list("") if listed.key.endswith(".parquet") and "/" not in listed.key]
    if not keys:
        raise UsageError(f"{url}: no such manifest")
    for key in keys:
        store.download(key, folder / key)
    return ManifestSource(folder, url, url)
