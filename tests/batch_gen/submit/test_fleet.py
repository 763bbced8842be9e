"""The array as local processes: Batch's variables, its retry rules, real kills, a real S3 server."""

import json
import signal
import sys
import threading
import uuid

import pytest

from batch_gen.cli import invoke
from batch_gen.ledger import read_starts
from batch_gen.storage.base import StoreOptions, open_store
from batch_gen.submit.local import Child, batch_variables, exit_code_of, run_local
from batch_gen.submit.retries import EXIT_RULES, strategy

FIRST_THEN_0 = """
import os, signal, sys
if os.environ["AWS_BATCH_JOB_ATTEMPT"] == "1":
    os.kill(os.getpid(), signal.SIGKILL) if {code} == 137 else sys.exit({code})
"""


@pytest.mark.parametrize(
    ("code", "codes"),
    [(0, (0,)), (1, (1,)), (2, (2,)), (3, (3,)), (4, (4,)), (5, (5,)), (6, (6,)), (75, (75, 0)), (137, (137, 0))],
)
def test_each_exit_code_leads_to_its_action(code, codes):
    """0 to 6 end the child, 75 and a kill start it again: real processes under the job definition's own rules."""
    program = (sys.executable, "-c", FIRST_THEN_0.format(code=code))
    (child,) = run_local(["batch-gen"], 1, strategy(3), program=program)
    assert child.exit_codes == codes
    assert child.succeeded == (codes[-1] == 0)


def test_ten_attempts_and_no_more():
    """A child that always drains ends as FAILED with 75 after its attempts; the rules name each code once."""
    (child,) = run_local(["batch-gen"], 1, strategy(4), program=(sys.executable, "-c", "raise SystemExit(75)"))
    assert child.exit_codes == (75, 75, 75, 75)
    assert not child.succeeded
    assert [rule.get("onExitCode") for rule in EXIT_RULES if "onExitCode" in rule] == ["75", "137"]


@pytest.mark.parametrize(
    ("codes", "code"), [([0, 0], 0), ([0, 3], 3), ([3, 4], 4), ([1, 75], 1), ([0, 75], 75), ([137, 0], 75)]
)
def test_one_code_for_all(codes, code):
    """A bug is never hidden; a killed child means: start me again."""
    assert exit_code_of([Child(index, (each,)) for index, each in enumerate(codes)]) == code


def test_a_plain_job_has_no_index():
    """Batch gives one node an id and an attempt, children an index and a size too."""
    assert "AWS_BATCH_JOB_ARRAY_INDEX" not in batch_variables("i", 0, 1, 1)
    assert batch_variables("i", 2, 4, 3) == {
        "AWS_BATCH_JOB_ATTEMPT": "3", "AWS_BATCH_CE_NAME": "local", "AWS_BATCH_JQ_NAME": "local",
        "AWS_BATCH_JOB_ID": "i:2", "AWS_BATCH_JOB_ARRAY_SIZE": "4", "AWS_BATCH_JOB_ARRAY_INDEX": "2",
    }  # fmt: skip


def slow_model(tmp_path):
    """A fake engine whose clips take a while, so that kills meet them."""
    path = tmp_path / "slow.json"
    path.write_text(json.dumps({"step_s": 0.5}))
    return f"fake:{path}"


def test_four_children_on_s3_survive_kills(s3_server, manifest, tmp_path):
    """Four children, two killed at their first start and one told to stop: the rules start them again, the run is
    complete, and the starts after a kill hold less at once."""
    root = f"s3://runs/{uuid.uuid4().hex}"
    hit = {0: signal.SIGKILL, 1: signal.SIGKILL, 2: signal.SIGTERM}
    lock = threading.Lock()
    store = open_store(root, StoreOptions(endpoint_url=s3_server.endpoint))

    def strike(index, process):
        with lock:
            number = hit.pop(index, None)
        if number is not None:
            threading.Thread(target=when_begun, args=(index, process, number)).start()

    def when_begun(index, process, number):
        while process.poll() is None and not any(f".{index}-a1" in each.key for each in store.list("workers/")):
            threading.Event().wait(0.05)
        process.send_signal(number)

    command = ["batch-gen", "run", str(manifest), "--model", slow_model(tmp_path), "--out", root, "--quiet"]
    command += ["--lease-ttl", "5", "--s3-endpoint", s3_server.endpoint]
    children = run_local(command, 4, strategy(5), strike)
    assert [child.exit_codes for child in children[:2]] == [(137, 0), (137, 0)]
    assert children[2].exit_codes in ((75, 0), (0,))  # 0 where the others had finished before it began
    assert all(child.succeeded for child in children)
    assert len([each for each in store.list("clips/") if each.key.endswith(".json")]) == 3
    starts = {(start.job.partition(":")[2], start.attempt): start for start in read_starts(store)}
    assert len(starts) == sum(len(child.exit_codes) for child in children)
    assert {name for name, start in starts.items() if start.exit_code is None} == {("0", 1), ("1", 1)}
    assert {start.exit_code for start in starts.values()} <= {0, 75, None}


def test_a_manifest_may_be_a_prefix(s3_server, manifest, capsys):
    """The files of a prefix are one manifest, with or without a slash at its end; an empty one says so."""
    root = f"s3://runs/{uuid.uuid4().hex}"
    store = open_store(root, StoreOptions(endpoint_url=s3_server.endpoint))
    store.create("shots/00000-m.parquet", manifest)
    flags = ["--model", "fake", "--s3-endpoint", s3_server.endpoint]
    for url in (f"{root}/shots/", f"{root}/shots"):
        assert invoke(["validate", url, *flags]) == 0
        assert "3 rows in 1 file" in capsys.readouterr().out
    assert invoke(["validate", f"{root}/none/", *flags]) == 2
    assert "no such manifest" in capsys.readouterr().err


def test_submit_local_prints_the_end_of_each_child(manifest, tmp_path, capsys):
    """`submit --local 2` is the same run in two processes; a stopped run is not begun again without --continue."""
    arguments = ["submit", str(manifest), "--model", "fake", "--out", str(tmp_path / "out"), "--local", "2", "--quiet"]
    assert invoke(arguments) == 0
    assert "child 1: exit codes 0" in capsys.readouterr().out
    assert len(list((tmp_path / "out").glob("clips/*/*.json"))) == 3
    assert invoke(["cancel", str(tmp_path / "out")]) == 0
    assert invoke(arguments) == 4
