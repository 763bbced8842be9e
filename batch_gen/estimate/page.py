"""The estimate for people: memory, seconds, ranking, how sure, money, store."""

from __future__ import annotations

from collections.abc import Iterator

from batch_gen.estimate.ranking import Choice
from batch_gen.estimate.results import Estimate, Shape
from batch_gen.estimate.speed import MEASURED
from batch_gen.estimate.spend import COMPILE_NOTE, LOAD_NOTE, REQUEST_NOTE

MAX_RANKED = 8
MAX_SHAPES = 4


def as_lines(found: Estimate) -> list[str]:
    """All sections."""
    lines = [
        "",
        f"machine   {found.question.machine.name}, {_setting(found)}",
        *(f"          {note}" for note in found.question.machine.notes),
        *(f"          {note}" for note in (*_shares(found), *found.notes)),
    ]
    # steps do not change the memory
    by_memory = {(shape.clips.bucket, shape.clips.guided): shape for shape in found.shapes}
    for shape in list(by_memory.values())[:MAX_SHAPES]:
        lines += _memory(shape)
    for shape in found.shapes[:MAX_SHAPES]:
        lines += _seconds(found, shape)
    if found.question.machine.kind == "neuron":
        lines += _ranking(found)
    return [*lines, *_money(found), *_store(found)]


def _setting(found: Estimate) -> str:
    mesh = f"mesh {found.chosen.degrees}, replicas {found.chosen.replicas}"
    return f"{mesh}, layout {found.layout}, attention {found.question.attention}"


def _shares(found: Estimate) -> Iterator[str]:
    """What a rank has of a machine that ranks share, and how many shapes stand for all of them."""
    machine, chosen = found.question.machine, found.chosen
    num_ranks = chosen.degrees.size * chosen.replicas
    share = machine.cores_of_rank(num_ranks) / machine.num_cores
    if machine.is_shared and share < 1:
        each = f"{share:.0%} of its arithmetic, {chosen.fullest.limit_bytes / 1e9:.2f}e9 bytes"
        yield f"{_counted(num_ranks, 'rank')} on one machine, each with {each}"
    if len(found.question.mix) < len(found.question.all_clips):
        yield (
            f"{len(found.question.all_clips):,} shapes and numbers of steps are judged by {len(found.question.mix)}: "
            "the largest, the most frequent, and one of mean work for all the rest"
        )


def _memory(shape: Shape) -> Iterator[str]:
    memory = shape.memory
    yield ""
    yield f"memory    {shape.clips.bucket}{'' if shape.clips.guided else ' without guidance'}, bytes of one rank"
    for stage, title in (("always", "always held"), ("denoise", "while denoising"), ("decode", "while decoding")):
        yield f"  {title}"
        for part in (part for part in memory.parts if part.stage == stage):
            yield f"    {part.name:<28}{part.num_bytes:>18,.0f}  {part.source}"
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    yield f"  {'peak: always + larger stage':<30}{memory.peak_bytes:>18,.0f}  of {memory.limit_bytes:,.0f}: {verdict}"


def _seconds(found: Estimate, shape: Shape) -> Iterator[str]:
    seconds, clips = shape.seconds, shape.clips
    yield ""
    work = f"{_counted(clips.steps, 'step')}, {_counted(clips.num_passes, 'evaluation')} each"
    yield f"seconds   {clips.bucket}, {work}, one clip on one replica"
    yield f"    {'text encoder':<28}{seconds.text:>12,.2f}"
    if seconds.encode:
        yield f"    {'image encoder':<28}{seconds.encode:>12,.2f}"
    yield (
        f"    {'denoising':<28}{seconds.denoise:>12,.2f}  {shape.ideal_denoise_s:,.2f} s at the arithmetic peak / "
        f"efficiency {found.efficiency:.3f}"
    )
    yield f"    {'exposed communication':<28}{seconds.exposed:>12,.2f}  sums over tp, keys and values over cp, guidance"
    yield f"    {'decoding':<28}{seconds.decode:>12,.2f}"
    yield f"    {'total':<28}{_small(seconds.total, 2):>12}"
    known = MEASURED.get(found.question.machine.kind)
    if known is None:
        yield "    nothing is measured for this kind of machine: read it as an order of magnitude"
    else:
        yield f"    efficiency solved from {known.seconds} s: {known.name} ({known.source})"


def _ranking(found: Estimate) -> Iterator[str]:
    fitting = [choice for choice in found.ranked if choice.fits]
    yield ""
    yield f"ranking   for {found.aim}: {len(fitting)} of {len(found.ranked)} combinations fit"
    if not fitting:
        yield "    none: smaller clips, or a machine with more memory"
        return
    yield "    mesh                  replicas   clips/machine-hour   seconds/clip   bytes of a rank"
    yield from (_row(choice) for choice in fitting[:MAX_RANKED])
    yield f"  how sure: the best of {_named(fitting[0])} under other assumptions"
    for swing in found.swings:
        word = f"flips to {_named(swing.best)}" if swing.flips else "stays"
        rate = f"{swing.best.clips_per_hour:,.2f} clips/machine-hour, {_small(swing.best.seconds_per_clip, 1)} s a clip"
        yield f"    {swing.what:<28}{word}: {rate}"


def _row(choice: Choice) -> str:
    return (
        f"    {choice.degrees!s:<22}{choice.replicas:>8}{choice.clips_per_hour:>21,.2f}"
        f"{_small(choice.seconds_per_clip, 1):>15}{choice.fullest.peak_bytes:>18,.0f}"
    )


def _named(choice: Choice) -> str:
    return f"{choice.degrees} x {choice.replicas}"


def _money(found: Estimate) -> Iterator[str]:
    totals = found.totals
    yield ""
    clips = _counted(found.question.num_clips, "clip")
    yield f"spend     {clips} on one machine; more machines divide the time, not the money"
    yield f"    {'clips a day':<28}{_small(totals['clips_per_day'], 1):>12}"
    yield f"    {'machine-hours':<28}{_small(totals['machine_hours'], 2):>12}"
    if totals["cost_usd"] is None:
        yield f"    {'cost':<28}{'unknown':>12}  give --price-per-hour"
    else:
        a_clip = f"{_small(totals['cost_per_clip_usd'], 4)} a clip"
        yield f"    {'cost, USD':<28}{_small(totals['cost_usd'], 2):>12}  {a_clip}"
        yield f"    {'USD an hour':<28}{totals['price_per_hour']:>12,.4f}  {totals['price_note']}"
    if found.question.machine.kind == "neuron":
        yield f"    start: {LOAD_NOTE}, included"
    if totals["compile_s"]:
        buckets = _counted(len(totals["buckets"]), "bucket")
        twice = totals["graph_sets"] - len(totals["buckets"])
        which = "" if twice == len(totals["buckets"]) else f"{twice:,} of them both "
        buckets += f", {which}with guidance and without" if twice else ""
        yield f"    compile: {buckets}, {totals['compile_s'] / 60:,.0f} min, not included; {COMPILE_NOTE}"


def _small(value: float, digits: int) -> str:
    """So many digits, but never a zero for what is not."""
    return f"{value:,.{digits}f}" if value == 0 or value >= 10**-digits else f"{value:.1g}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _store(found: Estimate) -> Iterator[str]:
    store = found.totals["store"]
    yield ""
    yield "store     if the output is on S3"
    yield f"    {'files, bytes':<28}{store['file_bytes']:>20,}  by the codec's bits per pixel; content may triple it"
    yield f"    {'records, bytes':<28}{store['record_bytes']:>20,}"
    yield f"    {'weights, bytes':<28}{store['weights_bytes']:>20,}  read once a machine, if they lie on S3"
    yield f"    {'PUT requests':<28}{store['put_requests']:>20,}"
    yield f"    {'GET requests':<28}{store['get_requests']:>20,}"
    yield f"    {'requests, USD':<28}{store['requests_usd']:>20,.4f}  {REQUEST_NOTE}"
