"""Addresses and names that users give: no secret is taken in, and nothing leads out of a store."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch_gen.cli import invoke
from batch_gen.errors import UsageError
from batch_gen.storage.address import check_address, check_endpoint
from batch_gen.storage.base import NoKey, open_store
from batch_gen.storage.folder import FolderStore

USER = "s3://user:HUNTER2@bucket/run"
SIGNED = "s3://bucket/run/x.parquet?X-Amz-Signature=HUNTER2"
SERVER = "http://user:HUNTER2@127.0.0.1:9"


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    """One small row, in the current folder."""
    monkeypatch.chdir(tmp_path)
    pq.write_table(pa.table({"prompt": ["a fox"], "width": [64], "height": [48], "num_frames": [5]}), "a.parquet")
    return "a.parquet"


@pytest.mark.parametrize("command", ["run", "plan", "validate", "compile", "submit"])
@pytest.mark.parametrize(
    "flags",
    [
        ["--out", USER], ["--out", SIGNED], ["--out", "s3://bucket/run#HUNTER2"], ["--out", "s3://user:HUN/TER2@b/run"],
        ["--model", USER], ["--lora", f"{USER}.safetensors"], ["--graphs", USER], ["--config", USER],
        ["--config", SIGNED], ["--s3-endpoint", SERVER], ["--s3-endpoint", "http://127.0.0.1:9/?key=HUNTER2"],
        ["--s3-endpoint", "user:HUNTER2@127.0.0.1"], [USER], [SIGNED],
    ],
)  # fmt: skip
def test_no_command_takes_a_secret_in_an_address(manifest, tmp_path, capsys, command, flags):
    """Exit 2 at once; the secret is neither said nor written anywhere."""
    base = [] if "--out" in flags else ["--out", "s3://bucket/run"]
    base += [] if "--model" in flags else ["--model", "fake"]
    assert invoke([command, manifest, *base, *flags]) == 2
    told = capsys.readouterr()
    assert "HUN" not in told.out + told.err
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize(
    "image",
    [
        "s3://user:HUNTER2@bucket/a.png",
        "s3://b/a.png?X-Amz-Signature=HUNTER2",
        "https://user:HUNTER2@host/a.png",
        "https://h/a.png?x=1&X-Amz-Signature=HUNTER2&y=2",
    ],
)
def test_rows_hold_no_secret_addresses(manifest, capsys, image):
    """An image's address with a password or a signature is a fault of its row, whose message shows neither."""
    table = pq.read_table(manifest).append_column("image", pa.array([image]))
    pq.write_table(table, manifest)
    for flags in ([], ["--json"]):
        assert invoke(["validate", manifest, "--model", "fake", *flags]) == 2
        told = capsys.readouterr()
        assert "image" in told.out + told.err
        assert "HUNTER2" not in told.out + told.err


@pytest.mark.parametrize("command", ["status", "verify", "retry", "clean", "report", "cancel"])
def test_outputs_are_looked_at_without_secrets(capsys, command):
    """Commands that look at an output root refuse the same addresses and servers."""
    for arguments in ([USER], [SIGNED], ["s3://bucket/run", "--s3-endpoint", SERVER]):
        assert invoke([command, *arguments]) == 2
        told = capsys.readouterr()
        assert "HUNTER2" not in told.out + told.err


def test_batch_has_no_secret_address(manifest, capsys):
    """The endpoint of AWS Batch is noted with the job, so it is held to the same rule."""
    flags = ["--out", "s3://bucket/run", "--model", "fake", "--dry-run", "--batch-endpoint", SERVER]
    assert invoke(["submit", manifest, *flags]) == 2
    told = capsys.readouterr()
    assert "--batch-endpoint" in told.err
    assert "HUNTER2" not in told.out + told.err


@pytest.mark.parametrize("text", ["s3://bucket/a@b:c/x.safetensors@0.5:high", "file:///tmp/x", "memory://m", "a b?c#d"])
def test_plain_addresses_pass(text):
    """Signs that mean something else in a key or a path of this machine are nobody's secret."""
    check_address("--out", text)
    check_endpoint("--s3-endpoint", "https://[::1]:9000/minio")


@pytest.mark.parametrize("text", ["localhost:9000", "ftp://host", "http://", "http://host:port", "http://h h"])
def test_endpoints_are_urls(text):
    """What no client could reach is refused by the flag's name."""
    with pytest.raises(UsageError, match="--s3-endpoint: expected http://host:port"):
        check_endpoint("--s3-endpoint", text)


@pytest.mark.parametrize("key", ["../../x", "a/../b", "/etc/passwd", "", "a\0b"])
def test_a_key_that_leads_elsewhere_is_a_mistake_of_the_user(tmp_path, key):
    """Exit 2 with the key, never a traceback."""
    with pytest.raises(NoKey, match="no key of a store") as caught:
        FolderStore(tmp_path).get(key)
    assert caught.value.exit_code == 2
    with pytest.raises(UsageError, match="names no bucket"):
        open_store("s3:///run")


@pytest.mark.parametrize(
    "arguments",
    [
        ["approve", "s", "--night", "../../x", "--who", "Kim", "--why", "looked"],
        ["approve", "s", "--case", "../x", "--who", "Kim", "--why", "looked"],
        ["approve", "../s", "--who", "Kim", "--why", "looked"],
        ["log", "s", "../../x"],
        ["log", "../../s", "x"],
        ["report", "s", "--night", "../../x"],
        ["report", "../../s"],
        ["run", "a.parquet", "--night", "../x", "--model", "fake"],
        ["run", "a.parquet", "--limits", "s3://", "--model", "fake"],
        ["run", "a.parquet", "--limits", "s3://bucket", "--model", "fake"],
    ],
)
def test_names_that_become_keys_are_checked(manifest, tmp_path, capsys, arguments):
    """A suite, night, case or limits file that leads elsewhere is exit 2, and nothing is written."""
    assert invoke(["regress", *arguments, "--out", "nights"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == [manifest]
