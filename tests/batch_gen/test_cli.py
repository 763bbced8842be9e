"""The command line: its surface is frozen, its errors are clear, its exit codes are the design's."""

import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from batch_gen.cli import app, invoke
from batch_gen.errors import EnvironmentFault
from batch_gen.flags import FLAGS, OPERATIONAL, SEMANTIC
from batch_gen.preflight import check_device, check_neuron

ROOT = Path(__file__).resolve().parents[2]
SEMANTIC_FLAGS = {
    "model",
    "preset",
    "dtype",
    "vae-dtype",
    "solver",
    "quantization",
    "modules-to-not-convert",
    "decode",
    "codec",
    "crf",
    "file-metadata",
    "long-prompt",
    "lora",
    "step-cache",
    "step-cache-warm-up",
    "step-cache-max-run",
    "resize",
    "run-seed",
}
OPERATIONAL_FLAGS = {
    "out", "profile", "config", "device", "mesh", "for", "replicas", "attention", "kernels", "experts",
    "tp-sequence-parallel", "compile", "compile-backend", "graphs", "graphs-digest", "allow-compile", "threads", "scratch",
    "limit", "ids", "where", "override", "shard", "assign", "chunk-requests", "lease-ttl", "continue", "keep-latents",
    "max-failures", "ok-with-quarantine", "clips-per-step", "drain-budget", "block-list", "drain-at", "on-clip",
    "max-cost", "price-per-hour", "max-hours", "stall-timeout", "require-same-numerics",
    "no-token-check", "ignore-memory", "s3-endpoint", "s3-checksum", "s3-kms-key", "s3-storage-class", "s3-tags",
    "s3-bucket-owner", "s3-requester-pays", "emf", "prometheus", "quiet",
}  # fmt: skip


def test_the_settings_are_frozen():
    """A setting is added, removed or changes sides on purpose: here, in flags.py and in docs/flags.md."""
    assert {flag.name for flag in SEMANTIC} == SEMANTIC_FLAGS
    assert {flag.name for flag in OPERATIONAL} == OPERATIONAL_FLAGS


@pytest.mark.parametrize("command", sorted(app.commands))
def test_every_command_has_help_with_an_example(command):
    """Each command explains itself and shows one call."""
    shown = CliRunner().invoke(app, [command, "--help"]).output
    assert "Example: batch-gen " in shown


def test_the_flag_page_lists_every_setting():
    """docs/flags.md names every setting with its default and its meaning."""
    page = (ROOT / "docs/flags.md").read_text("utf-8")
    for flag in FLAGS:
        assert f"| `--{flag.name}` |" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], "Missing argument"),
        (["rum"], "No such command"),
        (["run", "m.parquet", "--steps", "3"], "No such option"),
        (["run", "m.parquet", "--decode", "fast"], "'fast' is not one of"),
        (["run", "m.parquet", "--model", "fake", "--mesh", "tp=zwei"], "expected degrees such as"),
        (["run", "m.parquet", "--model", "fake", "--preset", "t2v-a14b-48p"], "did you mean 't2v-a14b-480p'"),
        (["run", "m.parquet", "--model", "fake", "--profile", "trn9"], "does not exist"),
        (["run", "m.parquet", "--model", "no/such/folder"], "no such folder"),
        (["run", "m.parquet", "--out", "s3://bucket/run"], "--model must be given"),
        (["run", "m.parquet", "--out", ""], "--out is empty"),
        (["status", ""], "empty output root"),
        (["run", "m.parquet", "--model", "fake", "--on-clip", "hook"], "or env:NAME"),
        (["run", "m.parquet", "--model", "fake", "--prometheus", "/no/such/x.prom"], "is no folder"),
    ],
)
def test_usage_errors_are_exit_2_with_a_clear_message(arguments, words, capsys):
    """Wrong commands, flags and values exit 2 and say what is wrong."""
    assert invoke(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["run", "status", "report", "verify", "retry", "clean", "export", "cancel", "reproduce", "doctor", "submit"]
)
def test_every_command_reaches_a_bucket_alike(name):
    """A bucket that asks for a key, an owner or payment is as much in reach of `verify --fix` as of `run`."""
    options = {option for parameter in app.commands[name].params for option in parameter.opts}
    assert {f"--{flag.name}" for flag in FLAGS if flag.name.startswith("s3-")} <= options


def test_a_device_that_is_not_here_is_exit_2(monkeypatch):
    """A missing device is no accident that a restart could mend: exit 2, not 75."""
    monkeypatch.setattr("batch_gen.preflight.Path.exists", lambda _path: False)
    with pytest.raises(EnvironmentFault, match="--device cpu") as caught:
        check_device("cuda")
    assert caught.value.exit_code == 2
    check_device("cpu")


def test_neuron_without_a_driver_is_exit_2(tmp_path):
    """On a machine without Neuron devices `run --device neuron` says so; one device node is enough to go on."""
    with pytest.raises(EnvironmentFault, match="no Neuron device") as caught:
        check_neuron("neuron", tmp_path)
    assert caught.value.exit_code == 2
    (tmp_path / "neuron0").touch()
    check_neuron("neuron", tmp_path)


def test_next_command_goes_on_with_the_run(tmp_path, capsys, monkeypatch):
    """The line `next` of a run holds its flags, quoted for a shell: pasted, it resumes; a try-out's limit is not in it."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"prompt": ["a fox", "an owl"]}), "my shots.parquet")
    sizes = ["--override", "width=32", "--override", "height=48", "--override", "num_frames=5"]
    first = ["run", "my shots.parquet", "--model", "fake", "--out", "out of $1", "--crf", "20", *sizes]
    assert invoke([*first, "--limit", "1", "--quiet"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("next "))
    again = shlex.split(line.removeprefix("next").partition("   (")[0])
    assert sorted(again) == sorted(["batch-gen", *first])
    assert invoke(again[1:]) == 0
    assert "2 of 2 clips committed; this worker: 1 clip" in capsys.readouterr().out
