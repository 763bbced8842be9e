"""Modes, slabs and rounding of the decode; its numbers are in tests/parity/test_vae.py."""

import dataclasses

import numpy as np
import pytest
import torch
from diffusers.video_processor import VideoProcessor

from models.errors import ModelError
from models.vae.decode import decode_stream, to_uint8
from models.vae.exact import call_spans, exact_slabs
from models.vae.group import Serial, buffered
from models.vae.model import Cut, Memory
from models.vae.strips import FRONT_SCALE, plan_strips
from models.vae.tiled import plan_tiles
from tests.models.vae.vaes import decoded, latents, ours, theirs


@pytest.mark.parametrize("family", ["wan21", "wan22"])
@pytest.mark.parametrize("mode", ["exact", "reference", "tiled"])
def test_slabs_are_whole_frames_in_order(family, mode):
    """The first slab is one frame, all together are the clip; arrays are uint8, read-only, rows by columns by RGB."""
    values = latents(family, 6, 3, 5)
    slabs = list(decode_stream(ours(family), values, mode))
    scale = ours(family).spec.scale_spatial
    assert len(slabs[0]) == 1
    assert sum(len(slab) for slab in slabs) == 21
    assert {slab.shape[1:] for slab in slabs} == {(3 * scale, 5 * scale, 3)}
    assert {slab.dtype for slab in slabs} == {np.dtype(np.uint8)}
    assert not any(slab.flags.writeable for slab in slabs)
    whole = to_uint8(decoded(ours(family), values, mode)).numpy()
    assert np.array_equal(np.concatenate(slabs), whole)


def test_unknown_mode_is_refused():
    """A mode that does not exist is an error that names those that do."""
    with pytest.raises(ModelError, match="'tiles' is unknown; choose one of exact, tiled, reference") as error:
        list(decode_stream(ours("wan21"), latents("wan21", 1, 2, 2), "tiles"))
    assert error.value.kind == "unsupported"


def test_rounding_is_that_of_diffusers():
    """uint8 frames are what diffusers' video processor makes of the same floats, beyond -1 and 1 too."""
    frames = torch.linspace(-1.5, 1.5, 3 * 2 * 8 * 8).view(1, 3, 2, 8, 8)
    processed = VideoProcessor(vae_scale_factor=8).postprocess_video(frames, output_type="pil")[0]
    expected = np.stack([np.asarray(image) for image in processed])
    assert np.array_equal(to_uint8(frames).numpy(), expected)


@pytest.mark.parametrize("mode", ["exact", "tiled"])
def test_pixels_that_are_no_numbers_fail_the_clip(mode):
    """NaN in the latents never becomes a grey level."""
    values = latents("wan21", 3, 4, 4)
    values[0, 1, 2, 2] = torch.nan
    slabs = decode_stream(ours("wan21"), values, mode)
    assert len(next(slabs)) == 1
    with pytest.raises(ModelError, match="latent frame 1: the decoder made NaN or infinite") as error:
        list(slabs)
    assert error.value.kind == "nonfinite"


@pytest.mark.parametrize("frames_per_call", [1, 2, 3])
def test_frames_per_call_do_not_change_the_pixels(frames_per_call):
    """However many latent frames go in at once, the clip is the same within rounding."""
    vae, values = ours("wan21", torch.float64), latents("wan21", 6, 4, 4)
    plan = plan_strips(vae.spec, 4, 4, 1)
    other = dataclasses.replace(plan, frames_per_call=frames_per_call)
    assert torch.allclose(decoded(vae, values, plan=plan), decoded(vae, values, plan=other), rtol=0, atol=1e-12)


@pytest.mark.parametrize("latent_frames", [1, 2, 5, 21, 41])
def test_calls_cover_the_clip(latent_frames):
    """The first latent frame is a call of its own, the rest follow without a gap."""
    for per_call in (1, 2, 4):
        spans = call_spans(latent_frames, per_call)
        assert spans[0] == (0, 1)
        assert [frame for span in spans for frame in range(*span)] == list(range(latent_frames))
        assert len({end - start for start, end in spans[1:-1]}) <= 1


def test_plan_stands_in_the_description():
    """The record of a clip can say how it was decoded: mode, strips, halo, calls; tiles and their overlap."""
    vae = ours("wan21")
    assert vae.plan("reference", 4, 4).describe()["mode"] == "reference"
    exact = plan_strips(vae.spec, 8, 30, 3).describe()
    assert exact["mode"] == "exact"
    assert exact["axis"] == "columns"
    assert exact["halo"] == 2 + 4 + 2  # one residual block less per up-block than in the published ones
    assert len(exact["strips"]) == 3
    assert vae.plan("tiled", 60, 104).describe() == {
        "mode": "tiled", "tile_px": 256, "stride_px": 192, "tiles": 15, "work": 1.6564
    }  # fmt: skip


@pytest.mark.parametrize("family", ["wan21", "wan22"])
@pytest.mark.parametrize("size_px", [(320, 464), (224, 288), (256, 192)])
def test_tiles_are_those_of_diffusers(family, size_px):
    """The tiled mode is diffusers' tiling of the same size within float32 rounding, ragged last tiles included."""
    vae, model = ours(family), theirs(family)
    scale = vae.spec.scale_spatial
    values = latents(family, 2, size_px[0] // scale, size_px[1] // scale)
    with torch.no_grad():
        model.enable_tiling()
        expected = model.decode(vae.raw_latents(values)).sample
        model.disable_tiling()
    assert torch.allclose(decoded(vae, values, "tiled").clamp(-1, 1), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("tile_px", "stride_px"), [(250, 192), (256, 100), (128, 256), (256, 0)])
def test_tiles_that_do_not_work_are_refused(tile_px, stride_px):
    """Tiles off the latent grid, gaps between tiles, or more than two tiles on a pixel are refused with the numbers."""
    with pytest.raises(ModelError, match=f"tile {tile_px} px, stride {stride_px} px"):
        plan_tiles(ours("wan21").spec, 60, 104, tile_px, stride_px)


@pytest.mark.parametrize("family", ["wan21", "wan22"])
@torch.no_grad()
def test_decoder_traces_in_one_piece(family):
    """First and later calls of front and strip compile as full graphs: four in all, caches tensors in and out."""
    vae = ours(family)
    raw = vae.raw_latents(latents(family, 4, 4, 9))
    plan = plan_strips(vae.spec, 4, 9, 2)
    strip = plan.strips[0]
    cut = Cut(plan.dim, strip.low, strip.high, plan.reach.excess)
    graphs = []

    def count(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    def front(x, caches):
        memory = Memory(caches)
        return vae.decoder.front(x, memory), memory.new

    def rear(x, caches):
        memory = Memory(caches)
        return vae.decoder.rear(x.narrow(plan.dim, strip.start, strip.stop - strip.start), memory, cut), memory.new

    traced = [torch.compile(part, backend=count, fullgraph=True, dynamic=False) for part in (front, rear)]
    caches, others = [None, None], [None, None]
    for frame in range(4):
        x = y = raw[:, :, frame : frame + 1]
        for place, part in enumerate((front, rear)):
            x, caches[place] = traced[place](x, caches[place])
            y, others[place] = part(y, others[place])
        assert torch.allclose(x, y, rtol=0, atol=1e-6)
    assert len(graphs) == 4
    torch.compiler.reset()


def test_a_slow_or_leaving_consumer_holds_nobody_up():
    """Behind the buffer the decode runs to its end whether its slabs are taken or not, and errors arrive in order."""
    made = []

    def slabs(fail):
        for number in range(5):
            made.append(number)
            yield torch.full((1,), number)
        if fail:
            raise ModelError("nonfinite", "late")

    taken = buffered(slabs(fail=False))
    assert int(next(taken)) == 0
    taken.close()
    assert made == [0, 1, 2, 3, 4]
    with pytest.raises(ModelError, match="late"):
        assert [int(slab) for slab in buffered(slabs(fail=True))] == [0, 1, 2, 3, 4]


def test_caches_are_small():
    """Between calls a strip holds two frames of each convolution's input, and nothing of the frames before."""
    vae = ours("wan21")
    values = vae.raw_latents(latents("wan21", 3, 4, 6))
    memory = Memory()
    features = vae.decoder.front(values[:, :, :1], memory)
    rear = Memory()
    vae.decoder.rear(features, rear)
    assert features.shape[3] == FRONT_SCALE * 4
    assert {cache.shape[2] for cache in memory.new + rear.new} == {2}
    later = Memory(memory.new)
    vae.decoder.front(values[:, :, 1:], later)
    assert all(cache.untyped_storage().nbytes() == cache.numel() * 4 for cache in later.new)
    plan = plan_strips(vae.spec, 4, 6, 1)
    assert len(list(exact_slabs(vae.decoder, values, plan, Serial(), to_uint8, torch.uint8))) == 2
