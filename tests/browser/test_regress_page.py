"""The page of a night in headless Chromium: frames in step, curves, what changed, the trend."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from batch_gen.report.regress import build_page
from batch_gen.storage.base import StoreOptions, open_store
from tests.batch_gen.regress.nights import BAD_FRAME, MARKUP, SUITE, thirty_nights
from tests.browser.test_report_pages import CONTRAST, opened, texts, until
from tests.browsing import complaints, resize, set_dark

pytestmark = pytest.mark.browser
LOADED = """
const images = [...document.querySelectorAll("#case-0 .pictures img")];
return images.length > 0 && images.every((image) => image.complete && image.naturalWidth > 0);
"""


@pytest.fixture(scope="module")
def night_page(tmp_path_factory):
    """The folder with the page of a red night after 29 green ones."""
    root = tmp_path_factory.mktemp("nights")
    store = open_store(str(root), StoreOptions(durable=False))
    last = thirty_nights(store)
    build_page(store, SUITE)
    return root / f"regress/{SUITE}/{last.night}/report"


def frame_of(driver) -> int:
    """The frame that the red case shows."""
    return int(driver.find_element(By.CSS_SELECTOR, "#case-0 .player").get_attribute("data-frame"))


def sources(driver) -> dict[str, str]:
    """kind -> file of the pictures of the red case."""
    images = driver.find_elements(By.CSS_SELECTOR, "#case-0 .pictures img")
    return {image.get_attribute("data-kind"): image.get_attribute("src").rsplit("/", 1)[-1] for image in images}


def test_the_red_case_opens_at_its_first_bad_frame(driver, night_page):
    """Reference, new and difference stand side by side and show the first bad frame, all loaded, nothing blocked."""
    opened(driver, night_page)
    until(driver, lambda: driver.execute_script(LOADED))
    assert frame_of(driver) == BAD_FRAME
    assert set(sources(driver)) == {"reference", "new", "difference"}
    boxes = [image.rect for image in driver.find_elements(By.CSS_SELECTOR, "#case-0 .pictures img")]
    assert len({box["y"] for box in boxes}) == 1
    assert len({box["width"] for box in boxes}) == 1
    assert complaints(driver) == []


def test_the_three_pictures_move_in_step(driver, night_page):
    """Slider, buttons and the way back to the bad frame move all three pictures and the curves' cursors together."""
    opened(driver, night_page)
    slider = driver.find_element(By.CSS_SELECTOR, "#case-0 input[type=range]")
    slider.send_keys(Keys.HOME)
    assert frame_of(driver) == 0
    assert {name.split("-")[-2] for name in sources(driver).values()} == {"0000"}
    driver.find_element(By.CSS_SELECTOR, "#case-0 button[aria-label='Frame on']").click()
    assert {name.split("-")[-2] for name in sources(driver).values()} == {"0001"}
    assert "frame 1" in texts(driver, "#case-0 [data-chart=PSNR] figcaption")[0]
    button = next(
        item for item in driver.find_elements(By.CSS_SELECTOR, "#case-0 .controls button") if "First bad" in item.text
    )
    button.click()
    assert frame_of(driver) == BAD_FRAME
    assert "28 at frame 6" in texts(driver, "#case-0 [data-chart=PSNR] figcaption")[0]


def test_a_click_into_a_curve_goes_to_its_frame(driver, night_page):
    """Curves of PSNR, SSIM, luma and motion are described in words, and a click shows the frame under it."""
    opened(driver, night_page)
    labels = driver.execute_script(
        "return [...document.querySelectorAll('#case-0 .chart svg')].map((e) => e.getAttribute('aria-label'))"
    )
    assert [label.split(":")[0] for label in labels] == [
        "PSNR", "SSIM", "Luma against the baseline", "Motion", "Velocity error over steps",
    ]  # fmt: skip
    assert "from 28 to 100 dB" in labels[0]
    driver.execute_script(
        "const svg = document.querySelector('#case-0 [data-chart=PSNR] svg'), box = svg.getBoundingClientRect();"
        "svg.dispatchEvent(new MouseEvent('click', {clientX: box.right - 8, clientY: box.top + 5, bubbles: true}));"
    )
    assert frame_of(driver) == 12


def test_play_moves_and_stops(driver, night_page):
    """Play walks through the frames; the button then stops it."""
    opened(driver, night_page)
    play = next(
        item for item in driver.find_elements(By.CSS_SELECTOR, "#case-0 .controls button") if item.text == "Play"
    )
    play.click()
    until(driver, lambda: frame_of(driver) != BAD_FRAME)
    play.click()
    assert play.get_attribute("aria-pressed") == "false"


def test_what_changed_the_trend_and_the_stage_are_told(driver, night_page):
    """Fingerprint and numerics since the last green night, 30 nights, and the stage that moved first."""
    opened(driver, night_page)
    assert texts(driver, "#since-green tbody th") == ["numerics.mesh", "versions.batch-gen"]
    assert len(driver.find_elements(By.CSS_SELECTOR, ".heat tbody tr:first-child td")) == 30
    assert len(driver.find_elements(By.CSS_SELECTOR, "#night-charts svg")) == 3
    assert "last step (step 3) moved first" in texts(driver, "#case-0 .located")[0]
    assert "lost" not in texts(driver, "#verdict")[0]


def test_markup_does_nothing(driver, night_page):
    """A prompt and a note with markup are shown as text; no script of theirs runs, the title stays."""
    opened(driver, night_page)
    assert MARKUP in texts(driver, ".case .prompt")
    assert driver.title == "Regression - nightly 20261130T020000Z"
    assert driver.find_elements(By.CSS_SELECTOR, "main img[src=x]") == []


def test_an_equal_case_is_closed_and_opens(driver, night_page):
    """A green case hides its frames until it is opened, then shows the new ones alone."""
    opened(driver, night_page)
    green = driver.find_element(By.XPATH, "//section[contains(@class, 'case')][.//p[contains(., 'one level lighter')]]")
    assert green.find_elements(By.CSS_SELECTOR, ".player img") == []
    green.find_element(By.CSS_SELECTOR, ".viewer summary").click()
    until(driver, lambda: len(green.find_elements(By.CSS_SELECTOR, ".player img")) == 1)
    assert "equal to the baseline" in green.find_element(By.CSS_SELECTOR, ".viewer summary").text


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read(driver, night_page, dark):
    """Contrast is at least 4.5 to 1 in light and dark."""
    set_dark(driver, dark)
    opened(driver, night_page)
    seen, bad = driver.execute_script(CONTRAST)
    assert seen > 60
    assert bad == []


def test_a_narrow_screen(driver, night_page):
    """At 390 pixels the page is no wider than the screen."""
    resize(driver, 390, 844)
    opened(driver, night_page)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 390


def test_without_objects_from_elsewhere(driver, night_page):
    """Everything the page asks for lies in its own folder."""
    driver.get_log("performance")
    opened(driver, night_page)
    asked = [
        entry["message"] for entry in driver.get_log("performance") if "Network.requestWillBeSent" in entry["message"]
    ]
    assert asked
    assert not [message for message in asked if '"url":"http' in message]
