import numpy as np

from models.pocket import draw, grammar, judge


def test_detectors_read_drawn_clips():
    """On drawn clips of all 504 captions the detectors are right at least 99 times in 100, slot by slot."""
    rng = np.random.default_rng(5)
    right = {"color": 0, "shape": 0, "motion": 0, "background": 0}
    captions = grammar.captions()
    for caption in captions:
        clip = (draw.draw(draw.sample_scene(caption, rng)) * 255).round().astype(np.uint8)
        for slot, agrees in judge.judge(clip).agrees(caption).items():
            right[slot] += agrees
    assert min(right.values()) >= 0.99 * len(captions)


def test_an_empty_clip_shows_nothing():
    """A clip without a shape is judged `none`, never by chance something."""
    verdict = judge.judge(np.full((17, 128, 128, 3), 104, np.uint8))
    assert (verdict.color, verdict.shape, verdict.motion, verdict.background) == ("none", "none", "none", "gray")


def test_noise_shows_nothing():
    """Pure noise is judged `none`."""
    noise = np.random.default_rng(0).integers(0, 256, (17, 128, 128, 3), dtype=np.uint8)
    assert judge.judge(noise).motion == "none"
