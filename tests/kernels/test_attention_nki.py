"""The attention kernels on one rank against their references and float64."""

import pytest
import torch

from kernels.attention import attention, attention_in_full
from kernels.ring_attention_constmax import key_norm
from tests.kernels.judge import assert_close, assert_three_way
from tests.nki_standin.launch import launch

import kernels.attention_nki as twin  # isort: skip - after the launcher, which says what `import nki` finds
import kernels.ring_attention_constmax_nki as constmax  # isort: skip

SIZES = [(1, 1), (63, 129), (127, 1), (128, 128), (129, 63), (1, 4097), (515, 2049)]
LONG = [(4095, 4097), (4097, 4095)]


def truth_of(q, k, v, scale=None, k_valid=None):
    """Output [B, L, H, D] and log-sum-exp [B, H, L] in float64, a few rows at a time."""
    k, v = (t[:, :k_valid].double().transpose(1, 2) for t in (k, v))
    parts = [attention_in_full(rows, k, v, scale) for rows in q.double().transpose(1, 2).split(512, dim=2)]
    return torch.cat([p[0] for p in parts], 2).transpose(1, 2), torch.cat([p[1] for p in parts], 2)


def gaussian(B, L, S, H, D, dtype, seed=0):
    """Queries, keys and values of unit variance."""
    make = torch.Generator().manual_seed(seed)
    return [torch.randn(B, n, H, D, generator=make).to(dtype) for n in (L, S, S)]


def check_attention(q, k, v, scale=None, k_valid=None):
    """Three-way for the output; the log-sum-exp to float32 rounding of its scores."""
    out, lse = launch(twin.attention, q, k, v, scale, k_valid)
    torchs, torch_lse = attention(q, k, v, scale, k_valid)
    truth, true_lse = truth_of(q, k, v, scale, k_valid)
    assert_three_way(out, torchs, truth)
    assert lse.shape == torch_lse.shape
    assert lse.dtype == torch.float32
    assert_close(lse, true_lse, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("L", "S"), SIZES)
def test_attention_at_odd_sizes(dtype, L, S):
    """Any number of queries and keys works, around tiles, chunks and sections, with two heads and two clips."""
    check_attention(*gaussian(2 if L < 130 else 1, L, S, 2 if S < 130 else 1, 128, dtype))


@pytest.mark.parametrize(("L", "S"), LONG)
def test_attention_at_long_odd_sizes(L, S):
    """4095 and 4097 tokens, one head, bfloat16."""
    check_attention(*gaussian(1, L, S, 1, 128, torch.bfloat16))


@pytest.mark.parametrize("width", [1, 12, 64])
@pytest.mark.parametrize("k_valid", [1, 100, 128, 200])
def test_attention_masks_padding_keys(width, k_valid):
    """Keys from k_valid on take no part, whatever they hold; narrow heads work."""
    q, k, v = gaussian(1, 70, 200, 2, width, torch.float32)
    k[:, k_valid:], v[:, k_valid:] = torch.nan, torch.nan
    check_attention(q, k, v, 0.3, k_valid)


def adversarial(name, dtype):
    """Inputs that break a softmax without a true running maximum, or its rescaling."""
    q, k, v = gaussian(1, 130, 2500, 1, 128, torch.float32)
    if name == "huge":  # scores of a few thousand: exp overflows without the maximum
        q, k = q * 30, k * 30
    elif name == "late peak":  # the last key dominates: all that came before must shrink to nothing
        k[:, -1] = 40 * q.mean(1) + k[:, -1] * 20
    elif name == "early peak":  # the first key dominates: all later sections underflow against it
        k[:, 0] = k[:, 0] * 100
    elif name == "equal keys":  # a uniform softmax over very many keys
        k[:] = k[:, :1]
    elif name == "rising":  # the maximum rises in every section
        k = k * torch.linspace(0, 20, 2500).view(1, -1, 1, 1)
    elif name == "zero queries":
        q[:] = 0
    return [t.to(dtype) for t in (q, k, v)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["huge", "late peak", "early peak", "equal keys", "rising", "zero queries"])
def test_attention_on_adversarial_inputs(dtype, name):
    """Peaks early and late, huge scores, uniform and zero inputs: as close to float64 as torch is."""
    q, k, v = adversarial(name, dtype)
    out, _ = launch(twin.attention, q, k, v)
    # scores of thousands lose digits before the exponential, in torch too
    share = None if dtype != torch.float32 else 1e-3 if name == "huge" else 3e-5
    assert_three_way(out, attention(q, k, v)[0], truth_of(q, k, v)[0], share)


@pytest.mark.parametrize("cores", [1, 2])
def test_attention_on_one_core_and_on_two(cores):
    """The halves of LNC2 give the bits of a single core."""
    q, k, v = gaussian(1, 131, 300, 2, 128, torch.float32)
    one, _ = launch(twin.attention, q, k, v, cores=1)
    both, _ = launch(twin.attention, q, k, v, cores=cores)
    assert_close(both, one.double(), 1e-6)


@pytest.mark.slow
def test_attention_at_the_shape_of_480p():
    """One head of 480p after the gather at TP4 x CP8: 4,095 queries of a rank, all 32,760 keys, bfloat16."""
    check_attention(*gaussian(1, 4095, 32760, 1, 128, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("L", "S"), [*SIZES, (600, 4097)])
def test_constmax_attention_where_its_bound_holds(dtype, L, S):
    """On gaussian inputs the constant bound gives the result of the running maximum, and no row is counted."""
    q, k, v = gaussian(1, L, S, 2, 128, dtype)
    out, count = launch(constmax.ring_attention_constmax, q, k, v, key_norm(k), "", ())
    assert count.tolist() == [0]
    assert_three_way(out, attention(q, k, v)[0], truth_of(q, k, v)[0])


def test_constmax_counts_what_the_reference_counts():
    """On inputs where the bound zeroes rows, kernel and reference count the same rows, odd halves included."""
    from kernels.ring_attention_constmax import ring_attention_constmax as reference

    for L in (1, 131):
        q, k, v = gaussian(1, L, 300, 2, 128, torch.float32)
        k[:, 7] = -60.0 * q.mean(1)
        _, count = launch(constmax.ring_attention_constmax, q, k, v, key_norm(k), "", ())
        _, expected = reference(q, k, v, key_norm(k), "", ())
        assert count.tolist() == expected.tolist()
        assert count.item() > 0
