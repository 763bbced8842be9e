"""What end-to-end tests share: manifests, runs as real processes, and a look at what they left."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa

from batch_gen.records import Record
from batch_gen.storage.base import StoreOptions, open_store
from batch_gen.tables import write_manifest

ROOT = Path(__file__).resolve().parents[2]


def small_manifest(path, num_rows=6, tag=None, *, backwards=False, **columns):
    """A manifest of small clips: 9 frames of 64x48, 3 steps; `tag` adds a column of the user's own."""
    extra = {} if tag is None else {"tag": pa.string()}
    row = {"num_frames": 9, "width": 64, "height": 48, "steps": 3, **columns}
    if tag is not None:
        row["tag"] = tag
    rows = [{"row_id": f"clip-{i}", "prompt": f"a red circle {i}", "seed": i, **row} for i in range(num_rows)]
    write_manifest(path, rows[::-1] if backwards else rows, extra)
    return path


def command(manifest, out, *flags):
    """The command line of a run."""
    return [sys.executable, "-m", "batch_gen", "run", str(manifest), "--out", str(out), "--quiet", "--json", *flags]


def start(manifest, out, *flags):
    """A run as a process of its own."""
    return subprocess.Popen(
        command(manifest, out, *flags), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(manifest, out, *flags):
    """Run to the end; returns (exit code, summary or None, stderr)."""
    done = subprocess.run(
        command(manifest, out, *flags), cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    body = json.loads(done.stdout) if done.stdout.strip().startswith("{") else None
    return done.returncode, body, done.stderr


def records(out, endpoint=None):
    """clip_id -> record of everything under an output root."""
    store = open_store(str(out), StoreOptions(endpoint_url=endpoint))
    keys = [listed.key for listed in store.list("clips/") if listed.key.endswith(".json")]
    found = [Record.model_validate_json(store.get(key).body) for key in keys]
    return {record.clip_id: record for record in found}


def keys(out, endpoint=None):
    """All keys under an output root that do not name a worker or a round's content."""
    store = open_store(str(out), StoreOptions(endpoint_url=endpoint))
    return sorted(listed.key for listed in store.list("") if not listed.key.startswith("workers/"))


def hashes(out, endpoint=None):
    """clip_id -> frames hash."""
    return {clip_id: record.frames_hash for clip_id, record in records(out, endpoint).items()}


def wait_for(condition, what, patience_s=60.0):
    """Poll until something is true."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {patience_s:g} s in vain for {what}")


def rank_pids(supervisor_pid):
    """Pids of the rank processes of a supervisor."""
    import psutil

    try:
        children = psutil.Process(supervisor_pid).children(recursive=True)
        return [child.pid for child in children if "batch_gen.ranks" in " ".join(child.cmdline())]
    except psutil.Error:
        return []


def kill(pid):
    """kill -9."""
    os.kill(pid, signal.SIGKILL)
