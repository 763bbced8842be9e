"""Self-attention over tokens that are spread over ranks, on inputs meant to break it."""

import pytest
import torch

from models.errors import ModelError
from models.parallel.context import TokenSplit, attention_kind, choose
from models.parallel.layout import GATHER_LIMIT_BYTES, Degrees
from models.parallel.mesh import Axis
from tests.parallel import cases

pytestmark = pytest.mark.mesh
LARGE = 40.0  # times larger queries and keys, as trained gains make them at late low-noise steps


@pytest.mark.parametrize("kind", ["ring", "gather"])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 61, 96])
def test_any_number_of_tokens(pool, kind, num_tokens):
    """Spread attention equals float64 softmax for counts that divide by nothing, fewer tokens than ranks among them."""
    expected, expected_lse = cases.exact_attention(*cases.attention_inputs(num_tokens, 1.0))
    for degrees in (Degrees(cp=4), Degrees(cp=3, tp=2)):
        for out, lse in pool.run(cases.spread_attention, degrees, kind, num_tokens, 1.0, torch.float32):
            assert (out - expected).norm() <= 1e-6 * expected.norm()
            assert torch.allclose(lse.double(), expected_lse, atol=1e-5)


@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_dominant_key(pool, kind):
    """With large queries and keys and one dominant key the result keeps float32 accuracy and has no zero row."""
    inputs = cases.attention_inputs(61, LARGE)
    expected, _ = cases.exact_attention(*inputs)
    for out, _ in pool.run(cases.spread_attention, Degrees(cp=4), kind, 61, LARGE, torch.float32):
        assert (out - expected).norm() <= 1e-5 * expected.norm()
        assert out.abs().amax(-1).min() > 0


def test_constant_bound_gives_zero_rows():
    """The counter-example: on the same inputs a bound by norms alone underflows and returns rows of zeros."""
    inputs = cases.attention_inputs(61, LARGE)
    expected, _ = cases.exact_attention(*inputs)
    out = cases.constant_bound_attention(*inputs)
    assert (out.abs().amax(-1) == 0).float().mean() > 0.1
    assert (out - expected).norm() > 0.1 * expected.norm()
    mild = cases.attention_inputs(61, 1.0)
    assert torch.allclose(cases.constant_bound_attention(*mild).double(), cases.exact_attention(*mild)[0], atol=1e-5)


def test_lower_precision_is_no_worse_than_one_process(pool):
    """In bfloat16 the ring is at most 1.5 times as far from float64 as attention in one process is.

    Each block's result is rounded once before the merge, where one process rounds once in all.
    """
    inputs = cases.attention_inputs(61, 2.0, torch.bfloat16)
    expected, _ = cases.exact_attention(*inputs)
    [(alone, _)] = pool.run(cases.spread_attention, Degrees(), "gather", 61, 2.0, torch.bfloat16)
    for kind in ("ring", "gather"):
        out, _ = pool.run(cases.spread_attention, Degrees(cp=4), kind, 61, 2.0, torch.bfloat16)[0]
        assert (out - expected).norm() <= 1.5 * (alone - expected).norm()


def test_auto_is_a_rule_of_bytes():
    """`auto` gathers small keys and values and rings large ones; another word is refused with the choices."""
    assert (choose(GATHER_LIMIT_BYTES), choose(GATHER_LIMIT_BYTES + 1)) == ("gather", "ring")
    assert [attention_kind(name) for name in ("ring", "gather", "auto")] == ["ring", "gather", None]
    with pytest.raises(ModelError, match="attention 'flash' is unknown; choose one of ring, gather, auto"):
        attention_kind("flash")


@pytest.mark.parametrize(("num_tokens", "parts"), [(1, 1), (8, 1), (9, 1), (61, 2), (3, 4)])
def test_every_token_has_one_owner(num_tokens, parts):
    """Over all ranks each token is valid exactly once, rows are equally many and divide by the sequence axis."""
    owned, rows = [], set()
    for index in range(4):
        sequence = Axis("tp", ranks=tuple(range(parts)), group_name="t") if parts > 1 else None
        split = TokenSplit(Axis("cp", index=index, ranks=(0, 1, 2, 3), group_name="c"), sequence)
        valid = split.valid_tokens(num_tokens)
        local = split.local_tokens(num_tokens)
        count = local if valid is None else int(valid)
        owned += split._rows(num_tokens).tolist()[:count]
        rows.add(local)
    assert owned == list(range(num_tokens))
    assert len(rows) == 1
    assert rows.pop() % parts == 0
