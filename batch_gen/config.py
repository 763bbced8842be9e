"""Settings of a run: preset + profile < `--config job.yaml` < flags; manifest cells and `--override` follow, per row.

One frozen model holds every setting of `flags.py`; YAML keys equal flag names; nothing else is accepted.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from batch_gen import strict_yaml
from batch_gen.errors import ConfigError
from batch_gen.flags import FLAGS, SEMANTIC
from batch_gen.job_file import blame
from batch_gen.request import SamplingDefaults

_STRICT = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
RATE_KEY = "cost_per_s"
_DEGREE = re.compile(r"\s*(\w+)\s*=\s*(\d+)\s*", re.ASCII)
_PROFILE_KEYS: tuple[str, ...] = ("device", "mesh", "replicas", "attention", "kernels", "compile", "threads")
_PROFILE_KEYS += ("experts", "tp_sequence_parallel")
# The autoencoder's authors run it in float32. A Neuron core does a quarter of its bfloat16 work in float32, and with
# float32 strips the 720p ring on tp=4,cp=8,cfg=2 no longer fits; the programs measured there decode in bfloat16.
VAE_DTYPES = {"neuron": "bfloat16", "cuda": "float32", "cpu": "float32"}


class Mesh(BaseModel):
    """Degrees of the rank mesh of one replica."""

    model_config = _STRICT
    tp: int = Field(1, ge=1, le=64)
    cp: int = Field(1, ge=1, le=64)
    cfg: int = Field(1, ge=1, le=2)

    @property
    def num_ranks(self) -> int:
        """Processes of one replica."""
        return self.tp * self.cp * self.cfg

    def __str__(self) -> str:
        return f"tp={self.tp},cp={self.cp},cfg={self.cfg}"

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Parse `tp=2,cp=2,cfg=2`; axes that are left out are 1."""
        found = [_DEGREE.fullmatch(part) for part in text.split(",") if part.strip()]
        degrees = {match[1]: int(match[2]) for match in found if match is not None}
        wrong = f"mesh {text!r}: expected degrees such as tp=2,cp=2,cfg=2 (cfg is 1 or 2)"
        if len(degrees) < len(found):
            raise ConfigError(wrong)
        try:
            return cls(**degrees)
        except ValidationError as error:
            raise ConfigError(wrong) from error


class Preset(BaseModel):
    """What a clip looks like where its row says nothing."""

    model_config = _STRICT
    name: str
    architecture: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    solver: Literal["unipc", "euler"] = "unipc"
    sampling: SamplingDefaults


class Settings(BaseModel):
    """Every setting of a run, resolved. Field names are the keys of `flags.FLAGS`."""

    model_config = _STRICT
    model: str
    preset: str
    dtype: Literal["float32", "bfloat16"]
    vae_dtype: Literal["float32", "bfloat16"]
    solver: Literal["unipc", "euler"]
    quantization: Literal["none", "fp8_row"]
    modules_to_not_convert: tuple[str, ...]
    lora: tuple[str, ...]
    step_cache: float | None = Field(None, gt=0.0)
    step_cache_warm_up: int = Field(ge=1)
    step_cache_max_run: int = Field(ge=1)
    decode: Literal["exact", "tiled", "reference"]
    codec: Literal["h264", "h265_10bit", "ffv1", "x264_lossless"]
    crf: int = Field(ge=0, le=51)
    file_metadata: bool
    long_prompt: Literal["truncate", "fail"]
    resize: Literal["crop", "fit", "exact"]
    run_seed: int = Field(ge=0, le=2**63 - 1)
    out: str
    profile: str
    config: str | None
    device: Literal["cpu", "cuda", "neuron"]
    mesh: Mesh
    for_: Literal["throughput", "latency"] = Field(alias="for")
    layout: str = "arithmetic"
    replicas: int = Field(ge=1, le=64)
    attention: Literal["auto", "ring", "gather"]
    kernels: Literal["reference", "nki"]
    experts: Literal["resident", "swap"]
    tp_sequence_parallel: bool
    compile: Literal["off", "block", "model"]
    compile_backend: Literal["auto", "inductor", "eager"]
    graphs: str | None
    graphs_digest: str | None = Field(None, pattern="^[0-9a-f]{64}$")
    allow_compile: bool
    threads: int | None = Field(None, ge=1)
    scratch: str | None
    limit: int | None = Field(None, ge=1)
    ids: str | None
    where: str | None
    override: tuple[str, ...]
    shard: str | None
    assign: Literal["lease", "static"]
    chunk_requests: int | None = Field(None, ge=1, le=64)
    lease_ttl: float = Field(ge=1.0)
    continue_: bool = Field(alias="continue")
    keep_latents: bool
    max_failures: str
    ok_with_quarantine: bool
    clips_per_step: int = Field(ge=1, le=64)
    drain_budget: float = Field(ge=0.0)
    block_list: str | None
    drain_at: str | None
    on_clip: str | None
    max_cost: float | None = Field(None, gt=0.0)
    price_per_hour: float | None = Field(None, gt=0.0)
    max_hours: float | None = Field(None, gt=0.0)
    stall_timeout: float | None = Field(None, gt=0.0)
    require_same_numerics: bool
    no_token_check: bool
    ignore_memory: bool
    s3_endpoint: str | None
    s3_checksum: Literal["when_supported", "when_required"]
    s3_kms_key: str | None
    s3_storage_class: str | None
    s3_tags: str | None
    s3_bucket_owner: str | None
    s3_requester_pays: bool
    emf: bool
    prometheus: str | None
    quiet: bool

    @field_validator("mesh", mode="before")
    @classmethod
    def _mesh(cls, value: Any) -> Any:
        return Mesh.parse(value) if isinstance(value, str) else value

    @field_validator("max_failures")
    @classmethod
    def _max_failures(cls, value: str) -> str:
        number = float(value) if value.isascii() and "_" not in value else -1.0
        if not number >= 0 or (number >= 1 and not number.is_integer()):
            raise ValueError("must be a whole count such as 20, or a share below 1 such as 0.5")
        return value

    def semantic(self) -> dict[str, Any]:
        """The settings that decide what a clip looks like, for the fingerprint."""
        values = self.model_dump(mode="json", by_alias=True)
        return {flag.key: values[flag.key] for flag in SEMANTIC if flag.key != "model"}


def load_preset(name: str, checkpoint_preset: str) -> Preset:
    """Load a preset by name.

    Args:
        name: a name under batch_gen/presets.
        checkpoint_preset: what `extends: checkpoint` refers to.

    Raises:
        ConfigError: no such preset, or its file is wrong.
    """
    raw = _load_named("presets", name)
    if raw.pop("extends", None) == "checkpoint":
        base = load_preset(checkpoint_preset, checkpoint_preset)
        steps = max(1, round(base.sampling.steps * float(raw.pop("scale_steps", 1.0))))
        sampling = dataclasses.replace(base.sampling, steps=steps)
        return base.model_copy(update={"name": name, "sampling": sampling})
    sampling_raw = dict(raw.pop("sampling"))
    sampling_raw["fps"] = Fraction(str(sampling_raw["fps"]))
    return Preset(name=name, sampling=SamplingDefaults(**sampling_raw), **raw)


def preset_names() -> list[str]:
    """Names of all presets."""
    return _names("presets")


def profile_names() -> list[str]:
    """Names of all profiles."""
    return _names("profiles")


def load_profile(name: str) -> dict[str, Any]:
    """Load a profile: operational settings of a machine."""
    raw = _load_named("profiles", name)
    unknown = set(raw) - {*_PROFILE_KEYS, "layout", RATE_KEY}
    if unknown:
        raise ConfigError(f"profile {name!r}: unknown keys {', '.join(sorted(unknown))}")
    return raw


def default_profile() -> str:
    """The profile of this machine when none is named."""
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"


def resolve(given: Mapping[str, Any], preset: Preset, profile: str) -> Settings:
    """Put all layers together.

    Args:
        given: job file and flags, merged, without those that nobody set.
        preset: the loaded preset.
        profile: name of the profile.

    Raises:
        ConfigError: a value is outside its rule; every fault is named.
    """
    layers: dict[str, Any] = {flag.key: flag.default for flag in FLAGS}
    layers |= {"dtype": preset.dtype, "solver": preset.solver}
    layers |= {key: value for key, value in load_profile(profile).items() if key != RATE_KEY}
    if given.get("mesh", layers["mesh"]) != layers["mesh"] and str(layers.get("layout", "")).startswith("trn2-"):
        layers["layout"] = "trn2"  # the named layouts belong to their profile's mesh; this one places any
    layers |= dict(given)
    layers |= {"preset": preset.name, "profile": profile}
    if layers["vae_dtype"] is None:
        layers["vae_dtype"] = VAE_DTYPES.get(str(layers["device"]))
    try:
        return Settings.model_validate(layers)
    except ValidationError as error:
        raise ConfigError("; ".join(_fault(item, given) for item in error.errors())) from error


def _fault(item: Any, given: Mapping[str, Any]) -> str:
    """What is wrong with one setting, and where it was said."""
    key = str(item["loc"][0]) if item["loc"] else ""
    inner = "".join(f".{part}" for part in item["loc"][1:])
    return f"{blame(key, given.get(key), given)}{inner}: {item['msg']}"


def num_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load_named(folder: str, name: str) -> dict[str, Any]:
    if name not in _names(folder):
        raise ConfigError(f"{folder[:-1]} {name!r} does not exist{_suggest(name, _names(folder))}")
    text = resources.files("batch_gen").joinpath(folder, f"{name}.yaml").read_text("utf-8")
    raw = strict_yaml.load(text)
    assert isinstance(raw, dict)
    return raw


def _names(folder: str) -> list[str]:
    root = resources.files("batch_gen").joinpath(folder)
    return sorted(item.name.removesuffix(".yaml") for item in root.iterdir() if item.name.endswith(".yaml"))


def _suggest(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, known, n=1)
    return f" (did you mean {near[0]!r}?)" if near else f"; known: {', '.join(known)}"
