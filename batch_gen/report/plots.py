"""The run page's plots: SVG by matplotlib, text as text, colours as CSS variables, so that one plot fits both themes.

Each plot is drawn twice, for wide and for narrow screens: a plot that only shrinks cannot be read on a phone.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from markupsafe import Markup

from batch_gen.metrics import duration
from batch_gen.report.figures import NICE_S, Failure, Figures, Lane, Pace, Stage, merged

MAX_LANES: Final = 40
MAX_BARS: Final = 12
MAX_TICKS: Final = 5
MAX_LABEL_CHARS: Final = 28
WIDE_IN: Final = 8.6
NARROW_IN: Final = 3.5
_DPI: Final = 100
_COLOURS: Final = {
    "#010001": "ink", "#010002": "soft", "#010003": "grid", "#010004": "good", "#010005": "bad", "#010006": "warn",
    "#010007": "idle", "#010008": "cold",
}  # fmt: skip
"""Stand-ins that matplotlib can draw with, and the CSS variables `--plot-<name>` that replace them."""
INK, SOFT, GRID, GOOD, BAD, WARN, IDLE, COLD = _COLOURS
USE_COLOURS: Final = {"render": GOOD, "failed": BAD, "duplicate": WARN, "cold_start": COLD, "idle": IDLE}
_STYLE: Final = {
    "svg.fonttype": "none", "text.parse_math": False, "font.family": ["DejaVu Sans"], "font.size": 9.0,
    "axes.edgecolor": GRID, "axes.labelcolor": SOFT, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "xtick.color": GRID, "ytick.color": GRID, "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT, "ytick.major.size": 0.0, "text.color": INK, "axes.grid": False, "axes.axisbelow": True,
    "grid.color": GRID, "grid.linewidth": 0.6, "legend.frameon": False, "path.simplify": True,
}  # fmt: skip
_ANY_ID: Final = re.compile(r' id="[A-Za-z][A-Za-z0-9.]*_\d+"')
_FONT: Final = re.compile(r"font: ([0-9.]+)px [^;\"]*")
Draw = Callable[[Any, bool], None]


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot in both widths, and what it says for those who do not see it."""

    name: str
    alt: str
    wide: Markup
    narrow: Markup


def draw_all(figures: Figures) -> dict[str, Plot]:
    """Every plot that the run has data for, by name."""
    return {plot.name: plot for plot in _plots(figures)}


def _plots(figures: Figures) -> Iterator[Plot]:
    pace, stages, failures, lanes = figures.pace, figures.stages, figures.failures, figures.lanes
    if pace is not None:
        alt = f"Clips per hour over time, in steps of {duration(pace.width_s)}; {sum(pace.committed)} clips committed."
        yield _plot("throughput", alt, 2.2, lambda axes, _: _throughput(axes, pace))
    if stages:
        said = ", ".join(f"{stage.name} {stage.share:.0%}" for stage in stages)
        yield _plot(
            "stages", f"Share of each stage: {said}.", 0.45 + 0.3 * len(stages), lambda a, n: _stages(a, stages, n)
        )
    if figures.engine_s > 0:
        said = ", ".join(f"{use.replace('_', ' ')} {figures.share_of(use):.0%}" for use in figures.uses)
        yield _plot("uses", f"What engines spent their time on: {said}.", 0.85, lambda axes, _: _uses(axes, figures))
    if failures:
        shown = failures[:MAX_BARS]
        said = ", ".join(f"{failure.kind} {len(failure.clips)}" for failure in shown)
        yield _plot(
            "failures", f"Quarantined clips by kind: {said}.", 0.45 + 0.3 * len(shown), lambda a, _: _failures(a, shown)
        )
    if lanes:
        some = lanes[:MAX_LANES]
        alt = f"Time line of {len(lanes)} engines: when each was busy with clips."
        yield _plot("workers", alt, 0.6 + 0.26 * len(some), lambda axes, narrow: _workers(axes, some, narrow))


def _plot(name: str, alt: str, height_in: float, draw: Draw) -> Plot:
    wide, narrow = (
        _svg(f"{name}-{width}", (width, height_in), draw, width == NARROW_IN) for width in (WIDE_IN, NARROW_IN)
    )
    return Plot(name, alt, wide, narrow)


def _svg(salt: str, size_in: tuple[float, float], draw: Draw, narrow: bool) -> Markup:
    """Draw into an `<svg>` element; the same data gives the same text."""
    sink = io.StringIO()
    with _style(salt):
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        figure = Figure(figsize=size_in, dpi=_DPI, layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        draw(axes, narrow)
        figure.savefig(sink, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(sink.getvalue())


@contextmanager
def _style(salt: str) -> Iterator[None]:
    import matplotlib as mpl

    with mpl.rc_context({**_STYLE, "svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the browser has fonts of its own
        yield


def _inline(document: str) -> Markup:
    """The `<svg>` element of a document that matplotlib wrote: it escapes every text that it draws."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = _ANY_ID.sub("", svg)
    svg = _FONT.sub(r"font-size: \1px", svg)
    for colour, name in _COLOURS.items():
        svg = svg.replace(colour, f"var(--plot-{name})")
    return Markup(svg)  # noqa: S704 - escaped by matplotlib, which a test proves


def _throughput(axes: Any, pace: Pace) -> None:
    edges = [pace.start + place * pace.width_s for place in range(len(pace.committed) + 1)]
    per_hour = 3600 / pace.width_s
    good = [count * per_hour for count in pace.committed]
    axes.bar(edges[:-1], good, width=pace.width_s * 0.9, align="edge", color=GOOD, label="committed")
    if any(pace.failed):
        bad = [count * per_hour for count in pace.failed]
        axes.bar(edges[:-1], bad, width=pace.width_s * 0.9, align="edge", bottom=good, color=BAD, label="quarantined")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0.2, labelcolor=SOFT)
    axes.set_ylabel("clips per hour")
    axes.grid(axis="y")
    axes.locator_params(axis="y", nbins=4)
    _time_axis(axes, edges[0], edges[-1])


def _stages(axes: Any, stages: Sequence[Stage], narrow: bool) -> None:
    notes = [
        f"{100 * stage.share:.0f} %"
        if narrow
        else f"{100 * stage.share:.1f} %, median {stage.p50_s:.3g} s, 95 % below {stage.p95_s:.3g} s"
        for stage in stages
    ]
    _bars(axes, [stage.name for stage in stages], [stage.share for stage in stages], notes, GOOD)
    axes.set_xlim(0, max(stage.share for stage in stages) * (1.25 if narrow else 1.6))


def _failures(axes: Any, failures: Sequence[Failure]) -> None:
    counts = [len(failure.clips) for failure in failures]
    names = [_short(failure.kind or "unknown") for failure in failures]
    _bars(axes, names, [float(count) for count in counts], [f"{count:,}" for count in counts], BAD)
    axes.set_xlim(0, max(counts) * 1.2)


def _bars(axes: Any, names: Sequence[str], values: Sequence[float], notes: Sequence[str], colour: str) -> None:
    places = range(len(names))
    bars = axes.barh(places, values, height=0.62, color=colour)
    axes.bar_label(bars, labels=list(notes), padding=6)
    axes.set_yticks(places, labels=list(names))
    axes.tick_params(axis="y", labelcolor=INK)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)


def _uses(axes: Any, figures: Figures) -> None:
    left = 0.0
    for use, colour in USE_COLOURS.items():
        share = figures.share_of(use)
        if share > 0:
            axes.barh([0], [share], left=left, height=0.5, color=colour, label=f"{use.replace('_', ' ')} {share:.0%}")
        left += share
    axes.set_xlim(0, 1)
    axes.set_axis_off()


def _workers(axes: Any, lanes: Sequence[Lane], narrow: bool) -> None:
    start = min([span[0] for lane in lanes for span in lane.busy] + [t for lane in lanes for t in lane.failed])
    end = max([span[1] for lane in lanes for span in lane.busy] + [t for lane in lanes for t in lane.failed])
    pixel_s = (end - start) / (NARROW_IN if narrow else WIDE_IN) / _DPI
    for place, lane in enumerate(lanes):
        spans = [(first, max(last - first, pixel_s)) for first, last in merged(lane.busy, pixel_s)]
        axes.broken_barh(spans, (place - 0.36, 0.5), facecolors=GOOD)
        failed = merged([(moment, moment) for moment in lane.failed], 3 * pixel_s)
        axes.plot([moment for moment, _ in failed], [place + 0.3] * len(failed), "|", color=BAD, markersize=6, mew=2.2)
    limit = 10 if narrow else MAX_LABEL_CHARS
    axes.set_yticks(range(len(lanes)), labels=[_short(lane.name, limit) for lane in lanes])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    _time_axis(axes, start, end)


def _time_axis(axes: Any, start: float, end: float) -> None:
    """Ticks at round times of day (UTC)."""
    steps = "%H:%M:%S" if end - start < 600 else "%H:%M" if end - start < 2 * 86400 else "%b %d"
    width_s = next((width for width in NICE_S if (end - start) / width <= MAX_TICKS), NICE_S[-1])
    ticks = [tick for tick in range(int(start // width_s) * width_s, int(end) + 1, width_s) if tick >= start]
    axes.set_xlim(start, max(end, start + 1))
    axes.set_xticks(ticks, labels=[datetime.fromtimestamp(tick, UTC).strftime(steps) for tick in ticks])


def _short(text: str, limit: int = MAX_LABEL_CHARS) -> str:
    """A label that fits: the end of a long name tells more than its start."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text)
    return plain if len(plain) <= limit else "..." + plain[3 - limit :]
