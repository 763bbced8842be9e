"""`batch-gen regress bisect|components|step|report`, with the real pipeline in processes of its own."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from batch_gen.cli import invoke
from tests.batch_gen.regress.nights import SUITE, thirty_nights
from tests.regression import write_suite

ROWS = [
    {"row_id": "base", "prompt": "a red circle moving right", "seed": 1, "width": 48, "height": 32, "num_frames": 5}
]


@pytest.fixture(scope="module")
def approved(tmp_path_factory, tiny_checkpoint):
    """(manifest, root, checkpoint) of a night that was approved; the checkpoint may be written to."""
    folder = tmp_path_factory.mktemp("bisect")
    model = folder / "model"
    shutil.copytree(tiny_checkpoint, model)
    manifest, root = write_suite(folder, rows=ROWS, steps=3), folder / "out"
    flags = ["--out", str(root), "--model", str(model), "--threads", "1", "--quiet"]
    assert invoke(["regress", "run", str(manifest), *flags]) == 6
    assert invoke(["regress", "approve", "small", "--out", str(root), "--who", "Kim", "--why", "looked good"]) == 0
    return manifest, flags, model


def bisected(capsys, approved, *more):
    """(exit code, the answer about the one case)."""
    manifest, flags, _ = approved
    capsys.readouterr()
    code = invoke(["regress", "bisect", str(manifest), *flags, "--json", *more])
    return code, json.loads(capsys.readouterr().out)["cases"][0]


def test_another_encoder_moves_the_encode_stage_alone(approved, capsys, tmp_path):
    """The same pipeline in a new process repeats every stage bit for bit; another codec moves encode, exit 5."""
    (tmp_path / "job.yaml").write_text("codec: ffv1\n")
    code, answer = bisected(capsys, approved, "--config", str(tmp_path / "job.yaml"))
    assert (code, answer["first"], answer["moved"]) == (5, "encode", ["encode"])
    assert [stage["stage"] for stage in answer["stages"]][-2:] == ["decode", "encode"]


def test_another_text_encoder_is_found(approved, capsys):
    """A text encoder whose weights changed by 1 % is named, and with --first nothing after it is replayed."""
    path = next((approved[2] / "text_encoder").glob("*.safetensors"))
    weights = load_file(path)
    name = next(name for name in weights if name.endswith("wo.weight"))
    save_file(weights | {name: weights[name] * np.float32(1.01)}, path, {"format": "pt"})
    code, answer = bisected(capsys, approved, "--first")
    assert (code, answer["first"], len(answer["stages"])) == (5, "text", 1)


def test_a_case_without_a_baseline_is_exit_6(approved, capsys, tmp_path):
    """Nothing approved means exit 6, an unknown case exit 2; no engine is started for either."""
    manifest, flags, _ = approved
    elsewhere = ["--out", str(tmp_path / "empty"), *flags[2:]]
    assert invoke(["regress", "bisect", str(manifest), *elsewhere]) == 6
    assert "regress approve makes it one" in capsys.readouterr().err
    assert invoke(["regress", "bisect", str(manifest), *flags, "--case", "fox"]) == 2
    assert "it has base" in capsys.readouterr().err


def test_components_of_a_case(tiny_checkpoint, capsys, tmp_path):
    """The components tier measures a case of a suite against diffusers, with its references kept, and prints one JSON."""
    manifest = write_suite(tmp_path, rows=ROWS, steps=2)
    flags = ["--out", str(tmp_path / "out"), "--model", str(tiny_checkpoint), "--threads", "1"]
    keep = ["--keep", str(tmp_path / "kept")]
    assert invoke(["regress", "components", str(manifest), *flags, *keep, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["tier"], answer["verdict"], answer["clip"]["clip_id"]) == ("components", "pass", "base")
    assert len(list((tmp_path / "kept").iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["step", "--model", "fake"], "no numbers to compare"),
        (["step", "--case", "base"], "give the suite"),
        (["components", "--model", "tiny", "--mesh", "tp=none"], "mesh"),
    ],
)
def test_what_cannot_be_measured_is_exit_2(arguments, words, capsys):
    """A model without numbers, a case without a suite, a mesh that does not exist: one message, exit 2."""
    assert invoke(["regress", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_the_page_of_a_night(tmp_path, capsys):
    """`regress report` builds the page beside the last night and says where it is."""
    from batch_gen.storage.base import StoreOptions, open_store

    thirty_nights(open_store(str(tmp_path), StoreOptions(durable=False)))
    assert invoke(["regress", "report", SUITE, "--out", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["num_cases"] == 4
    assert (tmp_path / f"regress/{SUITE}/20261130T020000Z/report/index.html").is_file()
