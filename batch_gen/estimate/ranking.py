"""Every mesh that a machine can hold, judged for a mix of clips, best first; and how far the order can be trusted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from batch_gen.errors import MemoryTooSmall
from batch_gen.estimate.machines import Machine
from batch_gen.estimate.memory import Footprint, Placement, footprint
from batch_gen.estimate.speed import Rates, clip_seconds, efficiency
from batch_gen.estimate.subject import Clips, Subject
from models.parallel.layout import Degrees, LayoutError

Aim = Literal["throughput", "latency"]
SWING: Final = 0.3
HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be rendered, on what.

    Args:
        subject: the checkpoint's sizes.
        mix: shapes and steps with their numbers of clips.
        machine: one machine.
        attention: the setting.
        dtype: of the transformer.
        vae_dtype: of the autoencoder.
        fp8: whether all its blocks' linear layers are FP8; speed is taken as that of `dtype`.
    """

    subject: Subject
    mix: tuple[Clips, ...]
    machine: Machine
    attention: str
    dtype: str
    vae_dtype: str = "bfloat16"
    fp8: bool = False

    def placed(self, degrees: Degrees) -> Placement:
        """These degrees with the question's settings."""
        return Placement(degrees, self.attention, self.dtype, self.vae_dtype, self.fp8)

    @property
    def num_clips(self) -> int:
        """Clips of the mix."""
        return sum(clips.count for clips in self.mix)


@dataclass(frozen=True, slots=True)
class Choice:
    """One combination of mesh and replicas, judged for the mix."""

    degrees: Degrees
    replicas: int
    seconds_per_clip: float
    fullest: Footprint

    @property
    def clips_per_hour(self) -> float:
        """Clips of the mix that one machine makes in an hour."""
        return self.replicas * HOUR_S / self.seconds_per_clip

    @property
    def fits(self) -> bool:
        """Whether every shape of the mix fits."""
        return self.fullest.fits

    def badness(self, aim: Aim) -> tuple[bool, float, float, int]:
        """Smaller is better: what fits first, then the aim, then the other aim, then fewer ranks."""
        keys = (-self.clips_per_hour, self.seconds_per_clip)
        first, second = keys if aim == "throughput" else keys[::-1]
        return not self.fits, first, second, self.degrees.size


@dataclass(frozen=True, slots=True)
class Swing:
    """The best choice when one assumption is off."""

    what: str
    best: Choice
    flips: bool


def judge(question: Question, degrees: Degrees, replicas: int, rates: Rates | None = None) -> Choice:
    """Seconds and memory of one combination; the mean over the mix, the fullest of its shapes."""
    rates = rates or Rates(efficiency(question.machine.kind))
    placement = question.placed(degrees)
    total = 0.0
    prints = []
    for clips in question.mix:
        found = clip_seconds(question.subject, clips, placement, question.machine, rates)
        total += clips.count * found.total
        prints.append(footprint(question.subject, clips, placement, question.machine))
    fullest = max(prints, key=lambda found: found.peak_bytes)
    return Choice(degrees, replicas, total / question.num_clips, fullest)


def meshes(question: Question) -> Iterator[Degrees]:
    """Power-of-two degrees that the model and the machine allow; CPU and CUDA machines take one rank a replica."""
    if question.machine.kind != "neuron":
        yield Degrees()
        return
    spec = question.subject.wan.transformer
    powers = [1 << bit for bit in range(question.machine.num_cores.bit_length())]
    for cfg in (1, 2):
        for cp in powers:
            for tp in powers:
                degrees = Degrees(tp, cp, cfg)
                if degrees.size <= question.machine.num_cores and _divides(
                    degrees, spec.num_attention_heads, spec.ffn_dim
                ):
                    yield degrees


def rank(question: Question, aim: Aim, rates: Rates | None = None, replicas: int | None = None) -> list[Choice]:
    """All combinations, best first; those that do not fit come last. `replicas` fixes their number."""
    rates = rates or Rates(efficiency(question.machine.kind))
    found = []
    for degrees in meshes(question):
        most = question.machine.num_cores // degrees.size if question.machine.kind == "neuron" else 1
        if replicas is None or replicas <= most:
            found.append(judge(question, degrees, replicas or most, rates))
    return sorted(found, key=lambda choice: choice.badness(aim))


def best(question: Question, aim: Aim, replicas: int | None = None) -> Choice:
    """The first of `rank`.

    Raises:
        MemoryTooSmall: no combination fits.
    """
    found = rank(question, aim, replicas=replicas)
    if not found or not found[0].fits:
        peak = min((choice.fullest.peak_bytes for choice in found), default=0.0)
        raise MemoryTooSmall(
            f"{question.subject.name}: no mesh of {question.machine.name} fits; the smallest needs {peak / 1e9:.2f}e9 "
            f"bytes a rank and has {question.machine.memory_bytes / 1e9:.2f}e9"
        )
    return found[0]


def swings(question: Question, aim: Aim) -> list[Swing]:
    """The best choice with the efficiency and the link speed 30 % lower and higher, and whether it is another one."""
    base = Rates(efficiency(question.machine.kind))
    first = rank(question, aim, base)[0]
    found = []
    for name in ("efficiency", "link"):
        for factor in (1 - SWING, 1 + SWING):
            rates = replace(base, **{name: getattr(base, name) * factor})
            top = rank(question, aim, rates)[0]
            what = {"efficiency": "compute efficiency", "link": "link speed"}[name]
            flips = (top.degrees, top.replicas) != (first.degrees, first.replicas)
            found.append(Swing(f"{what} {factor - 1:+.0%}", top, flips))
    return found


def _divides(degrees: Degrees, num_heads: int, ffn_width: int) -> bool:
    try:
        degrees.check_model(num_heads=num_heads, ffn_width=ffn_width)
    except LayoutError:
        return False
    return True


def thinned(mix: Sequence[Clips], most: int = 32) -> tuple[Clips, ...]:
    """At most so many shapes: those that need the most memory, then the frequent ones.

    The rest is counted with the one of them that takes the most work: never too cheap, no verdict on memory lost.
    """
    if len(mix) <= most:
        return tuple(mix)
    fullest = max(mix, key=lambda clips: (clips.guided, _volume(clips)))
    widest = max(mix, key=lambda clips: (clips.bucket.width * clips.bucket.height, clips.guided, _volume(clips)))
    longest = max(mix, key=lambda clips: (_volume(clips), clips.guided))
    kept = list(dict.fromkeys([fullest, widest, longest]))
    others = sorted((clips for clips in mix if clips not in kept), key=lambda clips: -clips.count)
    room = most - 1 - len(kept)
    kept, rest = kept + others[:room], others[room:]
    dearest = max(rest, key=lambda clips: _volume(clips) * clips.steps * clips.num_passes)
    return (*kept, replace(dearest, count=sum(clips.count for clips in rest)))


def _volume(clips: Clips) -> int:
    return clips.bucket.width * clips.bucket.height * clips.bucket.num_frames
