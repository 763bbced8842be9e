"""The Neuron adapter against a stand-in of `torch_neuronx` in processes of its own: what happens, in which order."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STANDIN = ROOT / "tests" / "neuron_standin"

# What a rank does, in its order. The stand-in's device has no kernels: tensors stay on the CPU.
RANK = """
import dataclasses, datetime, json, sys
from pathlib import Path
from models import device
cache = Path(sys.argv[1])
device.prepare(device.Start("neuron", core=5, threads=2, cache=cache))
assert "torch" not in sys.modules and "torch_neuronx" not in sys.modules
opened = device.open_device("neuron", compiling=device.Compiling("model"))
import torch
import torch.distributed as dist
import torch_neuronx
from models.parallel.mesh import group_backend
dist.init_process_group(group_backend("neuron"), store=dist.HashStore(), rank=0, world_size=1)
linear = torch.nn.Linear(4, 4)
for index, role in enumerate(("transformer", "vae", "transformer")):
    opened.compile(linear, f"graph-{index}", role)(torch.ones(2, 4))
opened.synchronize()
dist.destroy_process_group()
print(json.dumps({"log": torch_neuronx.LOG, "device": str(opened.torch_device), "graphs": opened.graphs,
                  "neffs": sorted(path.name for path in cache.rglob("*.neff")), "memory": opened.memory().total_bytes}))
"""


def rank(cache, code=RANK, **variables):
    """Run a rank in a process that has the stand-in on its path; its last line as JSON, or its stderr."""
    path = os.pathsep.join([str(ROOT), str(STANDIN)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code, str(cache)], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """One rank's whole start."""
    found = rank(tmp_path_factory.mktemp("cache"))
    assert isinstance(found, dict), found
    return found


def test_the_order_of_a_rank(first):
    """Environment, then import, then process group, then graphs; the runtime is waited for at the end."""
    assert [what for what, _ in first["log"]] == ["import", "process group", *["compile"] * 3, "synchronize"]
    seen = first["log"][0][1]["environment"]
    assert seen["NEURON_RT_VISIBLE_CORES"] == "5"
    assert seen["NEURON_LOGICAL_NC_CONFIG"] == "2"
    assert seen["TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION"] == "1"
    assert first["device"] == "neuron:0"
    assert first["memory"] == 24_000_000_000


def test_each_role_compiles_with_its_arguments(first):
    """The compiler's arguments at the moment of compilation are those of the graph's role."""
    compiled = [details for what, details in first["log"] if what == "compile"]
    assert [details["options"] for details in compiled] == [{"model_name": f"graph-{index}"} for index in range(3)]
    kinds = [details["flags"].split()[0] for details in compiled]
    assert kinds == ["--model-type=transformer", "--model-type=unet-inference", "--model-type=transformer"]
    assert first["graphs"] == ["transformer/graph-0", "vae/graph-1", "transformer/graph-2"]


def test_cache_keys_follow_arguments_and_stay(first, tmp_path):
    """Equal graphs with equal arguments share a key, other arguments another; a second process finds the same keys."""
    keys = [details["key"] for what, details in first["log"] if what == "compile"]
    assert keys[0] == keys[2] != keys[1]
    assert first["neffs"] == sorted(f"{key}.neff" for key in {*keys})
    again = rank(tmp_path)
    assert again["neffs"] == first["neffs"]


def test_a_wrong_environment_stops_before_the_import(tmp_path):
    """LNC 1 in the environment ends the rank with one clear error, and nothing was imported."""
    said = rank(tmp_path, NEURON_LOGICAL_NC_CONFIG="1")
    assert "NEURON_LOGICAL_NC_CONFIG is 1; the kernels need 2: unset it" in said


def test_opening_without_preparing_is_refused(tmp_path):
    """A process that skipped `prepare` is told so, before it would run on all cores at once."""
    code = "from models.device import open_device; open_device('neuron')"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NEURON")}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, "PYTHONPATH": f"{ROOT}{os.pathsep}{STANDIN}"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "prepare must run before" in done.stderr
