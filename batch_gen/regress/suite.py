"""A suite: a manifest of cases beside a YAML file of limits, resolved into everything that a night needs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Final, Literal

import yaml
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from batch_gen import strict_yaml
from batch_gen.adapters import find_adapters
from batch_gen.checkpoint import Checkpoint
from batch_gen.config import Settings
from batch_gen.errors import ConfigError, UsageError
from batch_gen.job_file import read_text
from batch_gen.manifest import Manifest
from batch_gen.preflight import preflight
from batch_gen.prepare import Prepared, prepare, store_options
from batch_gen.reach import reach
from batch_gen.records import Strict
from batch_gen.regress.documents import faults
from batch_gen.regress.results import Fingerprint, Platform
from batch_gen.request import RenderRequest
from batch_gen.storage.base import Store, StoreOptions, open_store
from batch_gen.versions import cpu_class, versions
from batch_gen.worker import numerics, numerics_key

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NO_PIXELS: Final = {"model", "codec", "crf", "file_metadata", "preset", "run_seed"}
"""Semantic settings that act after the frames, which are compared before any encoder saw them, or that stand in the
request with what they led to."""


class Limits(Strict):
    """What the gates allow; docs/regression.md says how each was chosen. A file or a case overrides single ones.

    Values are taken as they stand: a limit that is no number, or endless, would switch its gate off without a word.

    Attributes:
        exact: Whether equal numerics must give equal bits; off for hardware that does not repeat itself.
        psnr_min, ssim_min: Of the worst frame (dB; -1..1).
        good_psnr, good_ssim, bad_frames: A frame below one of the first two is bad; the share of frames that may be.
        drift_luma, drift_channel: Change of the mean of all frames, as a share of the baseline's mean.
        black, frozen: Frames that are so and are not in the baseline.
        flicker: Mean second difference of the luma, above the baseline's, 0..255.
        latents_cosine, latents_error: Cosine, and relative L2 error, of the final latents.
        bf16_error: Relative L2 error of a bfloat16 render of the case; `calibrate --bf16` measures it.
        latents_ratio: The error of the latents in units of `bf16_error`.
        prompt_following: Slots of the prompt that the baseline shows and the new clip does not.
        vmaf: Least mean score; None asks for none.
        speed_ratio, memory_ratio: Of the sum over all cases to the median of the last seven nights.
        case_speed_ratio: Of one case, whose seconds are noisier.
        speed_floor_s: A stage that lost less than this many seconds is not slow.
        min_nights: Nights that speed and memory need to be judged.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    exact: bool = True
    psnr_min: float = Field(35.0, ge=0, le=100)
    ssim_min: float = Field(0.95, ge=-1, le=1)
    good_psnr: float = Field(40.0, ge=0, le=100)
    good_ssim: float = Field(0.98, ge=-1, le=1)
    bad_frames: float = Field(0.05, ge=0, le=1)
    drift_luma: float = Field(0.002, ge=0)
    drift_channel: float = Field(0.004, ge=0)
    black: int = Field(0, ge=0)
    frozen: int = Field(0, ge=0)
    flicker: float = Field(0.5, ge=0)
    latents_cosine: float = Field(0.999, ge=-1, le=1)
    latents_error: float = Field(0.05, ge=0)
    bf16_error: float | None = Field(None, gt=0)
    latents_ratio: float = Field(3.0, gt=0)
    prompt_following: int = Field(0, ge=0, le=4)
    vmaf: float | None = Field(None, ge=0, le=100)
    speed_ratio: float = Field(1.10, ge=1)
    case_speed_ratio: float = Field(1.5, ge=1)
    speed_floor_s: float = Field(0.25, ge=0)
    memory_ratio: float = Field(1.10, ge=1)
    min_nights: int = Field(3, ge=1, le=7)


class Quarantine(Strict):
    """A case that is known to be flaky: it still runs, and its failures do not count until the date.

    Attributes:
        case: The clip_id.
        owner: Who mends it.
        why: What is known.
        until: Last day.
    """

    case: str
    owner: str = Field(min_length=1)
    why: str = Field(min_length=1)
    until: date

    @field_validator("until", mode="before")
    @classmethod
    def _is_day(cls, value: Any) -> Any:
        """A number would be taken for seconds since 1970."""
        if not isinstance(value, str | date):
            raise ValueError(f"{value!r} is no day such as 2026-12-31")  # noqa: TRY004 - pydantic takes this one
        return value


class SuiteFile(Strict):
    """The YAML file beside the manifest.

    Attributes:
        suite: Name, default the manifest's stem.
        taps: Which inner values are kept: of all steps, of the first, middle and last (large models), or none.
        limits: For all cases.
        cases: For single cases, by clip_id.
        quarantine: See `Quarantine`.
    """

    suite: str | None = None
    taps: Literal["all", "ends", "none"] = "all"
    limits: dict[str, Any] = Field(default_factory=dict)
    cases: dict[str, dict[str, Any]] = Field(default_factory=dict)
    quarantine: tuple[Quarantine, ...] = ()

    @model_validator(mode="after")
    def _limits_are_limits(self) -> SuiteFile:
        """Wrong names and values are told with the file, not when the first case is judged."""
        wrong = []
        for where, own in (("limits.", self.limits), *((f"cases.{name}.", own) for name, own in self.cases.items())):
            try:
                Limits.model_validate(own)
            except ValidationError as error:
                wrong.append(faults(error, where))
        named = [entry.case for entry in self.quarantine]
        wrong += [f"quarantine: {case} stands there twice" for case in sorted(set(named)) if named.count(case) > 1]
        if wrong:
            raise ValueError("; ".join(wrong))
        return self

    def limits_of(self, case: str) -> Limits:
        """The limits that hold for a case."""
        return Limits.model_validate({**self.limits, **self.cases.get(case, {})})


@dataclass(frozen=True, slots=True)
class Setup:
    """A suite on this machine: all that is known before the first weight is read.

    Args:
        name: Of the suite.
        file: Limits, taps, quarantine.
        requests: The cases, in order.
        settings, checkpoint: As of a run.
        store: Root of baselines and results.
        prepared: What settings and checkpoint came from; its manifest holds the bytes of binary images.
        graphs: Where the ranks find compiled graphs; None for this machine's own.
    """

    name: str
    file: SuiteFile
    requests: tuple[RenderRequest, ...]
    settings: Settings
    checkpoint: Checkpoint
    store: Store
    prepared: Prepared
    graphs: Path | None = None

    @property
    def manifest(self) -> Manifest:
        """The suite's manifest."""
        return self.prepared.manifest

    @property
    def platform(self) -> Platform:
        """The class of this machine."""
        return platform_of(self.settings)

    @property
    def fingerprint(self) -> Fingerprint:
        """What decides this machine's pixels."""
        semantic = {key: value for key, value in self.settings.semantic().items() if key not in _NO_PIXELS}
        adapters = find_adapters(self.settings.lora, store_options(self.settings))
        semantic["lora"] = [adapter.identity for adapter in adapters]  # by content, wherever the files lie
        return Fingerprint(
            checkpoint=self.checkpoint.digest,
            settings=semantic,
            numerics=numerics(self.settings),
            numerics_key=numerics_key(self.settings),
            versions=versions(),
        )

    def taps_of(self, request: RenderRequest) -> tuple[str, ...]:
        """Names of the inner values that the engine shall show."""
        if self.file.taps == "none":
            return ()
        every = range(request.steps)
        steps = every if self.file.taps == "all" else sorted({0, request.steps // 2, request.steps - 1})
        return ("text", *(f"{what}.{step}" for step in steps for what in ("latents", "velocity")))


def prepare_suite(sources: Sequence[str], given: Mapping[str, Any]) -> Setup:
    """Read and check a suite and everything that its renders need.

    Args:
        sources: The manifest, as `run` takes it.
        given: Flags of a run by key; `limits` is the YAML file, a path or s3:// URL, by default the manifest's name
            with `.yaml` where that is a file.

    Raises:
        BatchGenError: exit code 2; nothing was started.
    """
    flags = {key: value for key, value in given.items() if key != "limits"}
    check_sources(sources)
    file = read_suite_file(limits_path(sources, given.get("limits")), reach(given))
    name = checked_name(file.suite or Path(sources[0].rstrip("/")).stem)
    prepared = prepare(sources, flags)
    requests = tuple(row.request for row in prepared.rows())
    check_cases(file, requests, narrowed=any(flags.get(key) for key in ("limit", "ids", "where")))
    store = open_store(prepared.settings.out, store_options(prepared.settings))
    supply = preflight(prepared)
    graphs = None if supply is None else supply.folder
    return Setup(name, file, requests, prepared.settings, prepared.checkpoint, store, prepared, graphs)


def with_dtype(setup: Setup, dtype: Literal["float32", "bfloat16"]) -> Setup:
    """The suite in another arithmetic, which needs memory and graphs of its own.

    Raises:
        BatchGenError: exit code 2; as `prepare_suite`.
    """
    settings = setup.settings.model_copy(update={"dtype": dtype})
    prepared = replace(setup.prepared, settings=settings)
    supply = preflight(prepared)
    graphs = None if supply is None else supply.folder
    return replace(setup, settings=settings, prepared=prepared, graphs=graphs)


def check_sources(sources: Sequence[str]) -> None:
    """Refuse what cannot be a manifest, and a suite's name where its manifest is wanted.

    Raises:
        UsageError: with what to give instead.
    """
    wanted = "expected the suite's manifest, a .parquet file or a folder of them"
    for source in sources or [""]:
        if Path(source).name in ("", ".."):
            raise UsageError(f"manifest {source!r} has no name; {wanted}")
        is_bare = "/" not in source and not source.endswith(".parquet")
        if is_bare and not Path(source).exists():
            raise UsageError(f"{source}: there is no such file or folder; {wanted}, not the suite's name")


def suite_name(text: str) -> str:
    """A suite by its name, or by its manifest: a path, recognised by its slash or its `.parquet`.

    Raises:
        UsageError: what is neither.
        ConfigError: the limits beside the manifest are damaged.
    """
    if "/" not in text and not text.endswith(".parquet"):
        return checked_name(text)
    check_sources([text])
    return checked_name(read_suite_file(limits_path([text], None)).suite or Path(text.rstrip("/")).stem)


def checked_name(name: str) -> str:
    """Raises UsageError for a name that cannot be a folder of a store."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"suite {name!r}: expected letters, digits, '.', '-', '_'; name it with `suite:` in its limits"
        )
    return name


def limits_path(sources: Sequence[str], given: str | None) -> str | None:
    """The limits file: the one given, else the manifest's name with `.yaml` where that exists."""
    if given is not None:
        return given
    beside = Path(sources[0]).with_suffix(".yaml") if sources and "://" not in sources[0] else None
    return str(beside) if beside is not None and beside.is_file() else None


def read_suite_file(path: str | None, options: StoreOptions | None = None) -> SuiteFile:
    """Read the limits; no file means the defaults.

    Raises:
        ConfigError: unreadable, or a key or value that is none.
    """
    if path is None:
        return SuiteFile()
    try:
        raw = strict_yaml.load(read_text("limits", path, options))
        return SuiteFile.model_validate({} if raw is None else raw)
    except ValidationError as error:
        raise ConfigError(f"limits {path}: {faults(error)}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"limits {path}: {error}") from error


def check_cases(file: SuiteFile, requests: Sequence[RenderRequest], *, narrowed: bool) -> None:
    """Limits and quarantine must name cases of the suite, unless only some were asked for.

    Raises:
        ConfigError: a name that no case has; most likely a typing error that would let a limit slip.
    """
    known = {request.clip_id for request in requests}
    named = [*file.cases, *(entry.case for entry in file.quarantine)]
    unknown = sorted(set(named) - known)
    if unknown and not narrowed:
        raise ConfigError(f"limits name {', '.join(unknown)}, but the suite has {', '.join(sorted(known))}")


def platform_of(settings: Settings) -> Platform:
    """The class of machines whose baselines hold for each other."""
    if settings.device == "neuron":
        chip = settings.profile.partition("-")[0]
    else:
        chip = cpu_class() if settings.device == "cpu" else gpu_name()
    release = versions().get("torch", "none").split("+")[0].split(".")
    return Platform(device=settings.device, chip=slug(chip), torch=".".join(release[:2]))


def gpu_name() -> str:
    """Model of the first CUDA device as its driver says it, `cuda` where it says nothing."""
    for facts in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in facts.read_text("utf-8", "replace").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return "cuda"


def slug(text: str) -> str:
    """Lower case letters, digits and dots, everything else as single dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")[:60] or "unknown"
