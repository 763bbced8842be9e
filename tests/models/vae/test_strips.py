"""Plans: what strips cover, what they cost, how far pixels see."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from models.vae.exact import StripDecoder
from models.vae.model import Decoder, Memory
from models.vae.spec import WAN21_VAE, WAN22_VAE
from models.vae.strips import FRONT_SCALE, MAX_WORK, front_macs, make_plan, plan_strips, reach, rear_layers
from tests.models.vae.vaes import latents, ours

PUBLISHED = {
    "480p": (WAN21_VAE, 60, 104),
    "720p": (WAN21_VAE, 90, 160),
    "720p, upright": (WAN21_VAE, 160, 90),
    "5B": (WAN22_VAE, 44, 80),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_plans_of_published_sizes_cost_little_and_spread_wide(name):
    """At 480p and 720p a plan costs at most 1.35 of the untiled work and is over 4.6 times faster on 16 ranks."""
    plan = make_plan(*PUBLISHED[name])
    assert 1.0 < plan.work <= MAX_WORK == 1.35
    assert plan.speed_up(16) > 4.6
    assert plan.frames_per_call == 1
    speeds = [plan.speed_up(ranks) for ranks in (1, 2, 4, 8, 16)]
    assert speeds == sorted(speeds)
    assert speeds[0] == pytest.approx(1 / plan.work)


def test_small_frames_stay_whole():
    """A frame whose strips would not be worth their halo is decoded whole, several latent frames at a time."""
    plan = make_plan(ours("wan21").spec, 32, 32)
    assert (len(plan.strips), plan.work, plan.frames_per_call) == (1, 1.0, 4)


@given(
    st.sampled_from(["wan21", "wan22", "medium"]), st.integers(1, 70), st.integers(1, 70), st.integers(1, 24),
    st.integers(1, 20),
)  # fmt: skip
def test_strips_cover_the_frame_once(family, height, width, count, ranks):
    """Whatever the size, strips and ranks: own lines join without gap, windows stay inside, inner strips are equal."""
    count = min(count, FRONT_SCALE * max(height, width))
    plan = plan_strips(ours(family).spec, height, width, count)
    lines, scale = FRONT_SCALE * max(height, width), ours(family).spec.scale_spatial // FRONT_SCALE
    assert sum(strip.keep for strip in plan.strips) == lines * scale
    for strip in plan.strips:
        assert 0 <= strip.start < strip.stop <= lines
        assert (strip.low, strip.high) == (strip.start > 0, strip.stop < lines)
        assert strip.skip >= 0
        assert strip.keep > 0
    assert len({strip.keep for strip in plan.strips[1:-1]}) <= 1
    unclipped = [strip for strip in plan.strips if strip.low and strip.high]
    assert len({strip.stop - strip.start for strip in unclipped}) <= 1
    assert sorted(index for share in plan.shares(ranks) for index in share) == list(range(count))
    assert sum(shape[1] * shape[2] for shape in plan.shapes(0, 2)) == height * width * (2 * scale) ** 2


@pytest.mark.parametrize("spec", [WAN21_VAE, WAN22_VAE], ids=["2.1", "2.2"])
@torch.no_grad()
def test_work_is_that_of_the_modules(spec):
    """The multiply-adds of a plan are what torch counts when the modules run (on the meta device), within 2 %."""
    with torch.device("meta"):
        decoder = Decoder(spec)
        values = torch.empty(1, spec.z_dim, 2, 30, 40)
    plan = plan_strips(spec, 30, 40, 3)
    first = Memory()
    features = decoder.front(values[:, :, :1], first)
    with FlopCounterMode(display=False) as counter:
        features = decoder.front(values[:, :, 1:], Memory(first.new))
    assert front_macs(spec, 30, 40) == pytest.approx(counter.get_total_flops() / 2, rel=0.02)
    for strip in plan.strips:
        decode = StripDecoder(decoder, plan, strip)
        decode(features[:, :, :1])
        with FlopCounterMode(display=False) as counter:
            decode(features)
        assert strip.macs == pytest.approx(counter.get_total_flops() / 2, rel=0.02)


def test_halo_of_the_published_autoencoders():
    """Twelve feature lines (six latent ones) reach a strip; one line is dropped behind the first doubling."""
    for spec in (WAN21_VAE, WAN22_VAE):
        assert (reach(rear_layers(spec)).halo, reach(rear_layers(spec)).excess) == (12, (1, 0))


@pytest.mark.parametrize("family", ["wan21", "wan22", "medium"])
@pytest.mark.parametrize("dim", [3, 4])
def test_halo_is_what_a_perturbation_shows(family, dim):
    """Changing one line of features changes pixels exactly as far as the halo says, and no pixel further."""
    vae = ours(family, torch.float64)
    scale = vae.spec.scale_spatial // FRONT_SCALE
    halo = reach(rear_layers(vae.spec)).halo
    size = 2 * halo + 5
    shape = [1, vae.decoder.front(vae.raw_latents(latents(family, 1, 2, 2)), Memory()).shape[1], 1, 3, 3]
    shape[dim] = size
    features = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    changed = features.clone()
    changed.select(dim, halo + 2).add_(1.0)
    with torch.no_grad():
        moved = vae.decoder.rear(features, Memory()) != vae.decoder.rear(changed, Memory())
    lines = moved.transpose(dim, 4).flatten(0, 3).any(0).nonzero().flatten() // scale
    assert (int(lines.min()), int(lines.max())) == (2, size - 3)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["wan21", "wan22"]), st.integers(1, 3), st.integers(1, 4), st.integers(5, 22), st.integers(2, 6),
    st.booleans(),
)  # fmt: skip
def test_strips_give_the_untiled_pixels(family, frames, short, long, count, upright):
    """In float64, any frame cut into any strips decodes to the untiled pixels, to the last digits."""
    vae = ours(family, torch.float64)
    size = (long, short) if upright else (short, long)
    raw = vae.raw_latents(latents(family, frames, *size).double())
    plan = plan_strips(vae.spec, *size, min(count, FRONT_SCALE * long))
    caches, strips = None, [StripDecoder(vae.decoder, plan, strip) for strip in plan.strips]
    whole = StripDecoder(vae.decoder, plan_strips(vae.spec, *size, 1), plan_strips(vae.spec, *size, 1).strips[0])
    with torch.no_grad():
        for frame in range(frames):
            memory = Memory(caches)
            features = vae.decoder.front(raw[:, :, frame : frame + 1], memory)
            caches = memory.new
            joined = torch.cat([strip(features) for strip in strips], dim=plan.dim)
            assert torch.allclose(joined, whole(features), rtol=0, atol=1e-12)
