"""Operations and bytes from sizes: they equal the published counts and the modules' own, and behave."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_gen.cli import invoke
from batch_gen.errors import MemoryTooSmall
from batch_gen.estimate.machines import TRN2
from batch_gen.estimate.memory import ADDERS, Footprint, Part, Placement, check_fits, footprint, weights
from batch_gen.estimate.speed import T2V_720P, Rates, clip_seconds, ideal_denoise_s
from batch_gen.estimate.subject import Clips, published
from batch_gen.estimate.work import (
    decode_work,
    decoder_parameters,
    denoise_work,
    encode_work,
    encoder_parameters,
    forward_work,
    num_tokens,
    text_work,
)
from batch_gen.request import Bucket
from models.parallel.layout import Degrees
from models.vae.spec import WAN21_VAE

T2V = published("wan2.2-t2v-a14b")
MODELS = ("wan2.2-t2v-a14b", "wan2.2-i2v-a14b", "wan2.2-ti2v-5b")
SD, HD = Bucket(832, 480, 81, "text"), Bucket(1280, 720, 81, "text")
BUCKETS = st.builds(
    lambda w, h, k: Bucket(32 * w, 32 * h, 4 * k + 1, "text"),
    st.integers(1, 60),
    st.integers(1, 40),
    st.integers(0, 40),
)
POWERS = st.sampled_from([1, 2, 4, 8])


def held(model, bucket, degrees, attention):
    """Weights and activations of one rank, bytes."""
    subject = published(model)
    clips, placement = Clips(bucket, 40), Placement(degrees, attention)
    parts = footprint(subject, clips, placement, TRN2).parts
    return sum(p.num_bytes for p in parts if p.name.startswith("weights") or p.name == "activations")


@pytest.mark.parametrize(("bucket", "forward", "decode", "encode"), [(SD, 1678.4, 275, 164), (HD, 6523.4, 639, 382)])
def test_operations_equal_the_counted_ones(bucket, forward, decode, encode):
    """TFLOP of one evaluation, one decode and one encode are those that torch's counter found, within 0.5 %."""
    once = forward_work(T2V, num_tokens(T2V, bucket)).total + 2.1e12  # their count makes the text's keys every time
    assert once / 1e12 == pytest.approx(forward, rel=5e-4)
    assert decode_work(T2V.vae, bucket) / 1e12 == pytest.approx(decode, rel=5e-3)
    assert encode_work(T2V.vae, bucket) / 1e12 == pytest.approx(encode, rel=5e-3)
    assert text_work(T2V) / 1e12 == pytest.approx(4.84, rel=5e-3)


@pytest.mark.parametrize(("bucket", "seconds"), [(SD, 12.6), (HD, 48.9)])
def test_ideals_equal_the_known_ones(bucket, seconds):
    """40 steps on 64 cores at the peak take 12.6 s at 480p and 48.9 s at 720p, within 1 %."""
    assert ideal_denoise_s(T2V, Clips(bucket, 40), Placement(Degrees(8, 4, 2)), TRN2) == pytest.approx(
        seconds, rel=0.01
    )


def test_autoencoder_parameters_equal_the_modules():
    """The counts from sizes are those of the built modules, norms aside."""
    from torch import device, nn

    from models.vae.model import Decoder, Encoder

    with device("meta"):
        built = [(Decoder(WAN21_VAE), decoder_parameters), (Encoder(WAN21_VAE), encoder_parameters)]
    for module, count in built:
        assert isinstance(module, nn.Module)
        assert count(WAN21_VAE) == pytest.approx(sum(p.numel() for p in module.parameters()), rel=2e-3)


def test_the_known_case_follows_from_the_table():
    """720p on tp=4,cp=8,cfg=2 does not fit with gathered keys and values and does with the ring; tp=8,cp=4 fits."""
    peak = {
        (tp, cp, kind): footprint(T2V, T2V_720P, Placement(Degrees(tp, cp, 2), kind), TRN2)
        for tp, cp, kind in ((4, 8, "gather"), (4, 8, "ring"), (8, 4, "gather"), (8, 4, "ring"))
    }
    assert [found.fits for found in peak.values()] == [False, True, True, True]
    assert peak[4, 8, "gather"].peak_bytes == pytest.approx(24.4e9, rel=0.01)


def test_measured_parts_are_met():
    """Weights of a rank are 14.7e9 bytes at tp=4 and 7.3e9 at tp=8 within 5 %, scratch 1.5e9, as measured by others."""
    for tp, cp, total in ((4, 8, 14.7e9), (8, 4, 7.3e9)):
        found = weights(T2V, T2V_720P, Placement(Degrees(tp, cp, 2)))
        assert sum(part.num_bytes for part in found) == pytest.approx(total, rel=0.05)
    gathered = footprint(T2V, T2V_720P, Placement(Degrees(4, 8, 2), "gather"), TRN2)
    assert gathered.stage_bytes("denoise") == pytest.approx(1.5e9, rel=0.06)


def test_fp8_blocks_hold_half(capsys):
    """With FP8 linear layers the experts hold a little more than half of their bfloat16 bytes."""
    plain, fp8 = (
        weights(T2V, T2V_720P, Placement(Degrees(4, 8, 2), "ring", fp8=fp8))[0].num_bytes for fp8 in (False, True)
    )
    assert 0.5 < fp8 / plain < 0.53
    arguments = ["plan", "--model", "wan2.2-t2v-a14b", "--preset", "t2v-a14b-720p", "--profile", "trn2-720p"]
    mesh = ["--mesh", "tp=4,cp=8,cfg=2", "--attention", "gather", "--quantization", "fp8_row"]
    assert invoke([*arguments, *mesh]) == 0
    assert "1 B in blocks" in capsys.readouterr().out


def test_the_verdict_follows_an_adder():
    """Half a gigabyte less of DMA rings and the case that failed fits; a fifth more and the ring does not."""
    rings = next(adder for adder in ADDERS if adder.name == "DMA rings")
    others = [adder for adder in ADDERS if adder is not rings]
    for num_bytes, kind, fits in ((3.4e9, "gather", True), (4.4e9, "ring", False)):
        changed = [*others, replace(rings, num_bytes=num_bytes)]
        assert footprint(T2V, T2V_720P, Placement(Degrees(4, 8, 2), kind), TRN2, changed).fits is fits


def test_a_refusal_names_parts_and_a_way_out():
    """What does not fit says how much is missing, the largest parts and what to try; it can be ignored."""
    placement = Placement(Degrees(4, 8, 2), "gather")
    found = Footprint((Part("weights: DiT", 30e9, "always"),), 24e9)
    with pytest.raises(MemoryTooSmall, match=r"needs 30.00e9 .* weights: DiT 30.00.*--attention ring") as caught:
        check_fits("720p", found, placement, ignore=False)
    assert caught.value.exit_code == 2
    check_fits("720p", found, placement, ignore=True)


@given(st.sampled_from(MODELS), BUCKETS, POWERS, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]))
@settings(max_examples=30, deadline=None)
def test_more_ranks_never_hold_more(model, bucket, tp, cp, cfg):
    """Doubling tp or cp alone never raises weights + activations of a rank, on any mesh of up to 64 cores."""
    base = held(model, bucket, Degrees(tp, cp, cfg), "ring")
    if 2 * tp * cp * cfg <= 64:
        assert held(model, bucket, Degrees(2 * tp, cp, cfg), "ring") <= base
        assert held(model, bucket, Degrees(tp, 2 * cp, cfg), "ring") <= base


@given(
    st.sampled_from(MODELS), BUCKETS, st.integers(1, 60), st.sampled_from([Degrees(), Degrees(4, 8, 2), Degrees(8, 4)])
)
@settings(max_examples=30, deadline=None)
def test_cost_is_monotone(model, bucket, steps, degrees):
    """More frames, pixels or steps never take less work, time or memory."""
    subject, placement = published(model), Placement(degrees, "auto")
    small = Clips(bucket, steps)
    for large in (
        replace(small, bucket=replace(bucket, num_frames=bucket.num_frames + 4)),
        replace(small, bucket=replace(bucket, width=bucket.width + 32)),
        replace(small, bucket=replace(bucket, height=bucket.height + 32)),
        replace(small, steps=steps + 1),
    ):
        assert denoise_work(subject, large) >= denoise_work(subject, small)
        low, high = (clip_seconds(subject, clips, placement, TRN2, Rates(0.33)) for clips in (small, large))
        assert high.denoise + high.exposed >= low.denoise + low.exposed
