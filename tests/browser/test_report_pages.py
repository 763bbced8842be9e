"""The report in headless Chromium: what people ask of it, by mouse and by keyboard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from batch_gen.manifest import read_ids
from tests.browser.conftest import MARKUP
from tests.browsing import complaints, resize, set_dark
from tests.synthetic import ODD_ID

pytestmark = pytest.mark.browser
PATIENCE_S = 120

CONTRAST = """
const channel = (c) => (c /= 255, c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const parse = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return [n[0], n[1], n[2], n.length > 3 ? n[3] : 1]; };
const over = (top, under) => [0, 1, 2].map((k) => top[k] * top[3] + under[k] * (1 - top[3]));
const behind = (element) => {
  const layers = [];
  for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
  return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255]);
};
const bad = [];
let seen = 0;
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (!own || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true }) || element.closest(".hidden, .skip, svg, noscript, option") || element.disabled) continue;
  const under = behind(element);
  const ink = over(parse(getComputedStyle(element).color), under);
  const [a, b] = [light(ink), light(under)].sort((x, y) => y - x);
  const ratio = (a + 0.05) / (b + 0.05);
  seen++;
  if (ratio < 4.5) bad.push([element.tagName, element.className, element.textContent.slice(0, 30), ratio.toFixed(2)]);
}
return [seen, bad];
"""
FOCUSABLE = """
return [...document.querySelectorAll("a[href], button, input, select, summary, textarea")]
  .filter((e) => e.checkVisibility({ visibilityProperty: true }) && !e.disabled && e.tabIndex >= 0)
  .map((e, k) => (e.dataset.probe = k, (e.getAttribute("aria-label") || e.textContent || e.placeholder || e.id).trim().slice(0, 60)));
"""


def opened(driver, folder: Path, page: str = "index.html", *, ready: bool = True):
    """Load a page and wait until its scripts are done."""
    driver.get("about:blank")
    driver.get(f"file://{folder}/{page}")
    if ready:
        until(driver, lambda: "ready" in (driver.find_element(By.TAG_NAME, "body").get_attribute("class") or ""))
    return driver


def until(driver, condition):
    """Wait for a condition; the page decides when, not the clock."""
    return WebDriverWait(driver, PATIENCE_S, poll_frequency=0.05).until(lambda _: condition())


def texts(driver, css: str) -> list[str]:
    """The text of every element."""
    return driver.execute_script("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", css)


def count_of(driver) -> str:
    """The line that says how many clips were found."""
    return driver.find_element(By.ID, "count").text


def search(driver, words: str) -> None:
    """Type into the search field, and wait for its effect."""
    field = driver.find_element(By.ID, "search")
    field.clear()
    field.send_keys(words)
    until(driver, lambda: any(f'"{words}"' in chip for chip in texts(driver, ".chip")))


class Clicks:
    """A visitor who counts clicks."""

    def __init__(self, driver) -> None:
        self.driver, self.count = driver, 0

    def on(self, css: str, text: str = "") -> None:
        """Click the first element that holds a text."""
        found = [e for e in self.driver.find_elements(By.CSS_SELECTOR, css) if text in e.text]
        assert found, f"nothing to click at {css} with {text!r}"
        found[0].click()
        self.count += 1


def test_a_real_run_opens_from_disk_without_a_word_in_the_console(driver, real_run):
    """All pages of a rendered run load from file:// with no console message and no request beyond the disk."""
    for page in ("index.html", "clip.html#sweep-1", "run.html"):
        opened(driver, real_run, page, ready=page != "run.html")
    assert complaints(driver) == []
    events = (json.loads(entry["message"])["message"] for entry in driver.get_log("performance"))
    urls = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert urls
    assert {url.split(":")[0] for url in urls} <= {"file", "data", "blob", "about"}


def test_every_clip_of_a_real_run_has_its_poster(driver, real_run):
    """Twenty rendered clips show twenty poster frames with alt texts that name clip and prompt."""
    opened(driver, real_run)
    assert count_of(driver) == "20 clips"
    driver.execute_script("document.querySelectorAll('img').forEach((i) => (i.loading = 'eager'))")
    until(driver, lambda: driver.execute_script("return [...document.images].every((i) => i.complete)"))
    widths = driver.execute_script("return [...document.images].map((i) => i.naturalWidth)")
    assert len(widths) == 20
    assert min(widths) > 0
    assert all(
        "Frame of clip" in image.get_attribute("alt") for image in driver.find_elements(By.CSS_SELECTOR, ".card img")
    )


def test_a_clip_plays_on_click_and_stops(driver, real_run):
    """A click on the poster plays the clip in place; where the codec is missing the poster stays."""
    opened(driver, real_run)
    frame = driver.find_element(By.CSS_SELECTOR, ".card .frame")
    frame.find_element(By.CSS_SELECTOR, ".play").click()
    until(
        driver,
        lambda: driver.execute_script(
            "const f = document.querySelector('.card .frame'); const v = f.querySelector('video.player');"
            "return f.classList.contains('unplayable') || (v && v.currentTime > 0);"
        ),
    )
    if "unplayable" in frame.get_attribute("class"):
        assert frame.find_element(By.CSS_SELECTOR, "img").is_displayed()
        return
    frame.find_element(By.CSS_SELECTOR, ".play").click()
    assert not driver.find_elements(By.CSS_SELECTOR, "video.player")


def test_a_clip_plays_on_hover(driver, real_run):
    """The pointer over a poster plays the clip, and leaving it ends that."""
    from selenium.webdriver import ActionChains

    opened(driver, real_run)
    frame = driver.find_element(By.CSS_SELECTOR, ".card .frame")
    ActionChains(driver).move_to_element(frame).perform()
    until(driver, lambda: driver.find_elements(By.CSS_SELECTOR, "video.player, .unplayable"))
    ActionChains(driver).move_to_element(driver.find_element(By.ID, "count")).perform()
    until(driver, lambda: not driver.find_elements(By.CSS_SELECTOR, "video.player"))
    assert complaints(driver) == []


def test_markup_in_a_prompt_is_text(driver, real_run):
    """A prompt with tags and a script's end is shown letter by letter in gallery and clip page."""
    opened(driver, real_run)
    search(driver, "onerror")
    until(driver, lambda: count_of(driver).startswith("2 found"))
    assert texts(driver, ".card .prompt") == [MARKUP, MARKUP]
    driver.find_element(By.CSS_SELECTOR, ".card h2 a").click()
    until(driver, lambda: driver.find_elements(By.CSS_SELECTOR, ".beside .prompt"))
    assert texts(driver, ".beside .prompt") == [MARKUP]
    assert driver.find_elements(By.CSS_SELECTOR, ".prompt img, .prompt b") == []
    assert driver.title == "markup-s0 - real-out"


def test_an_id_with_quotes_is_text_and_a_working_link(driver, big_run):
    """An id with quotes and markup is shown as it is, and leads to its own page."""
    opened(driver, big_run)
    search(driver, '"quoted"')
    until(driver, lambda: count_of(driver).startswith("1 found"))
    assert texts(driver, ".card h2") == [ODD_ID]
    driver.find_element(By.CSS_SELECTOR, ".card h2 a").click()
    until(driver, lambda: texts(driver, "h1") == [ODD_ID])
    until(
        driver,
        lambda: driver.execute_script("const v = document.querySelector('video'); return !v || v.readyState > 0"),
    )
    assert complaints(driver) == []


def test_tags_with_quotes_filter(driver, real_run):
    """A tag column is a filter, whatever its values hold."""
    opened(driver, real_run)
    Clicks(driver).on("#facets label", 'it\'s "quoted"')
    assert count_of(driver).endswith("found, of 20 clips")
    assert 'tag: it\'s "quoted"' in texts(driver, ".chip")[0]


def test_the_clip_page_tells_everything(driver, real_run):
    """Settings, stage timings, origin, attempts and the sweep's neighbours stand on a clip's page."""
    opened(driver, real_run, "clip.html#sweep-2")
    assert texts(driver, ".panel > h2")[0].startswith("Same prompt 4 clips, by guidance high")
    terms = dict(zip(texts(driver, "dl.facts dt"), texts(driver, "dl.facts dd"), strict=True))
    assert terms["guidance high"] == "2"
    assert terms["seed"] == "7"
    assert len(terms["frames hash"]) == 64
    assert {"checkpoint", "worker", "numerics key", "manifest", "manifest row", "torch", "tag"} <= terms.keys()
    assert "denoise" in texts(driver, ".timings dt")
    assert texts(driver, ".near .card b") == ["1", "2", "3", "4"]
    assert "committed" in texts(driver, ".panel tbody td")


def test_samples_are_neighbours(driver, real_run):
    """The samples of a row stand side by side and play together."""
    opened(driver, real_run, "clip.html#take-3-s1")
    assert texts(driver, ".near h3") == ["take-3-s0", "take-3-s1"]
    driver.find_element(By.CSS_SELECTOR, ".near h2 button").click()
    until(driver, lambda: len(driver.find_elements(By.CSS_SELECTOR, ".near video.player, .near .unplayable")) == 2)
    assert complaints(driver) == []


def test_search_filter_and_sort_of_thousands(driver, big_run):
    """Among 5,000 clips search finds, filters combine with counts, and sorting orders by a metric."""
    opened(driver, big_run)
    assert count_of(driver) == "1 to 48 of 5,000 clips"
    search(driver, "shot-1203-c")
    until(driver, lambda: texts(driver, ".card h2") == ["shot-1203-c"])
    search(driver, "purple triangle")
    until(driver, lambda: "found" in count_of(driver))
    Clicks(driver).on("#facets label", "hero")
    Clicks(driver).on("#facets label", "quarantined")
    found = texts(driver, ".card .prompt")
    assert found
    assert all("purple triangle" in prompt for prompt in found)
    opened(driver, big_run)
    Select(driver.find_element(By.ID, "sort")).select_by_value("total_s")
    times = [float(text.split()[0]) for text in texts(driver, ".card .figure")]
    assert times == sorted(times, reverse=True)
    assert len(times) == 48
    assert complaints(driver) == []


def test_the_address_keeps_the_view(driver, big_run):
    """Back from a clip page, search, filters, order and page are as they were."""
    opened(driver, big_run, "index.html#q=circle&f.status=committed&sort=-denoise_s&page=3&size=24")
    before = (count_of(driver), texts(driver, ".card h2"))
    driver.find_element(By.CSS_SELECTOR, ".card h2 a").click()
    until(driver, lambda: "clip.html" in driver.current_url)
    driver.back()
    until(driver, lambda: driver.find_elements(By.CSS_SELECTOR, ".card h2"))
    assert (count_of(driver), texts(driver, ".card h2")) == before


def test_pages_are_small_and_lazy(driver, big_run):
    """Of 5,000 clips 48 are in the page, and details are read only when a clip is opened."""
    opened(driver, big_run)
    assert len(driver.find_elements(By.CSS_SELECTOR, ".card")) == 48
    assert (
        driver.execute_script(
            "return performance.getEntriesByType('resource').filter((e) => e.name.includes('details')).length"
        )
        == 0
    )
    assert driver.execute_script("return document.querySelectorAll('video').length") <= 48
    driver.find_element(By.CSS_SELECTOR, "[aria-label='Page on']").click()
    assert count_of(driver).startswith("49 to 96 of")


def test_a_selection_is_saved_as_an_id_file(driver, big_run, downloads):
    """Failed clips are selected and saved in three clicks, as a file that `run --ids` reads."""
    visitor = Clicks(opened(driver, big_run))
    visitor.on("#facets label", "nonfinite")
    visitor.on("#select-found")
    visitor.on("#save")
    assert visitor.count == 3
    path = downloads / "big-out-ids.txt"
    until(driver, path.exists)
    assert f"{len(read_ids(path))} selected" == driver.find_element(By.ID, "selected").text
    path.unlink()
    driver.find_element(By.ID, "clear").click()
    assert not driver.find_element(By.ID, "selection").is_displayed()


def test_five_questions_in_three_clicks(driver, big_run):
    """Each question of docs/report.md is answered by at most three clicks from the gallery."""
    page = Path(__file__).parents[2] / "docs/report.md"
    asked = [
        line.split(".", 1)[1].strip(" *")
        for line in page.read_text("utf-8").splitlines()
        if line[:1].isdigit() and "?" in line
    ]
    answers = {
        "Which clips failed, and why?": (
            [("#facets label", "quarantined")],
            ".card .words",
            "the decoder needs 2.1 GiB",
        ),
        "Which stage is the slowest?": ([(".bar a", "Run")], "#stages h2", "denoise takes most"),
        "What did it cost, and what was wasted?": ([(".bar a", "Run")], "#waste", "worker hours at"),
        "Which clips took longest, and on which worker?": ([(".bar a", "Run")], "#slowest td", "render-"),
        "How do the values of a sweep compare?": ([(".card h2 a", "shot-0001-a")], ".near", "guidance high"),
    }
    assert [question.split("?")[0] + "?" for question in asked] == list(answers)
    for steps, place, answer in answers.values():
        visitor = Clicks(opened(driver, big_run))
        for css, text in steps:
            visitor.on(css, text)
        until(driver, lambda place=place, answer=answer: any(answer in text for text in texts(driver, place)))
        assert visitor.count <= 3


@pytest.mark.parametrize(
    "page",
    [
        "index.html#f.status=quarantined&size=24",
        "index.html#size=24&page=2",
        "clip.html#shot-0000-a",
        "clip.html#shot-0000-d",
        "run.html",
    ],
)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_is_readable(driver, big_run, page, dark):
    """Every text of every page has a contrast of 4.5 or more against what is behind it."""
    set_dark(driver, dark)
    opened(driver, big_run, page, ready=page != "run.html")
    seen, bad = driver.execute_script(CONTRAST)
    assert seen > 30
    assert bad == []


@pytest.mark.parametrize("page", ["index.html#size=24", "clip.html#shot-0000-a", "run.html"])
def test_the_keyboard_reaches_everything(driver, big_run, page):
    """Tab visits every link, button, field and fold of a page, each with a name and a visible focus."""
    opened(driver, big_run, page, ready=page != "run.html")
    names = driver.execute_script(FOCUSABLE)
    assert all(names), names
    reached, styles = set(), set()
    body = driver.switch_to.active_element
    for _ in range(len(names) + 60):
        driver.switch_to.active_element.send_keys(Keys.TAB)
        probe, outline = driver.execute_script(
            "const e = document.activeElement; return [e.dataset.probe ?? null, getComputedStyle(e).outlineStyle]"
        )
        if probe is not None:
            reached.add(int(probe))
            styles.add(outline)
        if len(reached) == len(names):
            break
    assert {names[place] for place in set(range(len(names))) - reached} == set()
    assert styles == {"solid"}
    assert body is not None


def test_the_gallery_by_keys_alone(driver, big_run):
    """Slash searches, arrows walk, x selects, space plays, brackets turn pages, ? explains, Enter opens."""
    opened(driver, big_run)

    def press(*keys: str) -> None:
        driver.switch_to.active_element.send_keys(*keys)

    press("/")
    assert driver.switch_to.active_element.get_attribute("id") == "search"
    press(Keys.ESCAPE)
    press(Keys.ARROW_RIGHT)
    press(Keys.ARROW_RIGHT)
    assert driver.switch_to.active_element.text == texts(driver, ".card h2")[1]
    press("x")
    assert driver.find_element(By.ID, "selected").text == "1 selected"
    press(" ")
    until(driver, lambda: driver.find_elements(By.CSS_SELECTOR, "video.player, .unplayable"))
    press(" ")
    press("x")
    press("]")
    assert count_of(driver).startswith("49 to 96")
    press("?")
    assert driver.find_element(By.ID, "keys").is_displayed()
    press(Keys.ESCAPE)
    press("[")
    press(Keys.ENTER)
    until(driver, lambda: "clip.html" in driver.current_url)


@pytest.mark.parametrize(
    "page",
    ["index.html", "index.html#f.status=quarantined", "clip.html#shot-0000-d", "clip.html#shot-0001-a", "run.html"],
)
def test_narrow_screens_do_not_scroll_sideways(driver, big_run, page):
    """At 390 pixels no page is wider than the screen, and no text is smaller than 11 pixels."""
    resize(driver, 390, 844)
    opened(driver, big_run, page, ready=page != "run.html")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= 390
    smallest = driver.execute_script(
        "return Math.min(...[...document.querySelectorAll('body *')].filter((e) => e.checkVisibility() && !e.closest('svg') && [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim()))"
        ".map((e) => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 11


def test_the_theme_is_kept(driver, big_run):
    """The button switches between light and dark, plots included, and the next page remembers."""
    opened(driver, big_run, "run.html", ready=False)
    ink = lambda: driver.execute_script("return getComputedStyle(document.querySelector('.plot text')).fill")  # noqa: E731
    before = ink()
    driver.find_element(By.ID, "theme").click()
    after = ink()
    assert after != before
    opened(driver, big_run, "run.html", ready=False)
    assert ink() == after
    driver.find_element(By.ID, "theme").click()
    driver.execute_script("localStorage.clear()")


def test_the_run_page_draws_every_plot(driver, big_run):
    """Throughput, stages, engine time, failures and workers are SVG with a description, one width at a time."""
    opened(driver, big_run, "run.html", ready=False)
    shown = [plot for plot in driver.find_elements(By.CSS_SELECTOR, ".plot") if plot.is_displayed()]
    assert len(shown) == 5
    assert all(len(plot.get_attribute("aria-label")) > 20 for plot in shown)
    assert all(plot.find_elements(By.TAG_NAME, "svg") for plot in shown)


def test_an_unknown_clip_is_told(driver, big_run):
    """An address with an id that the report does not have says so."""
    opened(driver, big_run, "clip.html#nobody", ready=False)
    until(driver, lambda: "No such clip" in texts(driver, "h1"))
    assert 'no clip "nobody"' in driver.find_element(By.ID, "clip").text
