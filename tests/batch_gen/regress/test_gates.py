"""The gates alone: what each sees, and that a mean hides nothing from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from batch_gen.regress import images
from batch_gen.regress.gates import Clip, differing, judge_clip
from batch_gen.regress.mutate import black_box, brighten, drop_frame, shift_strip
from batch_gen.regress.results import Fingerprint, worst
from batch_gen.regress.suite import Limits
from models.pocket.draw import draw, sample_scene
from models.pocket.grammar import Caption

FINGERPRINT = Fingerprint(
    checkpoint="weights",
    settings={"dtype": "float32"},
    numerics={"mesh": "tp=1", "attention": "", "threads": 1},
    numerics_key="key",
    versions={},
)
RED_CIRCLE = Caption("red", "circle", "moving right", "gray")


def clip_of(frames, latents=None, prompt=RED_CIRCLE.prompt):
    """A clip of these pixels."""
    return Clip(prompt, frames, latents, FINGERPRINT)


@pytest.fixture(scope="module")
def drawn():
    """A drawn clip of pocket's grammar, uint8 [17, 128, 128, 3]."""
    return draw_clip(RED_CIRCLE)


def draw_clip(caption):
    """Frames of a caption with fixed chance."""
    return np.rint(draw(sample_scene(caption, np.random.default_rng(7))) * 255).astype(np.uint8)


def verdicts(new, base, **limits):
    """Verdict of each gate."""
    judged = judge_clip(clip_of(new), clip_of(base), Limits(**limits))
    return {gate.gate: gate.verdict for gate in judged.gates}


def failing(new, base, **limits):
    """Names of the red gates, without the exact one."""
    found = verdicts(new, base, **limits)
    return {name for name, verdict in found.items() if verdict == "fail"} - {"frames_hash"}


def test_equal_clips_pass_every_gate(drawn):
    """No gate is red without a cause."""
    assert set(verdicts(drawn, drawn).values()) == {"pass"}


def test_a_black_box_in_one_frame_shows_in_the_worst_frame(drawn):
    """The mean over the clip stays above the limit; the minimum names the frame."""
    changed = black_box(drawn)
    judged = judge_clip(clip_of(changed), clip_of(drawn), Limits())
    gate = next(gate for gate in judged.gates if gate.gate == "psnr_min")
    assert (gate.verdict, gate.frame, judged.first_bad_frame) == ("fail", 8, 8)
    assert np.mean(judged.curves.psnr) > 90


def test_one_percent_of_brightness_is_seen_by_the_drift_alone(drawn):
    """Every frame passes PSNR and SSIM; luma and colour drift do not."""
    found = failing(brighten(drawn), drawn)
    assert {"drift_luma", "drift_red"} <= found
    assert not found & {"psnr_min", "ssim_min"}


def test_a_tint_is_seen_in_its_channel(drawn):
    """One level more blue is red for blue, green for red."""
    changed = drawn.copy()
    changed[..., 2] = np.minimum(changed[..., 2], 254) + 1
    found = failing(changed, drawn)
    assert "drift_blue" in found
    assert not found & {"drift_red", "drift_green", "psnr_min"}


def test_a_dropped_frame_is_seen_by_the_count(drawn):
    """Whatever its timestamps say; and nothing is paired by time."""
    assert failing(drop_frame(drawn), drawn) == {"frame_count"}


def test_a_strip_one_row_off_makes_bad_frames(drawn):
    """Most of the picture is right, so the share of bad frames is what tells."""
    assert "bad_frames" in failing(shift_strip(drawn), drawn)


def test_black_and_frozen_frames_are_counted_against_the_baseline(drawn):
    """Frames that turned black or stopped are red, those that always were are not."""
    black = drawn.copy()
    black[4] = 0
    frozen = drawn.copy()
    frozen[6] = frozen[5]
    assert "black" in failing(black, drawn)
    assert "frozen" in failing(frozen, drawn)
    assert verdicts(frozen, frozen)["frozen"] == verdicts(black, black)["black"] == "pass"


def test_flicker_is_seen_where_no_frame_is_bad(drawn):
    """Every second frame one level brighter: each frame is close, the sequence is not."""
    changed = drawn.copy()
    changed[::2] += 1
    assert "flicker" in failing(changed, drawn)
    assert "psnr_min" not in failing(changed, drawn)


def test_a_clip_that_stopped_following_its_prompt_is_red():
    """A blue square where a red circle was asked for, and shown, is named by its slots."""
    base, new = draw_clip(RED_CIRCLE), draw_clip(Caption("blue", "square", "moving right", "gray"))
    gate = judge_clip(clip_of(new), clip_of(base), Limits()).gates[-1]
    assert (gate.gate, gate.verdict, gate.value) == ("prompt_following", "fail", 2.0)
    assert gate.note == "no longer shown: color, shape"


def test_prompts_outside_the_grammar_are_not_judged(drawn):
    """Who writes free prompts has no detector, and no gate that pretends."""
    judged = judge_clip(clip_of(drawn, prompt="a fox"), clip_of(drawn, prompt="a fox"), Limits())
    assert "prompt_following" not in {gate.gate for gate in judged.gates}


def test_latents_are_held_against_noise_and_the_yardstick(drawn):
    """Cosine and relative error have limits of their own; with a bfloat16 yardstick, so has their ratio."""
    chance = np.random.default_rng(1)
    base = chance.standard_normal((4, 3, 8, 8)).astype(np.float32)
    near = base + 0.01 * chance.standard_normal(base.shape).astype(np.float32)

    def red(latents, **limits):
        judged = judge_clip(clip_of(drawn, latents), clip_of(drawn, base), Limits(**limits))
        return {gate.gate for gate in judged.gates if gate.verdict == "fail"}

    assert red(near) == set()
    assert red(near, bf16_error=0.001) == {"latents_ratio"}
    assert red(near, bf16_error=0.01) == set()
    assert red(base + 0.1) == {"latents_cosine", "latents_error"}


def test_the_exact_gate_is_asked_only_of_equal_numerics():
    """The note names what differs, the mesh first, and consequences of the mesh are not listed."""
    new = FINGERPRINT.model_copy(update={"numerics": {"mesh": "tp=2", "attention": "auto", "threads": 2}})
    assert differing(new, FINGERPRINT) == ["mesh", "threads"]
    other = FINGERPRINT.model_copy(update={"checkpoint": "more weights", "settings": {"dtype": "bfloat16"}})
    assert differing(other, FINGERPRINT) == ["checkpoint", "dtype"]
    younger = FINGERPRINT.model_copy(update={"settings": {"dtype": "float32", "sharpness": 1}})
    assert differing(younger, FINGERPRINT) == []
    frames = np.zeros((5, 16, 16, 3), np.uint8)
    exact = judge_clip(replace(clip_of(frames), fingerprint=other), clip_of(frames), Limits()).gates[1]
    assert (exact.verdict, exact.note) == ("not_comparable", "not comparable: checkpoint, dtype")


def test_hardware_with_noise_turns_the_exact_gate_off(drawn):
    """`exact: false` is said in the answer, and is no pass."""
    assert verdicts(drawn, drawn, exact=False)["frames_hash"] == "not_comparable"


def test_frames_of_another_size_are_not_paired(drawn):
    """A clip of another size is compared in nothing, and the answer says why."""
    judged = judge_clip(clip_of(drawn[:, :64]), clip_of(drawn), Limits())
    notes = {gate.note for gate in judged.gates if gate.verdict == "not_comparable"}
    assert notes == {"not comparable: frame size"}


def test_psnr_and_ssim_agree_with_their_definitions():
    """A difference of one level everywhere is 48.13 dB; equal frames are 100 dB and 1."""
    base = np.full((1, 16, 16, 3), 100, np.uint8)
    compared = images.compare(base + 1, base)
    assert compared.psnr[0] == pytest.approx(20 * np.log10(255), abs=1e-6)
    assert images.compare(base, base).ssim[0] == 1.0
    assert images.compare(base, base).psnr[0] == images.PSNR_EQUAL


def test_vmaf_is_measured_where_ffmpeg_has_it(drawn):
    """With a limit for it, VMAF is a gate like the others; without libvmaf it says that it cannot answer."""
    small = drawn[:3]
    answer = verdicts(small, small, vmaf=90.0)["vmaf"]
    assert answer == ("pass" if images.has_vmaf() else "not_comparable")


def test_the_most_earnest_verdict_is_the_cases():
    """Red before infra before new; what cannot be compared spoils nothing that passed."""
    assert worst(["pass", "new", "fail", "infra"]) == "fail"
    assert worst(["pass", "not_comparable"]) == "pass"
    assert worst(["not_comparable"]) == "not_comparable"
    assert worst(["pass", "quarantined"]) == "quarantined"
