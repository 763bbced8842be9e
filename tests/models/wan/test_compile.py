"""--compile: the same pipeline as graphs; with eager the same bits, with inductor within the dtype's own error.

The Neuron adapter is tried with the stand-in of `torch_neuronx` in a process of its own, tensors on the CPU.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from models.device import Compiling, Device
from models.events import DoneEvent
from models.parallel.mesh import single
from models.wan.pipeline import PipelineOptions, Sampling, WanPipeline
from tests.kernels.judge import assert_three_way
from tests.parity.compare import our_velocity, relative

ROOT = Path(__file__).resolve().parents[3]
STANDIN = ROOT / "tests" / "neuron_standin"
CLIP = Sampling("a red fox", "blurry", 5, 32, 32, 5, 3, 4.0, 3.0, 5.0)

# Two clips that differ in everything that is no shape: prompts, seed, guidance, flow shift, steps.
ON_STANDIN = """
import json, sys
from pathlib import Path
from models import device
device.prepare(device.Start("neuron", core=0, threads=1, cache=Path(sys.argv[2])))
import torch, torch_neuronx
torch.set_num_threads(1)
from models.parallel.mesh import single
from models.wan.pipeline import PipelineOptions, Sampling, WanPipeline
on_host = device.NeuronDevice("neuron", torch.device("cpu"), device.Compiling(sys.argv[3]))
pipeline = WanPipeline(Path(sys.argv[1]), PipelineOptions(device="neuron", compile=sys.argv[3]), on_host, single())
counts = []
for clip in (Sampling("a red fox", "blurry", 5, 32, 32, 5, 3, 4.0, 3.0, 5.0),
             Sampling("a very long walk along the river in the evening", "", 6, 32, 32, 5, 4, 2.0, 5.0, 3.0)):
    *_, done = pipeline.denoise(clip)
    list(pipeline.decode(done.latents, 5))
    counts.append(sum(what == "compile" for what, _ in torch_neuronx.LOG))
log = [(details["options"]["model_name"], details["flags"].split()[0])
       for what, details in torch_neuronx.LOG if what == "compile"]
print(json.dumps({"counts": counts, "graphs": log}))
"""


def frames_of(folder, **options):
    """Latents and frames of the clip."""
    pipeline = WanPipeline.load(folder, PipelineOptions(**options))
    *_, done = pipeline.denoise(CLIP)
    assert isinstance(done, DoneEvent)
    return done.latents, np.concatenate(list(pipeline.decode(done.latents, CLIP.num_frames)))


@pytest.fixture(scope="module")
def plain(tiny_variant):
    """The clip as it is without graphs."""
    return frames_of(tiny_variant("single"))


@pytest.mark.parametrize("mode", ["block", "model"])
def test_eager_graphs_give_the_same_frames(plain, tiny_variant, mode):
    """Every part as a captured graph, without a break, gives latents and frames equal to the last bit."""
    latents, frames = frames_of(tiny_variant("single"), compile=mode, compile_backend="eager")
    assert torch.equal(latents, plain[0])
    assert np.array_equal(frames, plain[1])


@pytest.mark.parametrize("mode", ["block", pytest.param("model", marks=pytest.mark.slow)])
def test_on_the_standin_nothing_compiles_twice(tiny_variant, tmp_path, mode):
    """One graph per part and shape: a second clip with other prompts, seed, guidance, shift and steps adds none."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(STANDIN)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ON_STANDIN, str(tiny_variant("single")), str(tmp_path / "cache"), mode]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["counts"][0] == found["counts"][1] > 0
    kinds = dict(map(tuple, found["graphs"]))
    assert {kinds[name] for name in kinds if name.startswith("vae")} == {"--model-type=unet-inference"}
    assert kinds["encoder"] == "--model-type=transformer"
    assert kinds["guide"] == "--model-type=generic"
    expected = {"keys", "begin", "block", "end"} if mode == "block" else {"first", "steady"}
    assert expected <= set(kinds)


def test_every_part_is_moved_to_the_device(tiny_variant):
    """Experts, text encoder and autoencoder are all where the device is: none stays behind on the host."""
    elsewhere = Device("cpu", torch.device("meta"))
    pipeline = WanPipeline(tiny_variant("default"), PipelineOptions(), elsewhere, single())
    parts = {
        "high": pipeline.experts.model("high"),
        "low": pipeline.experts.model("low"),
        "text": pipeline.text_encoder.model,
        "decoder": pipeline.vae.decoder,
        "encoder": pipeline.vae.encoder,
    }
    left = [
        f"{part}.{name}"
        for part, module in parts.items()
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if tensor.device.type != "meta"
    ]
    assert left == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["block", "model"])
def test_inductor_three_ways(tiny_variant, mode, tmp_path):
    """In bfloat16 inductor errs no more than 3 times (peak 5 times) as much as plain bfloat16; in float32 by 1e-5."""
    folder = tiny_variant("single")
    options = PipelineOptions(compile=mode)
    device = Device("cpu", torch.device("cpu"), Compiling(mode))
    exact = WanPipeline.load(folder)
    ours = WanPipeline(folder, options, device, single())
    half = WanPipeline.load(folder, PipelineOptions(dtype="bfloat16"))
    ours_half = WanPipeline.load(folder, dataclasses.replace(options, dtype="bfloat16"))
    noise = torch.randn(1, *exact.spec.latent_shape(32, 32, 5), generator=torch.Generator().manual_seed(1))
    for step in (0, 2):
        truth = our_velocity(exact, CLIP, step, noise)
        assert relative(our_velocity(ours, CLIP, step, noise), truth) <= 1e-5
        compiled, plain_half = our_velocity(ours_half, CLIP, step, noise), our_velocity(half, CLIP, step, noise)
        assert_three_way(compiled.bfloat16(), plain_half.bfloat16(), truth.double(), share=0.2)
    counted = counters["inductor"]
    assert sum(counted[f"fxgraph_cache_{what}"] for what in ("hit", "miss", "bypass")) > 0
