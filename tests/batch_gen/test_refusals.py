"""What can never be rendered is refused by every command alike, before anything is written."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch_gen.checkpoint import Checkpoint
from batch_gen.cli import invoke
from batch_gen.config import load_preset, resolve
from batch_gen.drain import Drain
from batch_gen.errors import MemoryTooSmall, UsageError
from batch_gen.estimate.choose import check_latents, question_of
from batch_gen.estimate.published import published_checkpoint
from batch_gen.interruption import drain_at, parse_moment
from batch_gen.job_file import check_texts
from batch_gen.request import Bucket

T2V = "wan2.2-t2v-a14b"


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    """One row at a small size, in the current folder."""
    monkeypatch.chdir(tmp_path)
    write(64)
    return "a.parquet"


def write(width, num_frames=5):
    """One row of this size."""
    table = {"prompt": ["a fox"], "width": [width], "height": [48], "num_frames": [num_frames], "steps": [2]}
    pq.write_table(pa.table(table), "a.parquet")


@pytest.mark.parametrize("command", ["run", "plan", "validate", "compile", "regress run"])
def test_a_mesh_that_does_not_divide_the_model(manifest, tmp_path, capsys, command):
    """Heads that tp does not divide are told at once, with the degrees that do; no run is begun."""
    flags = ["--model", T2V, "--preset", "t2v-a14b-480p", "--mesh", "tp=3", "--out", "o"]
    assert invoke([*command.split(), manifest, *flags]) == 2
    assert "tp(3) must divide 40 heads and a feed-forward width of 13824; legal: 1, 2, 4" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [manifest]


def test_a_fleet_is_not_ordered_for_a_mesh_that_cannot_be(manifest, capsys):
    """submit holds the mesh against the checkpoint's own sizes, before it prints or uploads an order."""
    flags = ["--model", "pocket", "--profile", "cpu", "--mesh", "tp=7", "--out", "s3://bucket/o", "--dry-run"]
    assert invoke(["submit", manifest, *flags]) == 2
    assert "tp(7) must divide" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shard", "5/2"], "--shard 5/2: expected i/n"),
        (["--shard", "-1/0"], "--shard -1/0: expected i/n"),
        (["--mesh", ""], "--mesh is empty"),
        (["--mesh", "tp=2,,"], "mesh 'tp=2,,': expected degrees"),
        (["--mesh", ","], "expected degrees"),
        (["--mesh", "tp=2,tp=2"], "expected degrees"),
        (["--model", ""], "--model is empty"),
        (["--preset", " "], "--preset is empty"),
        (["--override", ""], "--override is empty"),
        (["--price-per-hour", "inf"], "not a finite number"),
        (["--price-per-hour", "nan"], "not a finite number"),
        (["--price-per-hour", "-1"], "not a finite number"),
        (["--stall-timeout", "1e300"], "stall_timeout"),
        (["--lease-ttl", "1e300"], "lease_ttl"),
        (["--drain-budget", "1e300"], "drain_budget"),
    ],
)
def test_settings_that_mean_nothing(manifest, tmp_path, capsys, flags, words):
    """Empty, half written or endless values are exit 2 with the flag's name, for plan and run alike."""
    base = [] if "--model" in flags else ["--model", "fake"]
    for command in ("plan", "run"):
        assert invoke([command, manifest, *base, "--out", "o", *flags]) == 2
        assert words.replace("_", "-") in capsys.readouterr().err.replace("_", "-")
    assert [path.name for path in tmp_path.iterdir()] == [manifest]


def test_a_job_file_holds_finite_numbers(manifest, tmp_path, capsys):
    """What the command line refuses, a file may not say either; JSON has no word for infinity."""
    (tmp_path / "job.yaml").write_text("price-per-hour: .inf\n")
    assert invoke(["plan", manifest, "--model", "fake", "--config", "job.yaml"]) == 2
    assert "job.yaml: price_per_hour" in capsys.readouterr().err


def test_prices_of_finished_runs_are_finite(manifest, capsys):
    """status and report take the price without a run's settings, by the same rule."""
    for command in ("status", "report"):
        assert invoke([command, "nowhere", "--price-per-hour", "inf"]) == 2
        assert "not a finite number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("width", "num_frames", "words"),
    [
        (2147483632, 5, "width = 2147483632: must be 1 to 16384 (the largest side that video encoders take)"),
        (16400, 5, "nearest is 16384"),
        (64, 2147483645, "num_frames = 2147483645: must be 1 to 65537 (more than an hour of video in one clip)"),
        (-16, 5, "width = -16: must be at least 1"),
    ],
)
def test_sizes_that_no_encoder_takes(manifest, capsys, width, num_frames, words):
    """A side or length beyond every encoder is a fault of the row, in validate as in plan and run."""
    write(width, num_frames)
    for command in ("validate", "plan", "run"):
        assert invoke([command, manifest, "--model", "fake", "--out", "o"]) == 2
        assert words in capsys.readouterr().err
    assert invoke(["validate", manifest, "--model", "fake", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["num_faults"] == 1


def test_the_largest_size_is_legal(manifest, capsys):
    """The bounds themselves pass, and are planned within seconds."""
    write(16384, 65537)
    assert invoke(["plan", manifest, "--model", T2V, "--profile", "cpu", "--ignore-memory"]) == 0
    assert "16384x48x65537-text" in capsys.readouterr().out


def test_latents_must_fit_into_the_machine():
    """A clip whose latents are larger than memory can never be rendered there: exit 2, on every device."""
    checkpoint = published_checkpoint(T2V)
    assert isinstance(checkpoint, Checkpoint)
    given = {"model": T2V, "out": "o"}
    preset = load_preset("t2v-a14b-480p", "t2v-a14b-480p")
    work = {(Bucket(832, 480, 81, "text"), 40, True): 1}
    settings = resolve(given, preset, "cpu")
    question = question_of(settings, checkpoint, work)
    need = 3 * 4 * 16 * 104 * 60 * 21  # copies, bytes, channels, latent width, height and frames
    check_latents(settings, question, need)
    with pytest.raises(MemoryTooSmall, match="832x480x81-text: its latents alone need"):
        check_latents(settings, question, need - 1)
    check_latents(resolve({**given, "ignore_memory": True}, preset, "cpu"), question, 1)


@pytest.mark.parametrize("text", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"])
def test_moments_have_a_place_in_utc(text):
    """The first and last hours of the calendar fall out of it in UTC; a far moment is waited for as long as can be."""
    with pytest.raises(UsageError, match="outside the years"):
        parse_moment(text)
    timer = drain_at("9999-01-01T00:00:00Z", Drain(1.0))
    assert timer.is_alive()
    timer.cancel()


def test_secrets_are_not_repeated():
    """An address in a setting is checked without its value in the message."""
    with pytest.raises(UsageError, match="--graphs: a user name or password") as caught:
        check_texts({"graphs": "s3://u:HUNTER2@bucket/g"})
    assert "HUNTER2" not in caught.value.message
