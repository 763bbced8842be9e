"""The page of a night, as HTML; tests/browser/test_regress_page.py looks at it in a browser."""

import html
import json
import re
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from batch_gen.errors import UsageError
from batch_gen.regress.locate import locate
from batch_gen.regress.replay import Difference
from batch_gen.report.regress import bisect_key, build_page, read_bisect
from batch_gen.report.regress_frames import MAX_SIDE_PX, amplified, jpeg, shown_frames
from batch_gen.report.regress_view import split_difference
from batch_gen.storage.base import StoreOptions, open_store
from tests.batch_gen.regress.nights import BAD_FRAME, MARKUP, SUITE, case, night, thirty_nights, write


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(root, page, what was built) of 30 nights."""
    root = tmp_path_factory.mktemp("nights")
    store = open_store(str(root), StoreOptions(durable=False))
    last = thirty_nights(store)
    answer = build_page(store, SUITE)
    return root, (root / f"regress/{SUITE}/{last.night}/report/index.html").read_text("utf-8"), answer


def test_the_last_night_is_shown(built):
    """The page lies beside the night's results and tells its verdict, counts and what it is made of."""
    root, page, answer = built
    assert answer.page.startswith(str(root))
    assert (answer.night, answer.verdict, answer.num_cases) == ("20261130T020000Z", "fail", 4)
    assert "exit code 5" in page
    assert page.index('id="case-0"') < page.index("one level lighter")
    assert page.index("speed.decode") < page.index('id="cases"')


def test_what_changed_since_the_last_green_night(built):
    """Every difference of fingerprint and numerics stands there with both values, escaped."""
    _, page, _ = built
    table = page[page.index('id="since-green"') : page.index("</table>", page.index('id="since-green"'))]
    assert re.findall(r"<code>(.*?)</code>", table) == [
        "tp=1,cp=1,cfg=1", "tp=2,cp=1,cfg=1", "one", "two &lt;b&gt;",
    ]  # fmt: skip


def test_the_trend_has_thirty_nights(built):
    """One cell per case and night, with the verdict as text too."""
    _, page, _ = built
    heat = page[page.index('class="heat"') : page.index("</table>", page.index('class="heat"'))]
    assert heat.count('<i class="cell') == 4 * 30
    assert heat.count("20261130T020000Z: fail") == 1
    assert heat.count("not in the suite") == 29


def test_markup_stays_text(built):
    """Prompts, notes, reasons and messages with markup are escaped in the page and in the data of its scripts."""
    _, page, _ = built
    assert "<img src=x" not in page
    assert html.escape(MARKUP, quote=False).replace('"', "&#34;") in page
    assert "looked <i>" not in page
    assert "rank 0 &lt;died&gt;" in page
    assert "default-src 'none'" in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_the_first_bad_frame_has_all_three_pictures(built):
    """Reference, new and difference of the bad frame exist; the difference is black but for the box."""
    root, page, _ = built
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))
    bear = data["cases"][0]
    assert (bear["firstBad"], bear["numFrames"], len(bear["frames"])) == (BAD_FRAME, 13, 13)
    shown = bear["frames"][BAD_FRAME]
    folder = root / f"regress/{SUITE}/20261130T020000Z/report"
    pixels = {kind: np.asarray(Image.open(folder / shown[kind])) for kind in ("reference", "new", "difference")}
    assert pixels["new"].shape == pixels["difference"].shape == (48, 64, 3)
    assert pixels["new"][10:22, 10:22].mean() < 8
    assert pixels["difference"][10:22, 10:22].mean() > 200
    assert pixels["difference"][30:, 30:].mean() < 4


def test_the_stage_that_moved_is_named(built):
    """What both nights kept says that the last step moved first; an equal case says nothing."""
    _, page, _ = built
    assert "By what both nights kept:</b> last step (step 3) moved first" in page
    assert page.count('class="located') == 1


def test_a_bisect_replaces_what_was_kept(tmp_path):
    """An answer of `regress bisect` beside the night is shown instead; a damaged one is not."""
    store = open_store(str(tmp_path), StoreOptions(durable=False))
    last = thirty_nights(store)
    found = locate([Difference("decode", "frames", None, False, 0.1, 9.0, 0.9, 6)])
    store.put(bisect_key(last, "bear"), json.dumps(found.to_json()).encode())
    page = build_page(store, SUITE, to=tmp_path / "page")
    text = (tmp_path / "page/index.html").read_text("utf-8")
    assert "Replayed:</b> decode moved first" in text
    assert page.page == str(tmp_path / "page/index.html")
    store.put(bisect_key(last, "bear"), b'{"first": null, "words": "", "stages": [1], "trend": null}')
    assert read_bisect(store, last, "bear") is None
    store.put(bisect_key(last, "bear"), b"{")
    build_page(store, SUITE, to=tmp_path / "page")
    assert "last step (step 3) moved first" in (tmp_path / "page/index.html").read_text("utf-8")


def test_objects_that_are_gone_cost_their_pictures_alone(tmp_path):
    """A night whose frames were removed has a page that says so."""
    store = open_store(str(tmp_path), StoreOptions(durable=False))
    last = thirty_nights(store)
    store.delete(last.case("bear").artifacts.frames.key)
    build_page(store, SUITE, to=tmp_path / "page")
    text = (tmp_path / "page/index.html").read_text("utf-8")
    assert "No pictures:" in text
    assert "is gone" in text


def test_a_night_that_is_not_there_is_told(tmp_path):
    """No night at all, and a name that none has, are usage errors that name what there is."""
    store = open_store(str(tmp_path), StoreOptions(durable=False))
    with pytest.raises(UsageError, match="no finished night"):
        build_page(store, SUITE)
    write(store, night(3, [case("fox", "new")]))
    with pytest.raises(UsageError, match="20261103T020000Z"):
        build_page(store, SUITE, "20261104T020000Z")


def test_the_first_night_has_a_page(tmp_path):
    """A night without baselines, objects and earlier nights is shown as it is."""
    store = open_store(str(tmp_path), StoreOptions(durable=False))
    write(store, night(3, [case("fox", "new")], verdict="new", exit_code=6))
    build_page(store, SUITE, to=tmp_path / "page")
    text = (tmp_path / "page/index.html").read_text("utf-8")
    assert "there is no green night on this platform yet" in text


def test_frames_are_chosen_evenly_and_bad_ones_always():
    """At most so many frames, both ends among them, and those that matter."""
    assert shown_frames(5, 10) == [0, 1, 2, 3, 4]
    assert shown_frames(100, 3, (7, None, 400)) == [0, 7, 50, 99]
    assert shown_frames(1, 12) == [0]


def test_a_difference_of_one_pixel_does_not_fade():
    """A large difference picture is made smaller by its largest values; a small one keeps its pixels."""
    old = np.zeros((2 * MAX_SIDE_PX, 2 * MAX_SIDE_PX, 3), np.uint8)
    new = old.copy()
    new[101, 301] = 16
    apart = amplified(old, new)
    assert apart.max() == 255
    small = np.asarray(Image.open(BytesIO(jpeg(apart))))
    assert small.shape == (MAX_SIDE_PX, MAX_SIDE_PX, 3)
    assert small.max() > 200


def test_differences_are_split():
    """`what: then -> now`; another line stands alone."""
    assert split_difference("numerics.mesh: tp=1 -> tp=2") == ("numerics.mesh", "tp=1", "tp=2")
    assert split_difference("something else") == ("something else", "", "")
