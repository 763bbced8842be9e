"""The files of a report: data as scripts, so that it works from disk, pages by jinja2 with everything escaped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from batch_gen.metrics import duration
from batch_gen.report.clips import Clip, details, extra_columns, index_columns, packed

BLOCK_CLIPS: Final = 2_000
DETAIL_CLIPS: Final = 100
ASSETS: Final = ("app.css", "theme.js", "common.js", "gallery.js", "clip.js")
PAGES: Final = ("index.html", "clip.html", "run.html")
_UNSAFE: Final = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def script_json(value: Any) -> str:
    """A value as JSON that stands safely inside a script, in a page or in a file."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str).translate(_UNSAFE)


def call(function: str, *arguments: Any) -> bytes:
    """A script that hands data to `function` of the page."""
    return f"{function}({','.join(map(script_json, arguments))});\n".encode("utf-8", "replace")


def assets() -> dict[str, bytes]:
    """The style sheet and the scripts."""
    folder = resources.files("batch_gen.report") / "assets"
    return {f"assets/{name}": (folder / name).read_bytes() for name in ASSETS}


def index_files(clips: Sequence[Clip], posters: dict[str, str]) -> dict[str, bytes]:
    """The gallery's table in blocks."""
    extra = extra_columns(clips)
    files = {}
    for number, start in enumerate(range(0, len(clips), BLOCK_CLIPS)):
        block = clips[start : start + BLOCK_CLIPS]
        columns = packed(index_columns(block, extra, posters))
        files[f"data/clips-{number}.js"] = call("batchGen.addClips", start, len(block), columns)
    return files


def detail_files(clips: Sequence[Clip]) -> dict[str, bytes]:
    """What only clip pages show, a hundred clips a file."""
    files = {}
    for number, start in enumerate(range(0, len(clips), DETAIL_CLIPS)):
        bodies = [details(clip) for clip in clips[start : start + DETAIL_CLIPS]]
        files[f"data/details-{number}.js"] = call("batchGen.addDetails", start, bodies)
    return files


def render(page: str, **values: Any) -> bytes:
    """A page by its template."""
    text: str = _environment().get_template(page).render(**values)
    return text.encode("utf-8", "replace")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("batch_gen.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "script": lambda value: Markup(script_json(value)),  # noqa: S704 - escaped for scripts
        "duration": duration,
        "seconds": seconds,
        "percent": percent,
        "bytes": num_bytes,
        "money": lambda value: f"{value:,.2f}",
        "moment": lambda value: datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
    }
    return environment


def seconds(value: float) -> str:
    """`0.0123 s`, `12.3 s`, `0:20:34`."""
    return f"{value:.3g} s" if value < 600 else duration(value)


def percent(share: float) -> str:
    """`0 %`, `0.4 %`, `85 %`."""
    return f"{share * 100:.1f} %" if 0 < share < 0.1 else f"{share:.0%}".replace("%", " %")


def num_bytes(value: float) -> str:
    """`512 B`, `1.2 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if unit != "B" else f"{value:.0f} B"
        value /= 1000
    return f"{value:.3g} TB"
