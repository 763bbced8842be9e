"""submit: what is printed, what is refused, and what workers get."""

import json
from types import SimpleNamespace

import pytest

from batch_gen.cli import invoke
from batch_gen.commands.submit import refuse_local_images
from batch_gen.errors import UsageError
from batch_gen.tables import write_manifest

IMAGE = "repository@sha256:" + "a" * 64
FLAGS = ["--out", "s3://bucket/run", "--model", "fake", "--image", IMAGE, "--dry-run"]


def order(capsys, *arguments):
    """What a dry run prints."""
    assert invoke(["submit", *map(str, arguments), *FLAGS]) == 0
    return json.loads(capsys.readouterr().out)


def test_dry_run_prints_the_exact_json(manifest, capsys):
    """--dry-run prints definition, submission and the uploaded files, and calls nothing."""
    body = order(capsys, manifest, "--nodes", "4")
    assert body["submitJob"]["arrayProperties"] == {"size": 4}
    command = body["submitJob"]["containerOverrides"]["command"]
    assert command[:2] == ["batch-gen", "run"]
    assert command[2] == f"s3://bucket/run/{body['uploads'][0]}"
    assert command[2].endswith("-m.parquet")
    assert command[3:] == ["--out", "s3://bucket/run", "--config", f"s3://bucket/run/{body['uploads'][1]}"]
    assert len(body["jobDefinition"]["containerProperties"]["linuxParameters"]["devices"]) == 16
    assert "timeout" not in body["jobDefinition"]
    assert body["files"]["job.yaml"] == {"emf": True, "model": "fake", "scratch": "/scratch"}
    assert body["files"]["plan.json"]["clips"] == 3


def test_workers_get_the_settings_as_one_file(manifest, tmp_path, capsys):
    """Job file and flags become one uploaded file, flags over it; how S3 is reached stays in the command."""
    (tmp_path / "job.yaml").write_text("crf: 20\nkeep-latents: true\noverride: [steps=4]\nlimit: 2\nmax-hours: 2\n")
    flags = ["--config", tmp_path / "job.yaml", "--limit", "1", "--s3-endpoint", "http://127.0.0.1:9", "--no-emf"]
    body = order(capsys, manifest, *flags, "--continue")
    config = body["files"]["job.yaml"]
    assert config == {
        "crf": 20, "keep_latents": True, "override": ["steps=4"], "limit": 1, "max_hours": 2, "emf": False,
        "model": "fake", "scratch": "/scratch",
    }  # fmt: skip
    command = body["submitJob"]["containerOverrides"]["command"]
    assert command[-2:] == ["--s3-endpoint", "http://127.0.0.1:9"]
    assert body["jobDefinition"]["timeout"] == {"attemptDurationSeconds": 3 * 3600}


def test_a_folder_of_many_files_is_one_prefix(tmp_path, capsys):
    """However many files a manifest has, the command stays short; many files named one by one are refused with words."""
    rows = [{"row_id": "r", "prompt": "a fox", "num_frames": 9, "width": 64, "height": 48, "steps": 2}]
    folder = tmp_path / "shots"
    for number in range(45):
        path = folder / f"{number % 7}" / f"{'a-rather-long-name' * 8}-{number:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_manifest(path, [{**rows[0], "row_id": f"r{number}"}])
    body = order(capsys, folder)
    assert len(body["submitJob"]["containerOverrides"]["command"]) == 7
    manifests = [key for key in body["uploads"] if key.endswith(".parquet")]
    assert len(manifests) == 45
    assert len({key.rpartition("/")[0] for key in manifests}) == 1
    assert invoke(["submit", *sorted(map(str, folder.rglob("*.parquet"))), *FLAGS]) == 2
    assert "name one folder instead of many manifest files" in capsys.readouterr().err


def test_a_webhook_travels_as_a_secret(manifest, capsys):
    """An address would be read by everybody who may look at jobs; a variable filled by Secrets Manager is not."""
    assert invoke(["submit", str(manifest), *FLAGS, "--on-clip", "https://hooks.example.org/T0/secret"]) == 2
    told = capsys.readouterr()
    assert "--on-clip env:BATCH_GEN_HOOK --secret BATCH_GEN_HOOK=ARN" in told.err
    assert "T0/secret" not in told.err + told.out
    roles = ["--execution-role", "arn:aws:iam::1:role/e"]
    arn = "arn:aws:secretsmanager:us-east-2:1:secret:hook"
    body = order(capsys, manifest, "--on-clip", "env:HOOK", "--secret", f"HOOK={arn}", *roles)
    assert body["jobDefinition"]["containerProperties"]["secrets"] == [{"name": "HOOK", "valueFrom": arn}]
    assert body["files"]["job.yaml"]["on_clip"] == "env:HOOK"
    for flags, words in (
        (["--secret", f"HOOK={arn}"], "needs --execution-role"),
        (["--on-clip", "env:HOOK"], "add --secret HOOK=ARN"),
    ):
        assert invoke(["submit", str(manifest), *FLAGS, *flags]) == 2
        assert words in capsys.readouterr().err


def test_a_fleet_is_told_how_to_render(manifest, capsys):
    """This machine's own profile would leave a trn2's cores idle: exit 2 with the profiles' names, unless it is said."""
    flags = [*FLAGS, "--model", "pocket", "--override", "width=64", "--override", "height=64"]
    assert invoke(["submit", str(manifest), *flags]) == 2
    assert "--profile must be given: the machines ordered are trn2" in capsys.readouterr().err
    assert invoke(["submit", str(manifest), *flags, "--profile", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["files"]["job.yaml"]["profile"] == "cpu"
    assert invoke(["submit", str(manifest), *flags, "--profile", "trn2-480p", "--mesh", "tp=1"]) == 0


def test_lists_on_this_machine_are_refused(manifest, tmp_path, capsys):
    """A list of ids that workers cannot read is refused; without it they would render everything."""
    (tmp_path / "ids.txt").write_text("r1\n")
    assert invoke(["submit", str(manifest), *FLAGS, "--ids", str(tmp_path / "ids.txt")]) == 2
    assert "a fleet cannot read files of this machine" in capsys.readouterr().err


def test_an_image_must_be_named(manifest, capsys):
    """Only a dry run does without an image: Batch would try to pull a name that nobody has."""
    assert invoke(["submit", str(manifest), "--out", "s3://b/r", "--model", "fake"]) == 2
    assert "--image must be given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--out", "folder"], "needs an s3:// output"),
        (["--out", ""], "--out is empty"),
        (["--model", "owner/name"], "needs an s3:// prefix or a built-in name"),
        (["--lora", "here.safetensors"], "needs an s3:// file"),
        (["--graphs", "here"], "needs an s3:// store of graphs"),
        (["--nodes", "10001"], "--nodes 10001"),
        (["--nodes", "0"], "--nodes 0"),
        (["--image", "repository:latest"], "name the image by digest"),
        (["--attempts", "11"], "retry attempts 11"),
        (["--attempts", "0"], "retry attempts 0"),
        (["--tag", "film"], "expected KEY=VALUE"),
    ],
)
def test_refusals(manifest, capsys, flags, words):
    """What a fleet cannot do is exit 2 before anything is fetched or uploaded."""
    assert invoke(["submit", str(manifest), *FLAGS, *flags]) == 2
    assert words in capsys.readouterr().err


def test_images_on_this_machine_are_refused():
    """A row with a local image names file, row and column; images on S3 and bytes are fine."""
    rows = [SimpleNamespace(source="m.parquet", row=n, request=SimpleNamespace(image=image, last_image=None))
            for n, image in enumerate(["s3://b/a.png", "bytes:00", "a.png"])]  # fmt: skip
    with pytest.raises(UsageError, match=r"row 2, image = a\.png: a fleet needs"):
        refuse_local_images(SimpleNamespace(rows=lambda: iter(rows)))
    refuse_local_images(SimpleNamespace(rows=lambda: iter(rows[:2])))
