"""Write the pictures of docs/report.md: pages of a report in headless Chromium, light and dark, wide and narrow.

Run: python scripts/build_screenshots.py [OUT]
OUT is the output root of a run whose clips are shown; without one, a run of 600 drawn clips is made up, so that the
pictures are the same everywhere. Needs Chromium (scripts/browser installs it).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from selenium.webdriver.support.ui import WebDriverWait

from batch_gen.report.build import ReportOptions, build_report
from batch_gen.storage.base import open_store
from batch_gen.storage.memory import MemoryStore
from tests.browsing import browser, resize, set_dark
from tests.synthetic import synthetic_run

IMAGES = ROOT / "docs" / "images"
WIDE, NARROW = (1360, 850), (390, 844)
READY = """
const images = [...document.images].filter((i) => i.getBoundingClientRect().top < innerHeight);
const ready = document.body.classList.contains("ready") || location.pathname.endsWith("run.html");
const videos = [...document.querySelectorAll("video")];
return ready && images.every((i) => i.complete) && videos.every((v) => v.readyState > 1 || v.error);
"""


@dataclass(frozen=True)
class Picture:
    """One picture: which page, how wide, and in which light."""

    name: str
    page: str
    size: tuple[int, int]
    dark: bool


def pictures(first: str) -> list[Picture]:
    """Everything that the docs show; `first` is a clip that has neighbours."""
    return [
        Picture("report-gallery-dark", "index.html", WIDE, dark=True),
        Picture("report-gallery-light", "index.html", WIDE, dark=False),
        Picture("report-failures-light", "index.html#f.status=quarantined", WIDE, dark=False),
        Picture("report-clip-dark", f"clip.html#{first}", (1360, 1180), dark=True),
        Picture("report-run-light", "run.html", (1360, 1500), dark=False),
        Picture("report-run-dark", "run.html", (1360, 1500), dark=True),
        Picture("report-gallery-narrow", "index.html", NARROW, dark=True),
        Picture("report-clip-narrow", f"clip.html#{first}", NARROW, dark=False),
        Picture("report-run-narrow", "run.html", (390, 1200), dark=True),
    ]


@contextmanager
def report_folder(out: str | None) -> Iterator[Path]:
    """The report of the given run, or of one made up."""
    with tempfile.TemporaryDirectory() as folder:
        made_up = MemoryStore("campaign-out")
        store = open_store(out) if out else synthetic_run(Path(folder) / "run", 600, store=made_up, num_pending=1)
        target = Path(folder) / "report"
        build_report(store, ReportOptions(to=target, with_clips=True, price_per_hour=0.4))
        yield target


def main() -> int:
    """Take every picture and print its path."""
    if len(sys.argv) > 2:
        print(__doc__)
        return 2
    IMAGES.mkdir(parents=True, exist_ok=True)
    with report_folder(sys.argv[1] if len(sys.argv) == 2 else None) as report, browser(hover=True) as driver:
        driver.get(f"file://{report}/index.html")
        WebDriverWait(driver, 60).until(lambda d: d.execute_script(READY))
        first = driver.execute_script("return batchGen.get('clip_id', Math.min(8, batchGen.meta.numClips - 1))")
        for picture in pictures(first):
            resize(driver, *picture.size)
            set_dark(driver, picture.dark)
            driver.get("about:blank")
            driver.get(f"file://{report}/{picture.page}")
            WebDriverWait(driver, 60).until(lambda d: d.execute_script(READY))
            path = IMAGES / f"{picture.name}.png"
            driver.save_screenshot(str(path))
            print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
