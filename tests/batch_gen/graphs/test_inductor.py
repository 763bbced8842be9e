"""What torch's own compiler leaves in its cache works on another machine after it was packed and fetched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from batch_gen.graphs.artefact import find_artefact, pack, unpack
from batch_gen.graphs.supply import count_graphs, graphs_in
from batch_gen.storage.folder import FolderStore

ROOT = Path(__file__).resolve().parents[3]
FACTS = {"bucket": "64x64x9-text"}
# One graph with an operator of ours in it, compiled as a rank does it; the last line is JSON.
RANK = """
import json, sys
from pathlib import Path
from models.device import Compiling, Start, open_device, prepare
prepare(Start("cpu", cache=Path(sys.argv[1])))
device = open_device("cpu", compiling=Compiling("model"))
import torch
from kernels.adaln import adaln
def part(x):
    total, normal = adaln(x, None, None, None, None, None, None, 1e-6)
    return torch.sigmoid(normal) * 2 + total.cos()
with torch.inference_mode():
    out = device.compile(part, "part", "transformer")(torch.linspace(-1, 1, 256).view(1, 8, 32))
from torch._dynamo.utils import counters
counted = counters["inductor"]
misses = counted["fxgraph_cache_miss"] + counted["fxgraph_cache_bypass"]
print(json.dumps({"sum": float(out.double().sum()), "hits": counted["fxgraph_cache_hit"], "misses": misses}))
"""


def rank(cache):
    """Run it with this cache folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    command = [sys.executable, "-c", RANK, str(cache)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_packed_graphs_are_hits_elsewhere(tmp_path):
    """The first machine compiles, the second finds every graph and adds no file, and both give the same number."""
    first, store = rank(tmp_path / "one"), FolderStore(tmp_path / "graphs")
    assert count_graphs(tmp_path / "one", frozenset()) == {"hits": 0, "misses": 1}
    digest = pack(store, tmp_path / "one", FACTS, {}).digest
    artefact = find_artefact(store, digest, FACTS)
    unpack(store, artefact, tmp_path / "two")
    second = rank(tmp_path / "two")
    assert (first["hits"], first["misses"]) == (0, 1)
    assert (second["hits"], second["misses"]) == (1, 0)
    assert count_graphs(tmp_path / "two", graphs_in(tmp_path / "one")) == {"hits": 1, "misses": 0}
    assert second["sum"] == first["sum"]
    added = {path.relative_to(tmp_path / "two").as_posix() for path in (tmp_path / "two").rglob("*.so")}
    assert added == {file.path for file in artefact.files if file.path.endswith(".so")}
