"""Headless Chromium for tests and screenshots: found, never installed, never talking to anybody."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

PLACES = ("/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome")
DRIVERS = ("/usr/bin/chromedriver", "/usr/lib/chromium/chromedriver", "/usr/lib/chromium-browser/chromedriver")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--force-device-scale-factor=1", "--autoplay-policy=no-user-gesture-required",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE localhost , EXCLUDE 127.0.0.1",
)  # fmt: skip


def find_program(places: tuple[str, ...], name: str) -> str:
    """Path of a program; RuntimeError with the way to get it where there is none."""
    found = next((place for place in places if Path(place).exists()), None) or shutil.which(name)
    if found is None:
        raise RuntimeError(f"no {name}: run scripts/browser as root (Debian, Ubuntu), or install the package {name}")
    return found


@contextmanager
def browser(
    width: int = 1280, height: int = 900, *, dark: bool = False, hover: bool = False, downloads: Path | None = None
) -> Iterator[webdriver.Chrome]:
    """A fresh browser with an empty profile; its console is kept for `complaints`."""
    chromium, driver_path = find_program(PLACES, "chromium"), find_program(DRIVERS, "chromedriver")
    with tempfile.TemporaryDirectory(prefix="batch-gen-browser-", ignore_cleanup_errors=True) as profile:
        options = Options()
        options.binary_location = chromium
        # a machine without a mouse has no hover; blink's setting says that there is one (2 is "hover", 4 a fine pointer)
        mouse = (
            ("--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",)
            if hover
            else ()
        )
        for flag in (*FLAGS, *mouse, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        if downloads is not None:
            options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
        driver = webdriver.Chrome(options=options, service=Service(driver_path))
        try:
            resize(driver, width, height)
            set_dark(driver, dark)
            yield driver
        finally:
            driver.quit()


def resize(driver: webdriver.Chrome, width: int, height: int) -> None:
    """The viewport in CSS pixels, exactly."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def set_dark(driver: webdriver.Chrome, dark: bool) -> None:
    """What the system prefers."""
    value = "dark" if dark else "light"
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": value}]}
    )


def complaints(driver: webdriver.Chrome) -> list[str]:
    """Warnings and errors of the console since the last call."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] in {"WARNING", "SEVERE"}]
