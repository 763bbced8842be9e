import numpy as np
import pytest

from models.pocket import draw, grammar


def test_held_out_combinations_are_never_trained_on():
    """Training and the 60 held-out combinations share nothing and together are the whole grammar."""
    held, trained = set(grammar.held_out()), set(grammar.training())
    assert len(held) == 60
    assert not held & trained
    assert held | trained == set(grammar.captions())


def test_every_word_is_trained():
    """Each single word of the grammar occurs in training; only combinations are held out."""
    words = {word for caption in grammar.captions() for word in caption.prompt.split()}
    assert words == {word for caption in grammar.training() for word in caption.prompt.split()}


def test_prompts_parse_back():
    """A prompt of the grammar gives its caption back; other text is refused."""
    for caption in grammar.captions():
        assert grammar.parse(caption.prompt) == caption
    with pytest.raises(ValueError, match="pocket grammar"):
        grammar.parse("a fox in the snow")


def test_shapes_stay_inside_the_frame():
    """No drawn shape crosses the border (only its soft edge may reach it), so its outline can be read."""
    rng = np.random.default_rng(3)
    for caption in grammar.captions()[::5]:
        clip = draw.draw(draw.sample_scene(caption, rng))
        border = np.concatenate([clip[:, 0], clip[:, -1], clip[:, :, 0], clip[:, :, -1]], axis=1)
        inked = np.abs(border - np.median(border, axis=(0, 1))).max(axis=-1) > 0.1
        assert inked.mean() < 0.005
