"""Pages in a real browser: one headless Chromium and two runs for all tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.chrome.webdriver import WebDriver

from batch_gen.checkpoint import default_model
from batch_gen.commands.report import report
from batch_gen.tables import EXTRA_TYPES, write_manifest
from tests.browsing import browser, complaints, resize, set_dark
from tests.synthetic import synthetic_run

ROOT = Path(__file__).resolve().parents[2]
MARKUP = '<img src=x onerror="document.title=1"> & <b>bold</b> </script> fox'


@pytest.fixture(scope="session")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the browser puts files."""
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="session")
def one_browser(downloads: Path) -> Iterator[WebDriver]:
    """Chromium; a missing one is a failure that says how to get it."""
    with browser(downloads=downloads) as driver:
        yield driver


@pytest.fixture
def driver(one_browser: WebDriver) -> WebDriver:
    """The browser at 1280 x 900, light, with an empty console."""
    resize(one_browser, 1280, 900)
    set_dark(one_browser, dark=False)
    one_browser.get("about:blank")
    complaints(one_browser)
    one_browser.get_log("performance")
    return one_browser


@pytest.fixture(scope="session")
def real_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of 20 clips rendered by the built-in checkpoint: a sweep, samples, tags, and a prompt with markup."""
    folder = tmp_path_factory.mktemp("real")
    shape = {"width": 64, "height": 64, "num_frames": 5, "steps": 2, "guidance_high": 1.0, "guidance_low": 1.0}
    rows = [
        {
            "row_id": f"sweep-{k}",
            "prompt": "a red circle moving right on a black background",
            **shape,
            "guidance_high": float(k),
        }
        for k in (1, 2, 3, 4)
    ]
    rows += [
        {"row_id": f"take-{k}", "prompt": f"a blue square growing on a gray background, {k}", "samples": 2, **shape}
        for k in range(7)
    ]
    rows += [{"row_id": "markup", "prompt": MARKUP, "samples": 2, **shape}]
    rows = [{"seed": 7, **row, "tag": ("hero", 'it\'s "quoted"')[place % 2]} for place, row in enumerate(rows)]
    write_manifest(folder / "m.parquet", rows, {"tag": EXTRA_TYPES["str"]})
    out = folder / "real-out"
    command = [
        sys.executable,
        "-m",
        "batch_gen",
        "run",
        str(folder / "m.parquet"),
        "--out",
        str(out),
        "--quiet",
        "--model",
        default_model(""),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    report(str(out), {}, as_json=False)
    return out / "report"


@pytest.fixture(scope="session")
def big_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of 5,000 clips that were never rendered; some failed, some wait, one has quotes in its id."""
    out = tmp_path_factory.mktemp("big") / "big-out"
    synthetic_run(out, 5000, num_pending=1, odd=True)
    report(str(out), {"price_per_hour": 0.4, "max_posters": 40}, as_json=False)
    return out / "report"
