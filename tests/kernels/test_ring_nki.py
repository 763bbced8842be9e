"""The ring kernels over simulated ranks: what each rank gets is attention to the keys of all."""

import pytest
import torch

from kernels.attention import attention
from kernels.ring_attention_constmax import key_norm
from tests.kernels.judge import assert_close, assert_three_way
from tests.kernels.test_attention_nki import gaussian, truth_of
from tests.nki_standin.launch import launch_ranks

import kernels.ring_attention_constmax_nki as constmax  # isort: skip - after the launcher
import kernels.ring_attention_nki as twin  # isort: skip
import nki  # isort: skip

pytestmark = pytest.mark.usefixtures("standin")


def ring_of(ranks):
    """(source, target) pairs of a ring through the ranks in this order, flattened."""
    return tuple(r for pair in zip(ranks, (*ranks[1:], ranks[0]), strict=True) for r in pair)


def arguments(qkv, num_ranks, padding, extra=(), depth=2):
    """Each rank's slice of the tokens; the last rank's last keys are padding."""
    q, k, v = qkv
    rows = k.shape[1] // num_ranks
    pairs = ring_of(range(num_ranks)) if num_ranks > 1 else ()
    for rank in range(num_ranks):
        part = slice(rank * rows, (rank + 1) * rows)
        valid = rows - padding if rank == num_ranks - 1 else rows
        count = torch.tensor([valid], dtype=torch.int32) if padding else None
        yield (q[:, part], k[:, part], v[:, part], *extra, "cp", pairs, None, count, depth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("rows", "padding"), [(1, 0), (63, 5), (129, 0), (128, 127)])
def test_a_ring_sees_all_keys(dtype, num_ranks, rows, padding):
    """Rings of 1 to 8 ranks agree with float64 over all keys, padding in the last block left out."""
    q, k, v = qkv = gaussian(1, rows * num_ranks, rows * num_ranks, 1, 128, dtype)
    results = launch_ranks(twin.ring_attention, list(arguments(qkv, num_ranks, padding)))
    out, lse = (torch.cat([r[i] for r in results], dim=i + 1) for i in (0, 1))
    truth, true_lse = truth_of(q, k, v, None, q.shape[1] - padding)
    assert_three_way(out, attention(q, k, v, None, q.shape[1] - padding)[0], truth)
    assert_close(lse, true_lse, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(("rows", "padding"), [(63, 5), (129, 0)])
def test_a_constmax_ring_sees_all_keys(dtype, num_ranks, rows, padding):
    """With the bound over the whole ring, plain addition of the blocks gives the same, and no row is counted."""
    q, k, v = qkv = gaussian(1, rows * num_ranks, rows * num_ranks, 2, 128, dtype)
    valid = q.shape[1] - padding
    extra = (key_norm(k[:, :valid]),)
    results = launch_ranks(constmax.ring_attention_constmax, list(arguments(qkv, num_ranks, padding, extra)))
    assert [count.item() for _, count in results] == [0] * num_ranks
    out = torch.cat([r for r, _ in results], dim=1)
    assert_three_way(out, attention(q, k, v, None, valid)[0], truth_of(q, k, v, None, valid)[0])


@pytest.mark.parametrize("depth", [1, 2, 3, 9])
@pytest.mark.parametrize("reverse", [False, True])
def test_prefetching_changes_no_bit(depth, reverse):
    """Any prefetch depth, and either order of the cores' turns, gives the same bits: no buffer is overwritten too early."""
    qkv = gaussian(1, 5 * 20, 5 * 20, 1, 32, torch.float32)
    base = launch_ranks(twin.ring_attention, list(arguments(qkv, 5, 3, depth=1)))
    ours = launch_ranks(twin.ring_attention, list(arguments(qkv, 5, 3, depth=depth)), reverse=reverse)
    for (a, b), (c, d) in zip(base, ours, strict=True):
        assert torch.equal(a, c)
        assert torch.equal(b, d)


def test_a_ring_may_pass_its_ranks_in_any_order():
    """Neighbours are what the pairs say, not what the ranks' numbers say; two rings of one world stay apart."""
    rows, width = 20, 32
    q, k, v = gaussian(1, 6 * rows, 6 * rows, 1, width, torch.float32)
    rings = [(0, 4, 2), (5, 1, 3)]
    pairs = ring_of(rings[0]) + ring_of(rings[1])
    parts = [slice(r * rows, (r + 1) * rows) for r in range(6)]
    results = launch_ranks(
        twin.ring_attention, [(q[:, p], k[:, p], v[:, p], "cp", pairs, None, None, 2) for p in parts]
    )
    for ring in rings:
        keys, values = (torch.cat([t[:, parts[r]] for r in ring], 1) for t in (k, v))
        for rank in ring:
            assert_close(results[rank][0], truth_of(q[:, parts[rank]], keys, values)[0])


def test_a_block_of_padding_alone_changes_nothing():
    """A rank without one valid key still gets the attention of the others' keys, and gives nothing to theirs."""
    q, k, v = gaussian(1, 2 * 40, 2 * 40, 1, 64, torch.float32)
    args = list(arguments((q, k, v), 2, 40))
    results = launch_ranks(twin.ring_attention, args)
    assert_close(torch.cat([r for r, _ in results], 1), truth_of(q, k, v, None, 40)[0])


def test_blocks_travel_once_per_step():
    """A ring of n sends each rank's keys and values n - 1 times and nothing else: no gather in disguise."""
    rows, n = 40, 4
    qkv = gaussian(1, n * rows, n * rows, 2, 32, torch.bfloat16)
    launch_ranks(twin.ring_attention, list(arguments(qkv, n, 0)))
    block_bytes = 2 * rows * 2 * 32 * 2
    assert nki.last_report.work["permute_bytes"] == n * (n - 1) * block_bytes


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["true maximum", "constant bound"])
def test_the_ring_of_480p(kernel):
    """One head of 480p at TP4 x CP8: eight ranks of 4,095 tokens each, bfloat16."""
    q, k, v = qkv = gaussian(1, 8 * 4095, 8 * 4095, 1, 128, torch.bfloat16)
    if kernel == "true maximum":
        results = launch_ranks(twin.ring_attention, list(arguments(qkv, 8, 0)))
    else:
        results = launch_ranks(constmax.ring_attention_constmax, list(arguments(qkv, 8, 0, (key_norm(k),))))
    rows = slice(3 * 4095, 3 * 4095 + 700)
    ours = torch.cat([r for r, _ in results], 1)[:, rows]
    assert_three_way(ours, attention(q[:, rows], k, v)[0], truth_of(q[:, rows], k, v)[0])
