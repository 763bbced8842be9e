"""Prove that the gates bite: plant what goes wrong in practice into a really rendered clip, and look who notices.

Each mutation names the gate that must catch it. The exact gate sees every one of them and therefore proves nothing; it
is asked about the unchanged clip, rendered again by a fresh engine.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from batch_gen.engine import DenoiseOptions, finish
from batch_gen.errors import UsageError
from batch_gen.regress.gates import Clip, judge_clip
from batch_gen.regress.images import Frames
from batch_gen.regress.render import Bench, Rendered
from batch_gen.regress.results import GateResult
from batch_gen.regress.suite import Setup
from batch_gen.request import RenderRequest
from models.pocket.grammar import Caption, parse
from models.pocket.judge import judge

NOISE_SHARE: Final = 0.5
"""Of the latents' own spread, added before the last step, which takes part of it away again."""
NUM_STRIPS: Final = 4
EXPERTS: Final = ("transformer", "transformer_2")

OpenBench = Callable[[Setup], AbstractContextManager[Bench]]


@dataclass(frozen=True, slots=True)
class Caught:
    """One mutation and the gate that had to see it."""

    mutation: str
    gate: str
    result: GateResult | None

    @property
    def caught(self) -> bool:
        """Whether that gate is red."""
        return self.result is not None and self.result.verdict == "fail"

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        facts = {} if self.result is None else {"value": self.result.value, "limit": self.result.limit}
        return {"mutation": self.mutation, "caught": self.caught, "gate": self.gate, **facts}


@dataclass(frozen=True, slots=True)
class Subject:
    """What is mutated: a case, its clip, another prompt, and the engine that made it."""

    setup: Setup
    bench: Bench
    request: RenderRequest
    other_prompt: str
    base: Rendered

    def render(self, **changes: Any) -> Rendered:
        """The case with other values."""
        return self.bench.render(replace(self.request, **changes))[0]

    def judged(self, rendered: Rendered) -> tuple[GateResult, ...]:
        """What the gates say about a clip that claims to be the case."""
        return judge_clip(self._clip(rendered), self._clip(self.base), self._limits).gates

    def _clip(self, rendered: Rendered) -> Clip:
        return Clip(self.request.prompt, rendered.frames, rendered.latents, self.setup.fingerprint)

    @property
    def _limits(self) -> Any:
        return self.setup.file.limits_of(self.request.clip_id)


def run_mutations(
    setup: Setup, case: str | None, open_bench: OpenBench, scratch: Path, said: Callable[[str], None] = lambda _: None
) -> tuple[list[Caught], bool]:
    """Plant every mutation into one case of the suite.

    Args:
        setup: The suite.
        case: Which case; by default the first that has guidance and enough frames.
        open_bench: Opens engines, also for a checkpoint with swapped experts.
        scratch: An empty folder.
        said: Gets a line per mutation.

    Returns:
        Who caught what, and whether the unchanged clip, rendered by a fresh engine, left every gate green, the exact
        one too unless the limits turn it off.
    """
    request = choose_case(setup.requests, case)
    with open_bench(setup) as bench:
        base = bench.render(request)[0]
        subject = Subject(setup, bench, request, another_prompt(setup.requests, request, base), base)
        found = []
        for name, gate, rendered in mutants(subject, open_bench, scratch):
            results = {result.gate: result for result in subject.judged(rendered)}
            found.append(Caught(name, gate, results.get(gate)))
            said(f"{name}: {'caught' if found[-1].caught else 'NOT caught'} by {gate}")
        bench.close()
        again = {result.gate: result for result in subject.judged(subject.render())}
    unchanged = all(result.verdict != "fail" for result in again.values())
    said(f"unchanged, rendered again: frames_hash {again['frames_hash'].verdict}")
    return found, unchanged


def choose_case(requests: Sequence[RenderRequest], case: str | None) -> RenderRequest:
    """The case to mutate.

    Raises:
        UsageError: it does not exist, or cannot show what shall be seen.
    """
    fit = [request for request in requests if request.num_frames >= 5 and min(_guidance(request)) > 1]
    named = [request for request in fit if case in (None, request.clip_id)]
    if not named or len(requests) < 2:
        names = ", ".join(request.clip_id for request in fit) or "none"
        need = "mutate needs two cases, and one with guidance above 1 and at least 5 frames"
        raise UsageError(f"{need}; this suite has {len(requests)} cases, fit: {names}")
    return named[0]


def another_prompt(requests: Sequence[RenderRequest], request: RenderRequest, base: Rendered) -> str:
    """The prompt of the case that contradicts most of what the clip shows."""
    others = [other.prompt for other in requests if other.prompt != request.prompt]
    if not others:
        raise UsageError("mutate needs two cases with different prompts")
    return max(others, key=lambda prompt: len(contradicted(request.prompt, prompt, base.frames)))


def contradicted(prompt: str, other: str, frames: Frames) -> list[str]:
    """Slots of the prompt that the clip shows and the other prompt denies; none outside pocket's grammar."""
    mine, theirs = _caption(prompt), _caption(other)
    if mine is None or theirs is None:
        return []
    shown = judge(frames).agrees(mine)
    return [slot for slot in shown if shown[slot] and getattr(mine, slot) != getattr(theirs, slot)]


def mutants(subject: Subject, open_bench: OpenBench, scratch: Path) -> Iterator[tuple[str, str, Rendered]]:
    """Name, the gate that must catch it, and the clip of every mutation."""
    base, request = subject.base, subject.request
    for name, gate, change in PIXELS:
        yield name, gate, replace(base, frames=change(base.frames))
    judged = contradicted(request.prompt, subject.other_prompt, base.frames)
    gate = "prompt_following" if judged else "latents_cosine"
    yield "swapped_prompt", gate, subject.render(prompt=subject.other_prompt)
    yield "cfg_sign", "latents_cosine", subject.render(**flipped_guidance(request))
    yield "late_step_noise", "latents_error", noisy(subject)
    if has_two_experts(subject.setup):
        with open_bench(with_swapped_experts(subject.setup, scratch)) as bench:
            yield "experts_swapped", "latents_cosine", bench.render(request)[0]


def drop_frame(frames: Frames) -> Frames:
    """One frame less, the others where they were."""
    return np.delete(frames, len(frames) // 2, axis=0)


def black_box(frames: Frames) -> Frames:
    """A black box of an eighth of the shorter side in one frame, where that frame is brightest."""
    changed, frame = frames.copy(), len(frames) // 2
    side = max(8, min(frames.shape[1:3]) // 8)
    rows, columns = (size // side for size in frames.shape[1:3])
    blocks = frames[frame, : rows * side, : columns * side].reshape(rows, side, columns, side, 3).mean(axis=(1, 3, 4))
    row, column = (int(at) * side for at in np.unravel_index(np.argmax(blocks), blocks.shape))
    changed[frame, row : row + side, column : column + side] = 0
    return changed


def brighten(frames: Frames) -> Frames:
    """One percent brighter."""
    return np.asarray(np.clip(np.rint(frames * 1.01), 0, 255), np.uint8)


def shift_strip(frames: Frames) -> Frames:
    """One of four strips, that with the most detail, one row lower than it belongs, as after a halo cut wrongly."""
    height = frames.shape[1] // NUM_STRIPS
    detail = np.abs(np.diff(frames.astype(np.int16), axis=1)).sum(axis=(0, 2, 3))
    strip = int(np.argmax([detail[at * height : (at + 1) * height - 1].sum() for at in range(NUM_STRIPS)]))
    changed = frames.copy()
    rows = slice(strip * height, (strip + 1) * height)
    changed[:, rows] = np.roll(frames[:, rows], 1, axis=1)
    return changed


PIXELS: Final[tuple[tuple[str, str, Callable[[Frames], Frames]], ...]] = (
    ("dropped_frame", "frame_count", drop_frame),
    ("black_box", "psnr_min", black_box),
    ("brightness", "drift_luma", brighten),
    ("shifted_strip", "bad_frames", shift_strip),
)


def flipped_guidance(request: RenderRequest) -> dict[str, Any]:
    """Values of a request that render with the sign of the guidance flipped.

    neg - g (pos - neg) = pos + (g + 1) (neg - pos): prompts exchanged, and one more guidance.
    """
    high, low = _guidance(request)
    return {
        "prompt": request.negative_prompt,
        "negative_prompt": request.prompt,
        "guidance_high": high + 1,
        "guidance_low": low + 1,
    }


def noisy(subject: Subject) -> Rendered:
    """The case with noise added before its last step, as a late step of low precision leaves it."""
    request, engine = subject.request, subject.bench.engine
    images = tuple(subject.bench.images(request))
    text = finish(engine.text([request])).value[0]
    last = request.steps - 1
    latents = finish(engine.denoise(request, text, DenoiseOptions(stop=last, images=images))).value
    spread = NOISE_SHARE * float(latents.std())
    chance = np.random.default_rng(request.seed).standard_normal(latents.shape).astype(np.float32)
    start = (last, np.asarray(latents + spread * chance, np.float32))
    final = finish(engine.denoise(request, text, DenoiseOptions(start=start, images=images))).value
    return replace(subject.base, latents=final)


def has_two_experts(setup: Setup) -> bool:
    """Whether the checkpoint has experts to swap."""
    folder = setup.checkpoint.folder
    return folder is not None and all((folder / name).is_dir() for name in EXPERTS)


def with_swapped_experts(setup: Setup, scratch: Path) -> Setup:
    """The setup with a checkpoint whose two experts stand in each other's place."""
    folder = setup.checkpoint.folder
    assert folder is not None
    swapped = scratch / "swapped"
    places = dict(zip(EXPERTS, reversed(EXPERTS), strict=True))
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            first, *rest = path.relative_to(folder).parts
            link(path, swapped.joinpath(places.get(first, first), *rest))
    return replace(setup, checkpoint=replace(setup.checkpoint, folder=swapped))


def link(source: Path, target: Path) -> None:
    """Weights are linked, not copied: they may be many gigabytes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix == ".safetensors":
        target.symlink_to(source.resolve())
    else:
        shutil.copyfile(source, target)


def _guidance(request: RenderRequest) -> tuple[float, float]:
    return request.guidance_high, request.guidance_low


def _caption(prompt: str) -> Caption | None:
    try:
        return parse(prompt)
    except ValueError:
        return None
