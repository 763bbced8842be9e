"""`batch-gen regress` from the command line: exit codes, JSON, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from batch_gen.cli import app, invoke
from batch_gen.commands.regress import COMMANDS, check_target, store_of, write_whole
from batch_gen.fake_engine import FakeOptions
from batch_gen.regress.approve import Decision, approve
from batch_gen.regress.results import load_night
from tests.regression import fake_bench, make_setup, render_night, write_suite


@pytest.fixture
def suite(tmp_path):
    """A small suite, and the flags that every command shares."""
    path = write_suite(tmp_path)
    return path, ["--out", f"file://{tmp_path / 'out'}"]


def test_new_approve_green_log(suite, capsys):
    """Ten minutes of a new suite: run is 6, approve, run is 0, log tells both."""
    path, out = suite
    run = ["regress", "run", str(path), *out, "--model", "fake", "--threads", "1"]
    assert invoke([*run, "--night", "n1"]) == 6
    assert "base: new: baseline: no baseline" in capsys.readouterr().out
    decision = ["--who", "Kim", "--why", "first"]
    assert invoke(["regress", "approve", str(path), *out, *decision]) == 0
    assert "approved   base: variant" in capsys.readouterr().out
    assert invoke([*run, "--night", "n2", "--json", "--emf", "--notify", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verdict"] == "pass"
    said = printed.err.splitlines()
    assert said[:2] == ["base: pass", "still: pass"]
    assert '"changed": ["base: new -> pass"' in said[2]
    assert '"regression_finished": 1' in said[3]
    assert invoke(["regress", "log", "small", "base", *out, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [night["verdict"] for night in told["nights"]] == ["new", "pass"]
    assert told["approvals"][0]["who"] == "Kim"


def test_calibrate_writes_limits_that_the_suite_reads(suite, tmp_path, capsys):
    """Repeats of an engine without noise keep the limits; the file that is written is a limits file."""
    path, out = suite
    target = tmp_path / "proposed.yaml"
    flags = [*out, "--model", "fake", "--threads", "1", "--limit", "1", "--quiet"]
    assert invoke(["regress", "calibrate", str(path), *flags, "--repeats", "2", "--write", str(target), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["identical"], body["refused"]) == (True, [])
    assert invoke(["regress", "run", str(path), *flags, "--limits", str(target)]) == 6
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


def test_a_file_that_cannot_be_written_is_refused_before_rendering(suite, tmp_path, capsys):
    """No repeat is rendered for proposals that would be lost; a file that is there keeps its mode and content."""
    path, out = suite
    for target in (tmp_path / "none" / "l.yaml", path / "l.yaml"):
        assert invoke(["regress", "calibrate", str(path), *out, "--model", "fake", "--write", str(target)]) == 2
        said = capsys.readouterr()
        assert f"--write {target}" in said.err
        assert "repeat" not in said.out
    old = tmp_path / "old.yaml"
    old.write_text("taps: none")
    old.chmod(0o640)
    assert check_target(str(old)) == old.resolve()
    assert old.read_text() == "taps: none"
    write_whole(old, "taps: ends")
    assert (old.read_text(), old.stat().st_mode & 0o777) == ("taps: ends", 0o640)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "{path}", "--night", "a/b"], "--night a/b"),
        (["run", "{path}", "--notify", "mail"], "--notify mail"),
        (["run", "{path}", "--limits", "none.yaml"], "none.yaml"),
        (["approve", "small", "--who", "Kim", "--why", "x"], "it has none"),
        (["approve", "small", "--who", "Kim", "--why", "x", "--retire", "v"], "no night"),
        (["log", "small", "fox"], "knows no case fox"),
        (["log", "small", "../x"], "expected the name of a case"),
        (["log", "{path}", "fox"], "knows no case fox"),
        (["report", "{path}"], "has no finished night of suite 'small'"),
        (["report", "a b"], "suite 'a b'"),
        (["run", "."], "has no name; expected the suite's manifest"),
        (["bisect", "small"], "expected the suite's manifest"),
        (["mutate", "{path}", "--limit", "1"], "needs two cases"),
    ],
)
def test_mistakes_exit_2_and_say_what_is_wrong(suite, arguments, words, capsys):
    """Nothing is rendered for a command line that cannot work."""
    path, out = suite
    filled = [argument.format(path=path) for argument in arguments]
    model = ["--model", "fake"] if filled[0] in ("run", "mutate", "bisect") else []
    assert invoke(["regress", *filled, *out, *model]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["v1.2", "some/v1.2.parquet"])
def test_a_name_and_its_manifest_mean_the_same_root(text):
    """Without --out both look where `run` of that manifest wrote, also when the name has a dot."""
    assert store_of(text, {}).url.endswith("/v1.2-out")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_shows_an_example(name):
    """Each command explains itself and shows one call."""
    assert "Example: batch-gen regress" in CliRunner().invoke(app, ["regress", name, "--help"]).output


@pytest.mark.s3
def test_a_bucket_serves_like_a_folder(tmp_path, s3_store):
    """Baselines, nights and objects live in S3 as they do in a folder."""
    setup = replace(make_setup(tmp_path), store=s3_store)
    assert render_night(setup, "n1").exit_code == 6
    approve(setup.store, load_night(s3_store, "small", "n1"), [], Decision("Kim", "first"))
    assert render_night(setup, "n2").exit_code == 0
    assert render_night(setup, "n3", FakeOptions(noise=40)).exit_code == 5
    assert fake_bench().render(setup.requests[0])[1] == 1
