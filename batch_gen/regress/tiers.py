"""Three tiers of accuracy, each three ways (see `threeway`), the same on a CPU, a GPU and Neuron:

```
components   text encoder, each expert without guidance, decoder; each on the float32 reference's inputs
step         the guided velocity of the first, last high-noise, first low-noise and last step, teacher-forced
run          the whole clip, free: final latents and frames
```

`ours` is what the settings say (device, dtype, mesh, kernels). The references are diffusers' own modules on the CPU, in
float32 and in the working dtype; or, with `reference="plain"`, our pipeline there on one rank, for what diffusers
does not load (images, LoRA). Legs run one after the other, so only one holds weights. Reference legs can be kept in a
folder: made once on any machine, they cost no second on a rented one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from batch_gen.checkpoint import Checkpoint
from batch_gen.config import Preset, Settings, num_cpus
from batch_gen.engine import Array, DenoiseOptions, Engine
from batch_gen.errors import ClipFailed, UsageError
from batch_gen.graphs.keys import variant_of
from batch_gen.graphs.supply import supply_variants
from batch_gen.launch import EngineSpec, RemoteEngine
from batch_gen.placement import spec_of
from batch_gen.preflight import check_start
from batch_gen.prepare import resolve_run
from batch_gen.regress import trend
from batch_gen.regress.collect import Collected, collect, decoded
from batch_gen.regress.replay import TEXT, Images
from batch_gen.regress.results import worst
from batch_gen.regress.threeway import Row, judge
from batch_gen.request import RenderRequest
from batch_gen.scratch import open_scratch

TIERS: Final = ("components", "step", "run")
FORMAT: Final = 1
DEFAULT_SIZE_PX: Final = 256
DEFAULT_FRAMES: Final = 9
DEFAULT_PROMPT: Final = "a red circle moving right on a black background"
VELOCITY_BOUND: Final = 1e-5
TRAJECTORY_BOUND: Final = 1e-4
FRAMES_BOUND: Final = 2e-3
HIGH: Final = "high"

Reference = Literal["diffusers", "plain"]
Opener = Callable[[str, EngineSpec], Engine]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is judged.

    Attributes:
        settings, checkpoint: As of a run.
        request: The clip; images as uint8 RGB [H, W, 3] beside it.
        reference: Who is right.
    """

    settings: Settings
    checkpoint: Checkpoint
    request: RenderRequest
    images: Images = ()
    reference: Reference = "diffusers"


@dataclass(slots=True)
class Capture:
    """What one leg gave: arrays by name, the expert of each step, seconds."""

    arrays: dict[str, Array] = field(default_factory=dict)
    stages: list[str] = field(default_factory=list)
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


def components(model: str, clip: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """Each component alone; see `tier` for the arguments and the answer."""
    return tier("components", model, clip, **options)


def step(model: str, clip: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """One step at a time; see `tier` for the arguments and the answer."""
    return tier("step", model, clip, **options)


def run(model: str, clip: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """The whole clip; see `tier` for the arguments and the answer."""
    return tier("run", model, clip, **options)


def tier(
    name: str,
    model: str,
    clip: Mapping[str, Any] | None = None,
    *,
    reference: Reference = "diffusers",
    keep: str | None = None,
    opener: Opener | None = None,
    **given: Any,
) -> dict[str, Any]:
    """Measure a tier.

    Args:
        name: One of `TIERS`.
        model: As `--model` takes it.
        clip: Fields of a request that differ from a small clip of the checkpoint's preset (at most 256 px and 9 frames;
            steps, guidance and shift are the preset's). Faults of late steps or of long sequences need the real size.
        reference: `diffusers` or `plain`.
        keep: A folder for the reference legs; those that lie there are not computed again.
        opener: Makes an engine of a leg's name (`ours`, `working`, `float32`) and spec; None for processes.
        given: Settings of a run by flag name: device, dtype, mesh, attention, kernels, profile, ...

    Returns:
        JSON values: `tier`, `ok`, `verdict`, `rows` (see `threeway.Row`), `legs`, `clip`, `trend`, `error`.

    Raises:
        BatchGenError: exit 2 before anything is loaded; `EngineLost` (75) when a leg dies.
    """
    settings, preset, checkpoint = resolve_run({"out": "", "model": model, **given})
    subject = Subject(settings, checkpoint, clip_of(preset, checkpoint, clip or {}), reference=reference)
    return measure(name, subject, keep=keep, opener=opener)


def measure(name: str, subject: Subject, *, keep: str | None = None, opener: Opener | None = None) -> dict[str, Any]:
    """As `tier`, of settings, checkpoint and clip that are known."""
    graphs = check(name, subject)
    start = opener or (lambda _, spec: RemoteEngine(spec))
    working = subject.settings.dtype, subject.settings.vae_dtype
    with open_scratch(subject.settings.scratch) as folder:
        legs = {"float32": _reference(name, subject, ("float32", "float32"), None, _Workshop(folder, keep, start))}
        exact = legs["float32"]
        if working != ("float32", "float32"):
            legs["working"] = _reference(name, subject, working, exact, _Workshop(folder, keep, start))
        error = None
        try:
            spec = spec_of(subject.settings, subject.checkpoint, folder / "ours", 0, graphs)
            legs["ours"] = _leg(name, subject, exact, lambda: start("ours", spec))
        except ClipFailed as failure:  # a verdict of the clip itself, such as latents that are not finite
            error = {"kind": failure.kind, "message": failure.message}
    rows = [] if error else _rows(legs, exact)
    return _answer(name, subject, legs, rows, error)


def check(name: str, subject: Subject) -> Path | None:
    """Refuse what cannot be measured, before anything is loaded; returns where our leg finds compiled graphs.

    Raises:
        BatchGenError: exit code 2.
    """
    if name not in TIERS:
        raise UsageError(f"tier {name!r} does not exist; choose one of {', '.join(TIERS)}")
    if subject.reference not in ("diffusers", "plain"):
        raise UsageError(f"reference {subject.reference!r} does not exist; choose diffusers or plain")
    if subject.checkpoint.folder is None:
        raise UsageError("--model fake has no numbers to compare; name a checkpoint, such as tiny")
    conditioned = subject.request.image is not None or subject.checkpoint.facts["index"]["_class_name"] != "WanPipeline"
    if subject.reference == "diffusers" and (conditioned or subject.settings.lora):
        raise UsageError("the diffusers reference takes neither images nor LoRA; use --reference plain")
    request = _unguided(subject.request) if name == "components" else subject.request
    variant = variant_of(request)
    check_start(subject.settings, subject.checkpoint, {(variant.bucket, request.steps, variant.guided): 1})
    supply = supply_variants(subject.settings, subject.checkpoint, [variant])
    return None if supply is None else supply.folder


def clip_of(preset: Preset, checkpoint: Checkpoint, changes: Mapping[str, Any]) -> RenderRequest:
    """A small clip of the preset with some fields changed.

    Raises:
        UsageError: A field that a request does not have.
    """
    known = {item.name for item in fields(RenderRequest)}
    if unknown := sorted(set(changes) - known):
        raise UsageError(f"clip: {', '.join(unknown)} is no field of a request; it has {', '.join(sorted(known))}")
    multiple, sampling = checkpoint.limits.size_multiple, asdict(preset.sampling)
    for side in ("width", "height"):
        sampling[side] = max(multiple, min(sampling[side], DEFAULT_SIZE_PX) // multiple * multiple)
    sampling["num_frames"] = min(sampling["num_frames"], DEFAULT_FRAMES)
    values = {
        "clip_id": "tier",
        "row_id": "tier",
        "sample": 0,
        "prompt": DEFAULT_PROMPT,
        "seed": 7,
        **sampling,
        **changes,
    }
    return RenderRequest(**{**values, "fps": Fraction(str(values["fps"]))})


def named_steps(stages: list[str]) -> dict[int, str]:
    """The steps that are compared, with their names: both ends, and both sides of the change of experts."""
    high = [place for place, stage in enumerate(stages) if stage == HIGH]
    low = [place for place, stage in enumerate(stages) if stage != HIGH]
    found = {0: "first step", len(stages) - 1: "last step"}
    if high and low:
        found = {high[-1]: "last high-noise step", low[0]: "first low-noise step"} | found
    return dict(sorted(found.items()))


@dataclass(frozen=True, slots=True)
class _Workshop:
    folder: Path
    keep: str | None
    start: Opener


def _reference(name: str, subject: Subject, dtypes: tuple[str, str], exact: Capture | None, shop: _Workshop) -> Capture:
    """A reference leg, from the folder where it is kept or computed."""
    leg = "float32" if exact is None else "working"
    options: dict[str, Any] = {
        "model": str(subject.checkpoint.folder),
        "dtype": dtypes[0],
        "vae_dtype": dtypes[1],
        "solver": subject.settings.solver,
    }
    options["long_prompt"] = subject.settings.long_prompt
    if subject.reference == "plain":
        ours = spec_of(subject.settings, subject.checkpoint, shop.folder, 0)
        options |= {"decode": "reference", "adapters": ours.options["adapters"]}
    else:
        options["implementation"] = "diffusers"
    spec = EngineSpec("pipeline", options, str(shop.folder / leg), threads=num_cpus(), stall_s=24 * 3600.0)
    place = None if shop.keep is None else Path(shop.keep) / _kept_name(name, subject, options)
    if place is not None and place.exists():
        return _load(place)
    capture = _leg(name, subject, exact, lambda: shop.start(leg, spec))
    if place is not None:
        _save(place, capture)
    return capture


def _leg(name: str, subject: Subject, exact: Capture | None, start: Callable[[], Engine]) -> Capture:
    """Run one leg; `exact` is the float32 reference, None where this is it."""
    began = time.monotonic()
    engine = start()
    try:
        capture = Capture(facts=_facts(engine.describe()))
        if exact is None:
            _walk(engine, subject, capture)
        _MEASURES[name](engine, subject, capture, exact or capture)
        _trim(capture)
    finally:
        engine.close()
    capture.seconds = round(time.monotonic() - began, 3)
    return capture


def _walk(engine: Engine, subject: Subject, capture: Capture) -> None:
    """The reference's own trajectory: the inputs of all that is compared."""
    taps = [f"{what}.{place}" for place in range(subject.request.steps) for what in ("latents", "velocity")]
    found = _collected(engine, subject, subject.request, DenoiseOptions(taps=tuple(taps)))
    capture.arrays |= found.arrays
    capture.stages += found.stages


def _trim(capture: Capture) -> None:
    """Forget the steps that nobody enters: a real clip's trajectory is gigabytes."""
    entered = (
        {f"latents.{place}" for place in (*named_steps(capture.stages), len(capture.stages))} if capture.stages else ()
    )
    capture.arrays = {name: array for name, array in capture.arrays.items() if "." not in name or name in entered}


def _components(engine: Engine, subject: Subject, capture: Capture, exact: Capture) -> None:
    unguided = _unguided(subject.request)
    text = _collected(engine, subject, unguided, DenoiseOptions(stop=0, taps=(TEXT,)))
    capture.arrays["text encoder"] = text.arrays[TEXT]
    last = len(exact.stages) - 1
    experts = {"high-noise expert": 0}
    if exact.stages[last] != HIGH:
        experts["low-noise expert"] = last
    for name, place in experts.items():
        capture.arrays[name] = _velocity(engine, subject, unguided, place, exact)
    capture.arrays["decoder"] = decoded(engine, subject.request, exact.arrays[f"latents.{last + 1}"])


def _unguided(request: RenderRequest) -> RenderRequest:
    """The clip with one pass a step."""
    return replace(request, guidance_high=1.0, guidance_low=1.0)


def _steps(engine: Engine, subject: Subject, capture: Capture, exact: Capture) -> None:
    for place, name in named_steps(exact.stages).items():
        is_own = capture is exact
        value = (
            capture.arrays[f"velocity.{place}"] if is_own else _velocity(engine, subject, subject.request, place, exact)
        )
        capture.arrays[f"guided velocity, {name}"] = value


def _whole(engine: Engine, subject: Subject, capture: Capture, exact: Capture) -> None:
    last = f"latents.{subject.request.steps}"
    if capture is not exact:
        capture.arrays |= _collected(engine, subject, subject.request, DenoiseOptions()).arrays
    capture.arrays["final latents"] = capture.arrays[last]
    capture.arrays["frames"] = decoded(engine, subject.request, capture.arrays[last])


_MEASURES: Final = {"components": _components, "step": _steps, "run": _whole}
_BOUNDS: Final = {"decoder": FRAMES_BOUND, "frames": FRAMES_BOUND, "final latents": TRAJECTORY_BOUND}


def _velocity(engine: Engine, subject: Subject, request: RenderRequest, place: int, exact: Capture) -> Array:
    tap = f"velocity.{place}"
    start = (place, exact.arrays[f"latents.{place}"])
    options = DenoiseOptions(start=start, stop=place + 1, taps=(tap,))
    return _collected(engine, subject, request, options).arrays[tap]


def _collected(engine: Engine, subject: Subject, request: RenderRequest, options: DenoiseOptions) -> Collected:
    """One walk with the subject's images."""
    return collect(engine, request, replace(options, images=subject.images))


def _rows(legs: Mapping[str, Capture], exact: Capture) -> list[Row]:
    ours, working = legs["ours"], legs.get("working")
    steps = {f"guided velocity, {word}": place for place, word in named_steps(exact.stages).items()}
    return [
        judge(
            value,
            (ours.arrays[value], None if working is None else working.arrays[value], array),
            _BOUNDS.get(value, VELOCITY_BOUND),
            steps.get(value),
        )
        for value, array in exact.arrays.items()
        if value in ours.arrays and "." not in value
    ]


def _answer(
    name: str, subject: Subject, legs: Mapping[str, Capture], rows: list[Row], error: dict[str, str] | None
) -> dict[str, Any]:
    verdict = "fail" if error else worst([row.verdict for row in rows])
    ratios = {row.step: row.ratio for row in rows if row.step is not None and row.ratio is not None}
    lengths = {row.step: row.ours.l2 for row in rows if row.step is not None}
    errors = ratios if len(ratios) == len(lengths) else lengths  # a trend has one unit
    return {
        "format": FORMAT,
        "tier": name,
        "ok": verdict != "fail",
        "verdict": verdict,
        "error": error,
        "model": subject.checkpoint.name,
        "model_digest": subject.checkpoint.digest,
        "reference": subject.reference,
        "clip": subject.request.to_json(),
        "legs": {leg: {"seconds": capture.seconds, **capture.facts} for leg, capture in legs.items()},
        "rows": [row.to_json() for row in rows],
        "trend": trend.classify(errors).to_json() if errors else None,
    }


def _facts(description: Mapping[str, Any]) -> dict[str, Any]:
    wanted = ("pipeline", "device", "dtype", "mesh", "attention", "kernels", "decode", "solver", "quantization")
    return {name: description[name] for name in wanted if name in description}


def _kept_name(name: str, subject: Subject, options: Mapping[str, Any]) -> str:
    told = {key: value for key, value in options.items() if key != "model"}
    body = [FORMAT, name, told, subject.checkpoint.digest, subject.request.digest]
    body += [hashlib.sha256(image.tobytes()).hexdigest() for image in subject.images]
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return f"{name}-{options['dtype']}-{digest[:16]}.safetensors"


def _save(place: Path, capture: Capture) -> None:
    from safetensors.numpy import save_file

    place.parent.mkdir(parents=True, exist_ok=True)
    told = {"stages": capture.stages, "facts": capture.facts, "seconds": capture.seconds}
    partial = place.with_suffix(".part")
    arrays = {name: np.ascontiguousarray(array) for name, array in capture.arrays.items()}
    save_file(arrays, partial, {"capture": json.dumps(told)})
    partial.replace(place)


def _load(place: Path) -> Capture:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(place, "np") as file:
            told = json.loads(file.metadata()["capture"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{place} is no kept reference leg ({error}); remove it") from error
    return Capture(arrays, told["stages"], told["seconds"], told["facts"] | {"kept": place.name})
