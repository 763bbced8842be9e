"""The pipeline's generators: events, entering and leaving in the middle, text, limits, failures."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.errors import ModelError
from models.events import DoneEvent, StepEvent, TapEvent
from models.wan.pipeline import PipelineOptions, Sampling, WanPipeline

CLIP = Sampling("a red fox", "blurry", 5, 48, 32, 5, 4, 4.0, 3.0, 5.0)


@pytest.fixture(scope="module")
def pipeline(tiny_checkpoint):
    """The pipeline of `tiny`."""
    return WanPipeline.load(tiny_checkpoint)


def render(pipeline, clip=CLIP, **options):
    """All events of a denoising: (steps, taps by name, final latents)."""
    events = list(pipeline.denoise(clip, **options))
    assert isinstance(events[-1], DoneEvent)
    steps = [event for event in events if isinstance(event, StepEvent)]
    taps = {event.name: event.value for event in events if isinstance(event, TapEvent)}
    return steps, taps, events[-1].latents


def test_one_event_per_step_then_done(pipeline):
    """Steps come in order with their total, then one Done with float32 latents of the clip's shape."""
    steps, taps, latents = render(pipeline)
    assert [(step.index, step.total) for step in steps] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert taps == {}
    assert (latents.shape, latents.dtype) == ((16, 2, 4, 6), torch.float32)


def test_same_request_same_bits(pipeline):
    """A clip's latents do not depend on what was rendered before it; another seed gives another clip."""
    first = render(pipeline)[2]
    other = render(pipeline, dataclasses.replace(CLIP, seed=6, prompt="snow"))[2]
    assert torch.equal(render(pipeline)[2], first)
    assert not torch.equal(other, first)


def test_taps_are_what_was_asked_for(pipeline):
    """Named taps alone are sent: text zero-padded to 512 rows, latents as they enter a step, guided velocities."""
    names = frozenset({"text", "latents.0", "latents.4", "velocity.3"})
    _, taps, latents = render(pipeline, taps=names)
    assert set(taps) == names
    assert taps["text"].shape == (512, 64)
    assert not taps["text"][pipeline.text([CLIP.prompt])[0].num_tokens :].any()
    assert torch.equal(taps["latents.4"], latents)
    assert taps["velocity.3"].dtype == torch.float32


def test_taps_do_not_change_a_clip(pipeline):
    """Listening leaves the bits as they are."""
    names = frozenset(f"{kind}.{k}" for kind in ("latents", "velocity") for k in range(4))
    assert torch.equal(render(pipeline, taps=names)[2], render(pipeline)[2])


def test_stop_gives_the_latents_that_enter_the_step(pipeline):
    """Stopping before step 2 does steps 0 and 1, and returns what would enter step 2."""
    steps, _, latents = render(pipeline, stop=2)
    assert [step.index for step in steps] == [0, 1]
    assert torch.equal(latents, render(pipeline, taps=frozenset({"latents.2"}))[1]["latents.2"])


def test_entering_at_a_step_is_teacher_forced(pipeline):
    """From given latents at step 2 the velocity of step 2 is bit for bit that of the whole run."""
    names = frozenset({"latents.2", "velocity.2"})
    _, whole, _ = render(pipeline, taps=names)
    steps, entered, _ = render(pipeline, start=(2, whole["latents.2"]), taps=names)
    assert [step.index for step in steps] == [2, 3]
    assert torch.equal(entered["velocity.2"], whole["velocity.2"])


def test_euler_has_no_history(tiny_checkpoint):
    """With the Euler solver, a clip that is left and entered again ends with the same bits."""
    pipeline = WanPipeline.load(tiny_checkpoint, PipelineOptions(solver="euler"))
    middle = render(pipeline, stop=2)[2]
    assert torch.equal(render(pipeline, start=(2, middle))[2], render(pipeline)[2])


@pytest.mark.parametrize(
    ("start", "words"),
    [((4, torch.zeros(16, 2, 4, 6)), "step 4"), ((0, torch.zeros(16, 2, 4, 4)), "do not fit the clip")],
)
def test_entering_with_misfits_is_refused(pipeline, start, words):
    """A step outside the schedule or latents of another size are input errors."""
    with pytest.raises(ModelError, match=words) as caught:
        render(pipeline, start=start)
    assert caught.value.kind == "input"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 40}, "must be multiples of 16"),
        ({"height": 24}, "must be multiples of 16"),
        ({"num_frames": 6}, "multiple of 4 plus 1"),
        ({"width": 16 * 1024}, "rope_max_seq_len"),
    ],
)
def test_sizes_that_the_model_cannot_do(pipeline, change, words):
    """Sizes that diffusers would round in silence, or that lie beyond the position tables, are input errors."""
    with pytest.raises(ModelError, match=words) as caught:
        render(pipeline, dataclasses.replace(CLIP, **change))
    assert caught.value.kind == "input"


def test_text_is_computed_once(pipeline):
    """Equal texts, also equal after cleaning, give one object; its rows are the prompt's tokens."""
    first, again, spaced = pipeline.text(["snow on a road", "snow on a road", "  snow  on a road "])
    assert first is again is spaced
    assert first.rows.shape == (first.num_tokens, 64)


def test_text_cache_is_bounded(tiny_checkpoint):
    """With room for one text the oldest goes; the newest stays however large it is."""
    pipeline = WanPipeline.load(tiny_checkpoint, PipelineOptions(text_cache_bytes=1))
    first, second = pipeline.text(["snow", "rain"])
    assert pipeline.text(["rain"])[0] is second
    again = pipeline.text(["snow"])[0]
    assert again is not first
    assert torch.equal(again.rows, first.rows)


def test_long_prompts_are_counted_or_refused(pipeline, tiny_checkpoint):
    """A long prompt is cut to 512 tokens and says so, or fails if that was asked for."""
    long = "fox " * 600
    handle = pipeline.text([long])[0]
    assert (handle.num_tokens, handle.truncated, len(handle.rows)) == (601, True, 512)
    strict = WanPipeline.load(tiny_checkpoint, PipelineOptions(long_prompt="fail"))
    with pytest.raises(ModelError, match="601 tokens"):
        strict.text([long])


def test_swapped_experts_give_the_same_bits(pipeline, tiny_checkpoint):
    """With one expert in memory at a time, read again at each switch, a clip is the same."""
    swapping = WanPipeline.load(tiny_checkpoint, PipelineOptions(experts="swap"))
    assert torch.equal(render(swapping)[2], render(pipeline)[2])


def test_latents_that_turn_nan_are_an_error(tiny_checkpoint, tmp_path):
    """A checkpoint whose low-noise expert makes NaN fails at its first step, with step and expert named."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "broken")
    path = folder / "transformer_2" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["proj_out.bias"] = tensors["proj_out.bias"] * torch.nan
    save_file(tensors, path)
    with pytest.raises(ModelError, match="not finite after step 2 \\(low-noise expert\\)") as caught:
        render(WanPipeline.load(folder))
    assert caught.value.kind == "nonfinite"


def test_frames_come_in_slabs(pipeline):
    """Decoding yields uint8 slabs that join to the clip's frames."""
    latents = render(pipeline)[2]
    slabs = list(pipeline.decode(latents.numpy(), CLIP.num_frames))
    frames = np.concatenate(slabs)
    assert (frames.shape, frames.dtype) == ((5, 32, 48, 3), np.uint8)
    assert frames.std() > 10


def test_decode_wants_the_clips_length(pipeline):
    """Latents that do not make the frames asked for are refused."""
    with pytest.raises(ModelError, match="2 latent frames do not make 9 frames"):
        list(pipeline.decode(torch.zeros(16, 2, 4, 6), 9))


def test_the_autoencoder_has_its_own_dtype(pipeline, tiny_checkpoint):
    """In bfloat16 frames are close to those of float32 and not the same; the transformer's dtype does not matter to it."""
    half = WanPipeline.load(tiny_checkpoint, PipelineOptions(vae_dtype="bfloat16"))
    assert (half.describe()["vae_dtype"], pipeline.describe()["vae_dtype"]) == ("bfloat16", "float32")
    latents = torch.randn(16, 2, 4, 6, generator=torch.Generator().manual_seed(3)).numpy()
    rough, exact = (np.concatenate(list(p.decode(latents, 5))).astype(float) for p in (half, pipeline))
    assert 0 < np.abs(rough - exact).mean() < 1.5
    assert half.vae.dtype is torch.bfloat16
    assert WanPipeline.load(tiny_checkpoint, PipelineOptions(dtype="bfloat16")).vae.dtype is torch.float32


def test_description_is_json(pipeline):
    """describe() is plain JSON and names what decides the numbers."""
    described = json.loads(json.dumps(pipeline.describe()))
    assert described["model_digest"]
    assert (described["dtype"], described["solver"], described["boundary_ratio"]) == ("float32", "unipc", 0.875)


def test_without_a_boundary(tiny_checkpoint, tmp_path):
    """Without a boundary the first expert does everything, as in diffusers."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "changed")
    path = folder / "model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"boundary_ratio": None}))
    assert {step.stage for step in render(WanPipeline.load(folder))[0]} == {"high"}


def test_a_missing_part_is_a_checkpoint_error(tiny_checkpoint, tmp_path):
    """Each part that is missing is found while loading, and named."""
    for part in ("transformer", "transformer_2", "text_encoder", "tokenizer", "vae", "scheduler"):
        folder = shutil.copytree(tiny_checkpoint, tmp_path / part)
        shutil.rmtree(folder / part)
        with pytest.raises(ModelError, match=part) as caught:
            WanPipeline.load(folder)
        assert caught.value.kind == "checkpoint"
