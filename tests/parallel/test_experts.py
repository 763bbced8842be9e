"""One expert and the text encoder on real ranks: what each reads and holds, what it computes once, what it compiles to."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.errors import ModelError
from models.parallel.control import MeshControl
from models.parallel.layout import Degrees
from models.parallel.mesh import Mesh, single
from models.parallel.tensor import Style, style_of
from models.umt5.parallelize import largest_axis
from models.wan.parallelize import PLAN, load_expert
from models.wan.pipeline import PipelineOptions, WanPipeline
from models.wan.rope import rope_tables
from models.wan.weights import load_transformer
from tests.parallel import clips

pytestmark = pytest.mark.mesh
FULL = Degrees(2, 2, 2)


def held(mesh: Mesh, folder: Path):
    """Bytes read by this rank, and per parameter: its shape and the bytes of the storage behind it."""
    from models.parallel.loading import LoadMeter

    meter = LoadMeter()
    model = load_expert(folder, torch.float32, torch.device("cpu"), mesh)
    report = meter.report(mesh)
    sizes = {name: (tuple(p.shape), p.untyped_storage().nbytes()) for name, p in model.named_parameters()}
    return report, sizes


@pytest.mark.parametrize("degrees", [Degrees(tp=4), FULL], ids=str)
def test_a_rank_reads_and_holds_only_its_slices(pool, tiny, degrees):
    """Bytes read and storage held are exactly the slices that the table gives, and no slice keeps a whole tensor alive."""
    folder = tiny / "transformer"
    whole = dict(load_transformer(folder, torch.float32).named_parameters())
    results = pool.run(held, degrees, folder)
    for report, sizes in results:
        for name, (shape, num_bytes) in sizes.items():
            style = style_of(PLAN, name)
            is_whole = style is Style.REPLICATE or (style is Style.ROWWISE and name.endswith("bias"))
            expected = list(whole[name].shape)
            if not is_whole:
                expected[1 if style is Style.ROWWISE else 0] //= degrees.tp
            assert list(shape) == expected
            assert num_bytes == 4 * torch.Size(shape).numel()
        assert report["bytes"] == [sum(num_bytes for _, num_bytes in sizes.values())] * degrees.size
        assert len(report["seconds"]) == degrees.size


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("blocks.1.attn1.to_q.weight", "drop", "1 missing: blocks.1.attn1.to_q.weight"),
        ("blocks.9.extra", "add", "1 unexpected: blocks.9.extra"),
    ],
)
def test_keys_that_do_not_fit_fail_on_every_rank(pool, tiny, tmp_path, key, change, message):
    """A missing or an unexpected key stops every rank alike, with its name, before any tensor is read."""
    shutil.copytree(tiny / "transformer", tmp_path / "transformer")
    [path] = (tmp_path / "transformer").glob("*.safetensors")
    tensors = load_file(path)
    tensors = (
        {**tensors, key: torch.zeros(1)} if change == "add" else {name: t for name, t in tensors.items() if name != key}
    )
    save_file(tensors, path)
    for outcome in pool.outcomes(held, Degrees(tp=2), tmp_path / "transformer"):
        assert isinstance(outcome.error, ModelError)
        assert outcome.error.kind == "checkpoint"
        assert message in outcome.error.message


def texts(mesh: Mesh, folder: Path, prompts):
    """Embeddings of prompts, and over how many ranks the encoder ran."""
    pipeline = WanPipeline.load(folder, PipelineOptions(), mesh)
    axis = largest_axis(pipeline.text_encoder.model.spec, mesh)
    return axis.size, [handle.rows for handle in pipeline.text(prompts)]


@pytest.mark.parametrize(("degrees", "size"), [(FULL, 8), (Degrees(tp=2, cp=3), 2), (Degrees(cp=3), 1)], ids=str)
def test_text_encoder_equals_one_process(pool, tiny, degrees, size):
    """Over the largest sub-mesh that divides its heads, the encoder gives the embeddings of one process on every rank."""
    prompts = [clips.PROMPT, "", "\u4e00\u53ea\u72d0\u72f8 \U0001f98a"]
    _, expected = texts(single(), tiny, prompts)
    results = pool.run(texts, degrees, tiny, prompts)
    for found, rows in results:
        assert found == size
        assert all(clips.distance(mine, theirs) <= 1e-6 for mine, theirs in zip(rows, expected, strict=True))
        assert all(map(torch.equal, rows, results[0][1]))


def key_projections(mesh: Mesh, folder: Path, sampling):
    """How often each layer of each expert projects text to keys and values, over two clips of one prompt."""
    pipeline = WanPipeline.load(folder, PipelineOptions(), mesh)
    calls = []
    for stage in pipeline.experts.folders:
        for index, block in enumerate(pipeline.experts.model(stage).blocks):
            block.attn2.to_kv.register_forward_hook(lambda *_, name=(stage, index): calls.append(name))
    for _ in range(2):
        list(pipeline.denoise(sampling))
    return calls


def test_text_keys_are_made_once_per_prompt(pool, tiny):
    """Cross-attention keys and values are projected once per layer, expert and prompt, and serve all steps and clips."""
    for calls in pool.run(key_projections, FULL, tiny, clips.ODD):
        assert len(calls) == len(set(calls)) == 2 * 3


def compiled(mesh: Mesh, folder: Path, attention, sequence):
    """The expert through fullgraph compilation: its graph in words that mean the same on all ranks, and equality."""
    model = load_expert(
        folder, torch.float32, torch.device("cpu"), mesh, attention=attention, sequence_parallel=sequence
    )
    names = {axis.group_name: f"<{axis.name}>" for axis in (mesh.tp, mesh.cp, mesh.cfg) if axis.group_name}
    graphs = []

    def backend(module, _inputs):
        nodes = module.graph.nodes
        graphs.append(
            [
                (
                    str(node.target),
                    [names.get(arg, arg) if isinstance(arg, str) else str(arg) for arg in node.args],
                    str(node.kwargs),
                )
                for node in nodes
                if node.op == "call_function"
            ]
        )
        return module.forward

    torch.compiler.reset()
    latents = torch.randn(1, 16, 2, 10, 14, generator=torch.Generator().manual_seed(3))
    rope = rope_tables((2, 5, 7), model.spec.attention_head_dim)
    with torch.inference_mode():
        keys = model.text_keys(torch.ones(1, 7, model.spec.text_dim), 505)
        arguments = (latents, torch.tensor([900.0]), keys, rope)
        eager = model(*arguments)
        out = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(*arguments)
    return graphs, torch.equal(out, eager)


@pytest.mark.parametrize(("attention", "sequence"), [("ring", False), ("gather", True)])
def test_all_ranks_trace_one_graph(pool, tiny, attention, sequence):
    """A parallel expert compiles in one piece to the same numbers, and every rank traces the same graph.

    No place of a rank is a constant of it: 64 ranks can share one compiled program.
    """
    results = pool.run(compiled, FULL, tiny / "transformer", attention, sequence)
    assert all(equal for _, equal in results)
    first = results[0][0]
    assert len(first) == 1
    assert all(graphs == first for graphs, _ in results)
    targets = [target for target, _, _ in first[0]]
    groups = [args[-1] for target, args, _ in first[0] if "_c10d_functional" in target and "wait_tensor" not in target]
    assert set(groups) == {"<tp>", "<cp>"}
    assert sum("ring_attention" in target for target in targets) == (3 if attention == "ring" else 0)


def shared(mesh: Mesh, command, arrays):
    """A command of rank 0 with arrays, on every rank."""
    control = MeshControl(mesh)
    return control.share(command, arrays) if mesh.is_first else control.share(None, [])


def test_commands_reach_every_rank(pool):
    """A command and its arrays arrive on all ranks as rank 0 gave them, an empty array and no arrays included."""
    import numpy as np

    arrays = [np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2], np.zeros((0, 2), np.uint8)]
    for sent in (arrays, []):
        for command, received in pool.run(shared, FULL, {"type": "denoise", "start": 3}, sent):
            assert command == {"type": "denoise", "start": 3}
            assert [array.dtype for array in received] == [array.dtype for array in sent]
            assert all(map(np.array_equal, received, sent))
