"""The examples for other schedulers: real scripts with stand-ins for ssh, scontrol and batch-gen."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from batch_gen.cli import app

EXAMPLES = Path(__file__).resolve().parents[3] / "scripts/aws"


@pytest.fixture
def tools(tmp_path):
    """A folder of programs that is found first; `program(name, script)` adds one."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def program(name, script):
        path = folder / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    return program, {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(tmp_path / "log")}


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(0, "0", False), (2, "0", False), (3, "0", False), (75, "0", True), (137, "3", True), (75, "10", False)],
)
def test_slurm_requeues_what_may_be_started_again(tools, code, restarts, requeued):
    """75 and 137 requeue the task ten times at most, everything else ends it with its code."""
    program, environment = tools
    program("batch-gen", f"exit {code}")
    program("scontrol", 'echo "$@" >> "$LOG"')
    variables = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": restarts}
    done = subprocess.run([EXAMPLES / "slurm.sh"], env={**environment, **variables}, check=False, timeout=60)
    assert done.returncode == code
    log = Path(environment["LOG"])
    assert (log.read_text() if log.exists() else "") == ("requeue 77_3\n" if requeued else "")


def test_slurm_waits_for_the_drain(tools, tmp_path):
    """A TERM goes on to the worker, whose own code (75) decides, not the interrupted wait's."""
    program, environment = tools
    program("batch-gen", "trap 'exit 75' TERM; touch \"$LOG.begun\"; while :; do sleep 0.05; done")
    program("scontrol", 'echo "$@" >> "$LOG"')
    variables = {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "0"}
    process = subprocess.Popen([EXAMPLES / "slurm.sh"], env={**environment, **variables})
    while not Path(environment["LOG"] + ".begun").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    assert Path(environment["LOG"]).read_text() == "requeue 77_0\n"


def test_machines_start_again_and_the_worst_code_wins(tools):
    """Each machine is started again after 75 and 137; the loop ends with the worst final code."""
    program, environment = tools
    program("ssh", 'HOST="$1" bash -c "$2"')
    program(
        "batch-gen",
        'n=$(cat "$LOG.$HOST" 2>/dev/null || echo 0); echo $((n + 1)) > "$LOG.$HOST"\n'
        '[ "$n" -eq 0 ] && exit 75; [ "$n" -eq 1 ] && exit 137; [ "$HOST" = b ] && exit 3; exit 0',
    )
    done = subprocess.run([EXAMPLES / "machines.sh", "a", "b"], env=environment, check=False, timeout=60)
    assert done.returncode == 3
    assert [Path(f"{environment['LOG']}.{host}").read_text() for host in "ab"] == ["3\n", "3\n"]


def test_kubernetes_job():
    """75 and 137 count and start the index again, a lost node does not count, other codes fail the index."""
    job = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    actions = [
        (rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in spec["podFailurePolicy"]["rules"]
    ]
    assert actions == [("Ignore", None), ("Count", [75, 137]), ("FailIndex", [0, 75, 137])]
    (container,) = pod["containers"]
    assert container["name"] == spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["containerName"]
    names = {variable["name"]: variable for variable in container["env"]}
    assert names["JOB_COMPLETIONS"]["value"] == str(spec["completions"])
    assert {"JOB_INDEX_FAILURE_COUNT", "JOB_NAME"} <= names.keys()
    assert pod["restartPolicy"] == "Never"


@pytest.mark.parametrize("name", ["slurm.sh", "machines.sh", "kubernetes.yaml"])
def test_the_same_command_everywhere(name):
    """Every example calls `batch-gen run` with flags that it has."""
    text = (EXAMPLES / name).read_text()
    known = {option for parameter in app.commands["run"].params for option in parameter.opts}
    flags = {word.strip(",") for word in text.replace("[", " ").split() if word.startswith("--")} - {"---"}
    used = {flag for flag in flags if flag in ("--out", "--model")}
    assert used == {"--out", "--model"}
    assert used <= known
