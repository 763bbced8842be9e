"""In bfloat16 the pipeline is as close to the float32 reference as diffusers' own bfloat16 is."""

from tests.parity.bfloat16 import FACTOR, three_way
from tests.parity.reference import sampling


def test_bfloat16_is_as_good_as_diffusers(ours, tiny_variant, traces):
    """Three ways at each named step: our bfloat16 error is at most 1.25 times diffusers' bfloat16 error."""
    clip = sampling()
    errors = three_way(tiny_variant("head128"), ours("head128", dtype="bfloat16"), clip, traces("head128", clip)[0])
    assert len(errors) == 4
    assert {name: pair for name, pair in errors.items() if pair[0] > FACTOR * pair[1]} == {}
    assert max(theirs for _, theirs in errors.values()) < 0.1
