"""Every mesh that a machine can hold, judged for a mix of clips, best first; and how far the order can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from batch_gen.errors import ConfigError, MemoryTooSmall
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
        mix: shapes and steps with their numbers of clips, few enough to judge every mesh by; see `thinned`.
        machine: one machine.
        attention: the setting.
        dtype: of the transformer.
        vae_dtype: of the autoencoder.
        fp8: whether all its blocks' linear layers are FP8; speed is taken as that of `dtype`.
        whole: all shapes and steps, where `mix` is thinned.
        swap: whether only the expert in use is in memory.
    """

    subject: Subject
    mix: tuple[Clips, ...]
    machine: Machine
    attention: str
    dtype: str
    vae_dtype: str = "bfloat16"
    fp8: bool = False
    whole: tuple[Clips, ...] = ()
    swap: bool = False

    def placed(self, degrees: Degrees, replicas: int = 1) -> Placement:
        """These degrees with the question's settings."""
        return Placement(degrees, self.attention, self.dtype, self.vae_dtype, self.fp8, replicas, self.swap)

    @property
    def all_clips(self) -> tuple[Clips, ...]:
        """Every shape and number of steps."""
        return self.whole or self.mix

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
    placement = question.placed(degrees, replicas)
    total = 0.0
    prints = []
    for clips in question.mix:
        found = clip_seconds(question.subject, clips, placement, question.machine, rates)
        total += clips.count * found.total
        prints.append(footprint(question.subject, clips, placement, question.machine))
    fullest = max(prints, key=lambda found: found.peak_bytes)
    return Choice(degrees, replicas, total / question.num_clips, fullest)


def meshes(question: Question) -> Iterator[Degrees]:
    """Power-of-two degrees that the model and the machine allow; where ranks share the machine one rank does all."""
    if question.machine.is_shared:
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
    """All combinations, best first; those that do not fit come last. `replicas` fixes their number.

    Else as many as there are cores for, and one where replicas only share the machine.
    """
    rates = rates or Rates(efficiency(question.machine.kind))
    found = []
    for degrees in meshes(question):
        most = question.machine.num_cores // degrees.size
        if question.machine.is_shared:
            found.append(judge(question, degrees, 1 if replicas is None else replicas, rates))
        elif replicas is None or replicas <= most:
            found.append(judge(question, degrees, most if replicas is None else replicas, rates))
    return sorted(found, key=lambda choice: choice.badness(aim))


def best(question: Question, aim: Aim, replicas: int | None = None, *, ignore_memory: bool = False) -> Choice:
    """The first of `rank`; with `ignore_memory` what comes closest, where nothing fits.

    Raises:
        ConfigError: more replicas than there are cores. MemoryTooSmall: no combination fits.
    """
    found, machine = rank(question, aim, replicas=replicas), question.machine
    if not found:
        raise ConfigError(f"--replicas {replicas}: {machine.name} has {machine.num_cores} cores, one for each rank")
    if found[0].fits:
        return found[0]
    smallest = min(found, key=lambda choice: choice.fullest.peak_bytes / choice.fullest.limit_bytes)
    if ignore_memory:
        return smallest
    most = 0 if replicas is None else most_replicas(question, aim)
    what = f"{machine.name} has no memory for {replicas} replicas, at most for {most}; " if most else ""
    what = what or f"no mesh of {machine.name} fits; "
    raise MemoryTooSmall(
        f"{question.subject.name}: {what}the smallest needs {smallest.fullest.peak_bytes / 1e9:.2f}e9 bytes a rank and "
        f"has {smallest.fullest.limit_bytes / 1e9:.2f}e9"
    )


def most_replicas(question: Question, aim: Aim) -> int:
    """Replicas that the memory has room for on whichever mesh takes the most of them; 0 where not even one fits."""
    fitting = [choice for choice in rank(question, aim) if choice.fits]
    if question.machine.is_shared:
        return max((int(question.machine.memory_bytes / choice.fullest.peak_bytes) for choice in fitting), default=0)
    return max((choice.replicas for choice in fitting), default=0)


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


def thinned(mix: Sequence[Clips], most: int, work: Callable[[Clips], float]) -> tuple[Clips, ...]:
    """At most so many shapes: those that need the most memory, then the frequent ones.

    The rest is counted with the one of them whose work is the next above their mean: not too cheap, hardly too dear,
    no verdict on memory lost.
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
    count, works = sum(clips.count for clips in rest), [work(clips) for clips in rest]
    mean = sum(clips.count * each for clips, each in zip(rest, works, strict=True)) / count
    _, index = min((each, index) for index, each in enumerate(works) if each >= mean * (1 - 1e-9))
    return (*kept, replace(rest[index], count=count))


def _volume(clips: Clips) -> int:
    return clips.bucket.width * clips.bucket.height * clips.bucket.num_frames
