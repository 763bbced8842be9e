"""The report as files: what is read, what is written, what is escaped, what the figures add up to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from batch_gen import tables
from batch_gen.cli import invoke
from batch_gen.errors import ConfigError, UsageError
from batch_gen.report import pages
from batch_gen.report.build import ReportOptions, build_report
from batch_gen.report.clips import collect, packed
from batch_gen.report.figures import figure_out, merged
from batch_gen.report.plots import draw_all
from batch_gen.report.source import read_run
from batch_gen.report.target import Target
from batch_gen.storage.folder import FolderStore
from batch_gen.storage.memory import MemoryStore
from tests.clips import moving_frames, write_clip
from tests.synthetic import ODD_ID, SyntheticRun, failures_of, make_requests, synthetic_run

MARKUP = "</script><script>alert('x')</script> & \u2028 \"q\" fox"


class CountingStore:
    """A store that counts what is asked of it."""

    def __init__(self, store) -> None:
        self._store = store
        self.gets, self.puts, self.deletes = [], [], []

    def __getattr__(self, name):
        return getattr(self._store, name)

    def get(self, key):
        """Counted."""
        self.gets.append(key)
        return self._store.get(key)

    def put(self, key, body, **options):
        """Counted."""
        self.puts.append(key)
        return self._store.put(key, body, **options)

    def delete(self, key):
        """Counted."""
        self.deletes.append(key)
        self._store.delete(key)


def written(num_clips=40, **options):
    """A store with a run of so many clips without files."""
    store = MemoryStore()
    requests = make_requests(num_clips)
    SyntheticRun(store, requests, failures=failures_of(requests, 17), **options).write()
    return store


def body_of(store, suffix):
    """The text of the one file of the report whose key matches."""
    keys = [listed.key for listed in store.list("report/") if re.search(suffix, listed.key)]
    assert len(keys) == 1, keys
    return store.get(keys[0]).body.decode()


def num_pending(store):
    """Clips without a verdict."""
    data = read_run(store)
    return figure_out(data, collect(data)).num_pending


def test_json_in_a_script_cannot_end_it():
    """Whatever a user wrote, the script's text holds no markup, no ampersand and no line separator, and parses back."""
    text = pages.script_json({"prompt": MARKUP})
    assert not set(text) & set("<>&\u2028\u2029")
    assert json.loads(text) == {"prompt": MARKUP}


def test_no_request_per_clip():
    """A build reads at most four objects a chunk and a few for the run, and never a record or a clip."""
    store = CountingStore(written(60))
    num_chunks = len(list(store.list("lease/"))) or len(list(store.list("done/")))
    build_report(store, ReportOptions())
    assert not [key for key in store.gets if key.startswith("clips/")]
    parts = [key for key in store.gets if key.startswith(("metrics/", "errors/"))]
    assert len(set(parts)) <= 2 * num_chunks
    assert len(store.gets) <= 6 * num_chunks + 12


def test_a_rebuild_writes_only_what_changed():
    """A second build of the same run writes the pages, the inventory and the two tables, and nothing else."""
    store = CountingStore(written())
    build_report(store, ReportOptions())
    store.puts.clear()
    build_report(store, ReportOptions())
    names = {"index.html", "clip.html", "run.html", "files.json"}
    assert set(store.puts) == {f"report/{name}" for name in names} | {"metrics.parquet", "clips.parquet"}
    assert store.deletes == []


def test_a_rebuild_while_the_run_goes_on():
    """Clips that ended since the last build appear, and every file that a page names is there."""
    store = MemoryStore()
    requests = make_requests(40)
    run = SyntheticRun(store, requests, num_pending=1)
    run.write()
    assert build_report(store, ReportOptions()).num_clips == 40
    before = {listed.key for listed in store.list("report/")}
    assert num_pending(store) > 0
    SyntheticRun(store, requests).write()
    build_report(store, ReportOptions())
    after = {listed.key for listed in store.list("report/")}
    assert num_pending(store) == 0
    assert before != after
    for page in ("index", "clip", "run"):
        html = store.get(f"report/{page}.html").body.decode()
        used = re.findall(r'(?:src|href)="((?:assets|data)/[^"]+)"', html)
        assert used
        assert {f"report/{name}" for name in used} <= after


def test_what_users_wrote_is_escaped_everywhere():
    """Prompts, ids, tags, messages and worker names with markup leave no tag in any file of the report."""
    store = MemoryStore()
    requests = make_requests(12)
    requests[0] = replace(requests[0], prompt=MARKUP, extra={"tag": MARKUP, MARKUP: "x"})
    requests[1] = replace(requests[1], clip_id=ODD_ID, row_id=ODD_ID)
    SyntheticRun(store, requests, failures={ODD_ID: (MARKUP, MARKUP, MARKUP)}, worker_name="<b>$x_1$&</b>").write()
    build_report(store, ReportOptions())
    for listed in store.list("report/"):
        text = store.get(listed.key).body.decode()
        assert "<script>alert" not in text
        assert "<b>$x" not in text
        assert "<i>" not in text.replace('<i class="key', "")
    assert "&lt;b&gt;$x_1$&amp;&lt;/b&gt;" in body_of(store, r"run\.html")


def test_plots_carry_no_colour_of_their_own():
    """A plot is an svg element without ids that could clash, its colours are variables of the page, and it repeats."""
    data = read_run(written())
    plots = draw_all(figure_out(data, collect(data)))
    assert set(plots) == {"throughput", "stages", "uses", "failures", "workers"}
    for plot in plots.values():
        for svg in (plot.wide, plot.narrow):
            assert svg.startswith("<svg")
            assert "var(--plot-" in svg
            assert not re.search(r'id="(figure|axes|text)_', svg)
            assert "#0100" not in svg
    assert draw_all(figure_out(data, collect(data))) == plots


def test_a_committed_clip_is_not_failed():
    """A clip that failed in one epoch and was committed in a later one counts once, as committed, with both attempts."""
    store = written(12)
    data = read_run(store)
    failed = next(row for row in data.errors)
    again = {
        **next(row for row in data.metrics),
        **{name: failed[name] for name in ("clip_id", "row_id", "prompt")},
        "epoch": 2,
        "attempt": 4,
    }
    store.put("metrics/0-00000-e2.parquet", tables.metrics_part([again]))
    clip = next(clip for clip in collect(read_run(store)) if clip.clip_id == failed["clip_id"])
    assert clip.is_committed
    assert [(row["epoch"], row["status"]) for row in clip.attempts] == [(1, "quarantined"), (2, "committed")]


def test_engine_time_adds_up():
    """Uses add up to the engines' time, shares to one, and costs to the price of the workers' hours."""
    data = read_run(written(80))
    figures = figure_out(data, collect(data), price_per_hour=36.0)
    assert sum(figures.share_of(use) for use in figures.uses) == pytest.approx(1.0)
    assert sum(figures.cost_of(use) for use in figures.uses) == pytest.approx(figures.cost)
    assert figures.cost == pytest.approx(figures.machine_s / 100)
    assert figures.uses["cold_start"] > 0
    assert figures.uses["failed"] > 0
    assert sum(stage.share for stage in figures.stages) == pytest.approx(1.0)
    assert figures.slowest_stage.name == "denoise"
    assert sum(figures.pace.committed) == figures.num_committed
    assert sum(figures.pace.failed) == figures.num_quarantined
    assert sum(len(failure.clips) for failure in figures.failures) == figures.num_quarantined


def test_workers_count_their_waste(tmp_path):
    """Seconds of engine starts and of failed attempts of a real worker arrive in the report."""
    (tmp_path / "o.json").write_text(json.dumps({"load_s": 0.2, "step_s": 0.05, "faults": {"clip-1": "nan"}}))
    row = {"prompt": "a red circle", "width": 64, "height": 48, "num_frames": 5, "steps": 2}
    tables.write_manifest(tmp_path / "m.parquet", [{"row_id": f"clip-{number}", **row} for number in range(3)])
    command = [
        sys.executable,
        "-m",
        "batch_gen",
        "run",
        "m.parquet",
        "--out",
        "out",
        "--model",
        "fake:o.json",
        "--quiet",
    ]
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True, check=False
    )
    assert done.returncode == 3
    data = read_run(FolderStore(tmp_path / "out"))
    figures = figure_out(data, collect(data))
    assert figures.uses["cold_start"] >= 0.2
    assert figures.uses["failed"] >= 0.05
    assert [failure.kind for failure in figures.failures] == ["nonfinite"]


def test_merged_spans_cover_the_same_time():
    """Joining spans across gaps that nobody sees loses none and leaves larger gaps open."""
    assert merged([(0.0, 1.0), (1.2, 2.0), (5.0, 6.0)], 0.5) == [(0.0, 2.0), (5.0, 6.0)]
    assert merged([(0.0, 9.0), (1.0, 2.0)], 0.0) == [(0.0, 9.0)]


def test_columns_survive_packing():
    """Constant, repetitive and free columns come back from their packed forms as they were."""
    columns = {"status": ["a"] * 4, "tag": ["x", "y", "x", "y"], "seed": [1, 2, 3, 4], "note": [None, "p", "q", "r"]}
    for name, cells in packed(columns).items():
        if isinstance(cells, dict):
            free = [cells["all"]] * 4 if "all" in cells else [cells["values"][place] for place in cells["places"]]
        else:
            free = cells
        assert free == columns[name]


def test_posters_are_made_once_and_so_many_a_build(tmp_path):
    """Builds make posters up to their limit, the next goes on, and nothing is made twice."""
    store = CountingStore(synthetic_run(tmp_path / "out", 6))
    assert build_report(store, ReportOptions(max_new_posters=2)).num_posters == 2
    assert build_report(store, ReportOptions(max_new_posters=2)).num_posters == 4
    assert build_report(store, ReportOptions()).num_posters == 5
    posters = [key for key in store.puts if key.endswith(".jpg")]
    assert len(posters) == len(set(posters)) == 5
    assert store.get(posters[0]).body.startswith(b"\xff\xd8")


def test_a_damaged_clip_has_no_poster(tmp_path):
    """A file that does not decode leaves its clip without a poster and the report whole."""
    store = MemoryStore()
    requests = make_requests(2)
    SyntheticRun(store, requests).write()
    clips = collect(read_run(store))
    write_clip(tmp_path / "good.mp4", moving_frames())
    for clip, body in zip(clips, (b"no video", (tmp_path / "good.mp4").read_bytes()), strict=True):
        store.put(clip.row["key"], body)
    assert build_report(store, ReportOptions()).num_posters == 1


def test_a_report_elsewhere_leaves_the_root_alone(tmp_path):
    """`--to` writes nothing below the output root and refers to its clips by a relative address."""
    store = synthetic_run(tmp_path / "runs/out", 4)
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "runs/out").rglob("*"))
    build_report(store, ReportOptions(to=tmp_path / "shown/here"))
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "runs/out").rglob("*")) == before
    meta = re.search(r'id="meta">(.*?)</script>', (tmp_path / "shown/here/clip.html").read_text()).group(1)
    root = (tmp_path / "shown/here" / json.loads(meta)["rootUrl"]).resolve()
    assert root == (tmp_path / "runs/out").resolve()


def test_a_report_with_clips_can_be_sent_away(tmp_path):
    """`--with-clips` puts the clips beside the pages, once."""
    store = synthetic_run(tmp_path / "out", 4)
    for _ in range(2):
        build_report(store, ReportOptions(to=tmp_path / "sent", with_clips=True))
    found = {path.relative_to(tmp_path / "sent").as_posix() for path in (tmp_path / "sent/clips").rglob("*.mp4")}
    assert found == {clip.row["key"] for clip in collect(read_run(store)) if clip.is_committed}
    assert '"rootUrl":""' in (tmp_path / "sent/index.html").read_text()


def test_clips_url_is_allowed_to_play():
    """`--clips-url` is where clips are played from, and the page's policy allows that host alone."""
    store = written(4)
    build_report(store, ReportOptions(clips_url="https://clips.example/run"))
    html = body_of(store, r"index\.html")
    assert '"rootUrl":"https://clips.example/run/"' in html
    assert "media-src 'self' clips.example;" in html


@pytest.mark.parametrize(
    "options", [{"with_clips": True}, {"with_clips": True, "to": Path("x"), "clips_url": "https://c.example"}]
)
def test_options_that_exclude_each_other(options):
    """Copying clips without a folder, or beside another address for them, is a usage error before anything is read."""
    with pytest.raises(UsageError):
        build_report(MemoryStore(), ReportOptions(**options))


def test_an_empty_root_is_refused():
    """A root without a run is exit code 2, with what to give instead."""
    with pytest.raises(ConfigError, match="--out of a run"):
        build_report(MemoryStore(), ReportOptions())


def test_a_run_without_verdicts_has_a_report():
    """Right after planning every clip is pending, and the report says so."""
    store = MemoryStore()
    SyntheticRun(store, make_requests(5))
    built = build_report(store, ReportOptions())
    assert built.num_clips == 5
    assert "No clip has a verdict yet" in body_of(store, r"run\.html")


def test_strange_figures_and_extras_pass():
    """NaN, missing timings, nested extras and a worker without name do not stop a report."""
    store = written(4)
    row = next(iter(read_run(store).metrics))
    odd = {name: row[name] for name in ("row_id", "status", "key", "width", "height", "num_frames", "fps", "steps")}
    store.put(
        "metrics/9-00000-e1.parquet",
        tables.metrics_part(
            [{**odd, "clip_id": "odd", "total_s": float("nan"), "extra": {"deep": [1, {"a": None}], "big": 2**70}}]
        ),
    )
    assert build_report(store, ReportOptions()).num_clips == 5


def test_the_command(tmp_path, capsys):
    """`batch-gen report OUT` ends with the page to open; `--json` says what was built; no run is exit 2."""
    synthetic_run(tmp_path / "out", 4)
    assert invoke(["report", str(tmp_path / "out"), "--max-posters", "1"]) == 0
    assert capsys.readouterr().out.endswith(f"open       {tmp_path}/out/report/index.html\n")
    assert invoke(["report", str(tmp_path / "out"), "--json", "--max-posters", "0", "--to", str(tmp_path / "to")]) == 0
    assert json.loads(capsys.readouterr().out)["num_clips"] == 4
    assert invoke(["report", str(tmp_path / "nothing")]) == 2


def test_names_of_a_target_hold_their_content(tmp_path):
    """Equal bodies keep their name, other bodies get another, so that no page meets data of another build."""
    target = Target(FolderStore(tmp_path), "")
    first = target.put_all({"data/a.js": b"1"})["data/a.js"]
    assert target.put_all({"data/a.js": b"1"})["data/a.js"] == first
    assert target.put_all({"data/a.js": b"2"})["data/a.js"] != first


@pytest.mark.s3
def test_a_report_on_s3(s3_store):
    """On S3 the report lies below the root with types that browsers accept, and posters are made from the objects."""
    import tempfile

    requests = make_requests(3)
    SyntheticRun(s3_store, requests).write()
    with tempfile.TemporaryDirectory() as folder:
        write_clip(Path(folder) / "a.mp4", moving_frames())
        for clip in collect(read_run(s3_store)):
            s3_store.put(clip.row["key"], Path(folder) / "a.mp4", content_type="video/mp4")
    built = build_report(s3_store, ReportOptions())
    assert built.num_posters == 3
    assert built.page == f"{s3_store.url}/report/index.html"
    assert s3_store.get("report/index.html").body.startswith(b"<!doctype html>")
    assert '"rootUrl":"../"' in body_of(s3_store, r"clip\.html")
