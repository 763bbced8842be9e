"""The torch references: they compute what their contracts say, and join torch as good operators do."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from kernels.adaln import adaln, adaln_fp8
from kernels.attention import attention, attention_in_full
from kernels.conv3d import channel_norm, conv3d
from kernels.fp8_matmul import FP8_MAX_OCP, FP8_MAX_TRN2, fp8_matmul, quantize_rows, quantize_weight
from kernels.qk_norm_rope import head_norm, qk_norm_rope, sum_square, sum_squares
from kernels.ring_attention import merged, neighbours, ring_attention, ring_size
from kernels.ring_attention_constmax import key_norm, ring_attention_constmax
from tests.kernels.judge import assert_close, assert_three_way

OPS = torch.ops.batch_gen
FLOATS = [torch.float32, torch.bfloat16]


def randn(*shape, dtype=torch.float32, seed=0):
    """Gaussian numbers, the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def op_calls(dtype):
    """Every operator with arguments that cover its branches."""
    q, k = randn(2, 17, 3, 8, dtype=dtype), randn(2, 9, 3, 8, dtype=dtype, seed=1)
    x, w, g = randn(2, 17, 24, dtype=dtype), randn(24, dtype=dtype), randn(2, 1, 24)
    cos, sin = randn(17, 4), randn(17, 4, seed=1)
    video, kernel = randn(1, 4, 3, 6, 5, dtype=dtype), randn(2, 4, 3, 3, 3, dtype=dtype)
    norm = randn(2, 3).abs()
    return [
        (OPS.attention, (q, k, k, None, None)),
        (OPS.attention, (q, k, k, 0.3, 5)),
        (OPS.attention, (q, k, k[..., :4], None, None)),
        (OPS.adaln, (x, x + 1, g, g, g, None, None, 1e-6)),
        (OPS.adaln, (x, x + 1, None, g[:1], g[:1], w, w, 1e-6)),
        (OPS.adaln, (x, x + 1, g, None, None, w, w, 1e-6)),
        (OPS.adaln_norm, (x, g, g, w, w, 1e-6)),
        (OPS.adaln_norm, (x, None, None, None, None, 1e-6)),
        (OPS.qk_norm_rope, (q, q + 1, w, w, cos, sin, 1e-6, None)),
        (OPS.qk_norm_rope, (q, q + 1, w, w, cos, sin, 1e-6, torch.ones(2, 2, 17))),
        (OPS.head_norm, (q, w, 1e-6, None)),
        (OPS.conv3d, (video, kernel, None, [1, 1], None, False, [1, 1, 1], None)),
        (OPS.conv3d, (video, kernel, w[:2].clone(), [1, 1], w[:4].clone(), True, [1, 2, 2], video[:, :, :2].clone())),
        (OPS.ring_attention, (k, k, k, "", [], None, None, 1)),
        (OPS.ring_attention, (k, k, k, "", [], None, torch.tensor([4], dtype=torch.int32), 1)),
        (OPS.ring_attention_constmax, (k, k, k, norm, "", [], None, None, 1)),
    ]


@pytest.mark.parametrize("dtype", FLOATS)
def test_operators_keep_the_rules_of_torch(dtype):
    """Schema, fake and reference agree for every operator: no mutation, no alias, the right shapes, dtypes, strides."""
    for op, args in op_calls(dtype):
        results = opcheck(op.default, args, test_utils=["test_schema", "test_faketensor", "test_autograd_registration"])
        assert set(results.values()) == {"SUCCESS"}, (op, results)


def test_the_fp8_operator_keeps_the_rules_of_torch():
    """fp8_matmul's fake agrees with its reference (torch cannot compare FP8 arguments, so its schema test is left out)."""
    x = randn(5, 24)
    args = (x, *quantize_weight(randn(7, 24)), None, FP8_MAX_TRN2, None)
    results = opcheck(OPS.fp8_matmul.default, args, test_utils=["test_faketensor", "test_autograd_registration"])
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("L", "S", "k_valid"), [(1, 1, None), (63, 129, None), (128, 127, 64), (130, 257, 1)])
def test_attention_and_its_log_sum_exp(dtype, L, S, k_valid):
    """Attention agrees with the formula in float64, and the log-sum-exp with the scores'."""
    q, k, v = (
        randn(2, L, 3, 32, dtype=dtype),
        randn(2, S, 3, 32, dtype=dtype, seed=1),
        randn(2, S, 3, 32, dtype=dtype, seed=2),
    )
    out, lse = attention(q, k, v, None, k_valid)
    truth, true_lse = attention_in_full(
        *(t.double().transpose(1, 2) for t in (q, k[:, :k_valid], v[:, :k_valid])), None
    )
    assert_close(out, truth.transpose(1, 2), 1e-12 if dtype == torch.float64 else None)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(lse, true_lse, 1e-4)


def diffusers_norm(x, scale, shift):
    """FP32LayerNorm and modulation as diffusers writes them."""
    normal = functional.layer_norm(x.float(), (x.shape[-1],), None, None, 1e-6)
    return (normal * (1 + scale) + shift).type_as(x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1, 24), (2, 1, 24), (2, 17, 24)])
def test_adaln_is_what_diffusers_computes(dtype, shape):
    """Residual, gate, norm and modulation agree with diffusers' expressions, per clip and per token."""
    x, residual = randn(2, 17, 24, dtype=dtype), randn(2, 17, 24, dtype=dtype, seed=1)
    gate, scale, shift = (randn(*shape, seed=s) for s in (2, 3, 4))
    r, y = adaln(x, residual, gate, scale, shift)
    expected = (residual.float() + x.float() * gate).type_as(x)
    torch.testing.assert_close(r, expected, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=1e-6)
    assert_three_way(y, diffusers_norm(r, scale, shift), diffusers_norm(r.double(), scale.double(), shift.double()))


def test_adaln_without_a_residual_returns_the_stream_itself():
    """The first norm of a model copies nothing: r is the argument."""
    x = randn(1, 5, 24)
    r, y = adaln(x, None, None, randn(1, 1, 24), randn(1, 1, 24))
    assert r is x
    assert y.data_ptr() != x.data_ptr()


def test_adaln_with_an_affine_norm_and_modulation():
    """Weight and bias of the norm apply before the modulation."""
    x, w, b, scale, shift = (
        randn(2, 5, 24),
        randn(24, seed=1),
        randn(24, seed=2),
        randn(1, 1, 24, seed=3),
        randn(24, seed=4),
    )
    _, y = adaln(x, None, None, scale, shift, w, b)
    truth = (
        functional.layer_norm(x.double(), (24,), w.double(), b.double(), 1e-6) * (1 + scale.double()) + shift.double()
    )
    assert_close(y, truth)


def test_adaln_fp8_is_adaln_and_then_quantisation():
    """The fused operator gives the residual, and FP8 rows that stand for adaln's result."""
    x, g = randn(2, 5, 24), randn(2, 1, 24, seed=1)
    r, q, scale = adaln_fp8(x, x + 1, g, g, g)
    expected_r, y = adaln(x, x + 1, g, g, g)
    assert torch.equal(r, expected_r)
    assert_close(q.float() * scale.unsqueeze(-1), y.double(), 0.04)


def wan_rope(x_BLHD, cos, sin):
    """Rotation of neighbouring pairs, as Wan's checkpoints have it."""
    a, b = x_BLHD[..., 0::2], x_BLHD[..., 1::2]
    turned = torch.stack((a * cos[:, None] - b * sin[:, None], a * sin[:, None] + b * cos[:, None]), -1)
    return turned.flatten(-2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_half_layout_changes_no_score(dtype):
    """With channels and gains permuted to halves, the scores equal those of norm and rotation in Wan's layout."""
    H, D = 3, 8
    q, k = randn(2, 9, H, D, dtype=dtype), randn(2, 9, H, D, dtype=dtype, seed=1)
    wq, wk, angle = randn(H, D, seed=2), randn(H, D, seed=3), randn(9, D // 2, seed=4)
    halves = torch.cat((torch.arange(0, D, 2), torch.arange(1, D, 2)))
    normal = [
        functional.rms_norm(x.double().flatten(2), (H * D,), w.double().flatten(), 1e-6) for x, w in ((q, wq), (k, wk))
    ]
    wan = [wan_rope(n.view(2, 9, H, D), angle.double().cos(), angle.double().sin()) for n in normal]
    ours = qk_norm_rope(
        q[..., halves], k[..., halves], wq[:, halves].flatten(), wk[:, halves].flatten(), angle.cos(), angle.sin()
    )
    score = [torch.einsum("blhd,bmhd->bhlm", a.double(), b.double()) for a, b in (ours, wan)]
    assert_close(score[0].to(dtype), score[1], 1e-5 if dtype == torch.float32 else None)


def test_partial_sums_of_squares_make_the_whole_norm():
    """Heads of two ranks, with their sums of squares added, give what one rank with all heads gives."""
    q, k, w = randn(2, 5, 4, 8), randn(2, 5, 4, 8, seed=1), randn(4, 8, seed=2)
    cos, sin = randn(5, 4), randn(5, 4, seed=1)
    whole = qk_norm_rope(q, k, w.flatten(), w.flatten(), cos, sin)
    parts = [(q[:, :, :2], k[:, :, :2], w[:2]), (q[:, :, 2:], k[:, :, 2:], w[2:])]
    means = sum(sum_squares(a, b) for a, b, _ in parts) / 32
    ours = [qk_norm_rope(a, b, g.flatten(), g.flatten(), cos, sin, 1e-6, means) for a, b, g in parts]
    for index in range(2):
        assert_close(torch.cat([part[index] for part in ours], 2), whole[index].double())
    normed = head_norm(q[:, :, :2], w[:2].flatten(), 1e-6, sum_square(q) / 32)
    assert_close(normed, head_norm(q, w.flatten())[:, :, :2].double())


@pytest.mark.parametrize("stride", [(1, 1, 1), (2, 1, 1), (1, 2, 2)])
def test_conv3d_norms_and_activates_its_input(stride):
    """Context, channel norm, SiLU and convolution in one call equal the four steps; zero frames stay zero."""
    x, context, w, gamma = (
        randn(1, 4, 3, 6, 5),
        randn(1, 4, 2, 6, 5, seed=1),
        randn(2, 4, 3, 3, 3, seed=2),
        randn(4, seed=3),
    )
    context[:, :, 0] = 0
    joined = torch.cat((context, x), 2).double()
    normal = functional.normalize(joined, dim=1) * 2 * gamma.double().view(1, -1, 1, 1, 1)
    truth = functional.conv3d(functional.silu(normal), w.double(), None, stride, (0, 1, 1))
    assert_close(conv3d(x, w, None, (1, 1), gamma, True, stride, context), truth)
    assert channel_norm(context, gamma, True)[:, :, 0].abs().max() == 0


@pytest.mark.parametrize("fp8_max", [FP8_MAX_TRN2, FP8_MAX_OCP])
def test_fp8_rows_use_the_whole_range(fp8_max):
    """Every row's largest value lands on the format's largest, rows of zeros are safe, and the error is a few percent."""
    x = randn(6, 40) * torch.tensor([1e-6, 1e-3, 1, 1e3, 1e6, 0]).view(-1, 1)
    q, scale = quantize_rows(x, fp8_max)
    assert (q[1:5].float().abs().amax(1) == fp8_max).all()
    back = q.float() * scale.unsqueeze(1)
    assert torch.isfinite(back).all()
    for row in range(1, 5):
        assert_close(back[row], x[row].double(), 0.04)


def test_fp8_linear_layer_is_close_to_the_plain_one():
    """An FP8 linear layer errs by a few percent of the largest output; quantising beforehand changes nothing."""
    x, w, b = randn(33, 300, dtype=torch.bfloat16), randn(70, 300, seed=1), randn(70, seed=2)
    weight, scale = quantize_weight(w)
    ours = fp8_matmul(x, weight, scale, b)
    assert_close(ours, functional.linear(x.double(), w.double(), b.double()), 0.05)
    assert torch.equal(ours, fp8_matmul(*([q := quantize_rows(x, 240.0)][0][:1]), weight, scale, b, 240.0, q[1]))


def test_parts_of_the_keys_merge_by_log_sum_exp():
    """Attention over three disjoint blocks, merged, is attention over all keys."""
    q, k, v = randn(2, 7, 3, 16), randn(2, 30, 3, 16, seed=1), randn(2, 30, 3, 16, seed=2)
    whole, lse = attention(q, k, v)
    out, merged_lse = merged(attention(q, k[:, s], v[:, s]) for s in (slice(0, 4), slice(4, 5), slice(5, 30)))
    assert_close(out, whole.double())
    assert_close(merged_lse, lse.double())


def test_rings_are_read_off_their_pairs():
    """Ring size and neighbours follow from (source, target) pairs in any order of ranks, and open rings are refused."""
    pairs = (0, 3, 3, 1, 1, 0, 4, 5, 5, 6, 6, 4)
    assert ring_size(pairs) == 3
    assert neighbours(pairs, 3) == (1, 0)
    assert ring_size(()) == 1
    with pytest.raises(ValueError, match="does not close"):
        ring_size((0, 1, 1, 2))
    with pytest.raises(ValueError, match="in no ring"):
        neighbours(pairs, 2)


def test_constmax_counts_the_rows_that_underflow():
    """With an honest bound nothing is counted; with one key of huge norm that no query likes, the other rows are."""
    q, k, v = randn(1, 9, 2, 32), randn(1, 50, 2, 32, seed=1), randn(1, 50, 2, 32, seed=2)
    out, count = ring_attention_constmax(q, k, v, key_norm(k), "", ())
    assert count.item() == 0
    assert_close(out, attention(q, k, v)[0].double())
    k[:, 7] = -100.0 * q.mean(1)
    _, count = ring_attention_constmax(q, k, v, key_norm(k), "", ())
    assert count.item() > 0
    assert_close(ring_attention(q, k, v, "", ())[0], attention(q, k, v)[0].double())


@pytest.mark.parametrize("dtype", FLOATS)
def test_flop_formulas_count_what_torch_counts(dtype):
    """Each operator's formula gives what torch's counter sees inside of its reference."""
    q, k = randn(2, 17, 3, 8, dtype=dtype), randn(2, 9, 3, 8, dtype=dtype)
    video, kernel = randn(1, 4, 3, 6, 5, dtype=dtype), randn(2, 4, 3, 3, 3, dtype=dtype)
    x, (w, s) = randn(5, 300, dtype=dtype), quantize_weight(randn(7, 300))
    pairs = [
        (lambda: attention(q, k, k), lambda: attention_in_full(*(t.transpose(1, 2) for t in (q, k, k)), None)),
        (lambda: ring_attention(q, k, k, "", ()), lambda: attention_in_full(*(t.transpose(1, 2) for t in (q, k, k)), None)),
        (lambda: ring_attention_constmax(q, k, k, key_norm(k), "", ()), lambda: attention_in_full(*(t.transpose(1, 2) for t in (q, k, k)), None)),
        (lambda: conv3d(video, kernel, None, (1, 1)), lambda: functional.conv3d(video, kernel, None, 1, (0, 1, 1))),
        (lambda: conv3d(video, kernel, None, (1, 1), None, False, (1, 2, 2)), lambda: functional.conv3d(video, kernel, None, (1, 2, 2), (0, 1, 1))),
        (lambda: fp8_matmul(x, w, s), lambda: x @ w.to(dtype)),
        (lambda: head_norm(q, randn(24)), lambda: functional.rms_norm(q.flatten(2), (24,))),
        (lambda: adaln(q.flatten(2), None, None, None, None), lambda: functional.layer_norm(q.flatten(2), (24,))),
        (lambda: adaln(q.flatten(2), q.flatten(2), None, None, None), lambda: functional.layer_norm(q.flatten(2) + q.flatten(2), (24,))),
        (lambda: qk_norm_rope(q, q, randn(24), randn(24), randn(17, 4), randn(17, 4)), lambda: functional.rms_norm(q.flatten(2), (24,)) * randn(24)),
    ]  # fmt: skip
    for ours, torchs in pairs:
        counts = []
        for call in (ours, torchs):
            with FlopCounterMode(display=False) as counter:
                call()
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1]


def test_every_operator_has_a_formula():
    """Torch's counter knows a formula for each operator of ours; without one it would count nothing."""
    names = {
        schema.name.partition("::")[2]
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("batch_gen::")
    }
    assert {"attention", "conv3d", "fp8_matmul", "ring_attention", "qk_norm_rope"} <= names
    assert [name for name in sorted(names) if getattr(torch.ops.batch_gen, name) not in flop_registry] == []


@pytest.mark.parametrize("bound", [False, True])
def test_a_ring_counts_the_keys_of_all_its_ranks(bound):
    """A rank of a ring of four does the work of attention to four times its own keys."""
    pairs = (0, 1, 1, 2, 2, 3, 3, 0)
    with FakeTensorMode(), FlopCounterMode(display=False) as ring:
        q, k = torch.empty(1, 6, 2, 8), torch.empty(1, 6, 2, 8)
        if bound:
            ring_attention_constmax(q, k, k, torch.empty(1, 2), "ring", pairs)
        else:
            ring_attention(q, k, k, "ring", pairs)
    assert ring.get_total_flops() == 2 * 2 * 6 * 24 * (8 + 8)


def test_operators_trace_without_a_graph_break():
    """All operators stand in one graph of torch.compile(fullgraph=True) and change nothing there."""

    def step(x, q, g, w, video, kernel):
        _, y = adaln(x, None, None, g, g)
        a, b = qk_norm_rope(q, q, w, w, q[0, :, 0, :4], q[0, :, 0, :4])
        out, _ = attention(a, b, q)
        r, _ = adaln(out.flatten(2), y, g, None, None, w, w)
        return r, head_norm(q, w), conv3d(video, kernel, None, (1, 1)), ring_attention(q, q, q, "", ())[0]

    args = (
        randn(2, 17, 24),
        randn(2, 17, 3, 8),
        randn(1, 1, 24),
        randn(24),
        randn(1, 4, 3, 6, 5),
        randn(2, 4, 3, 3, 3),
    )
    with torch.inference_mode():
        for ours, expected in zip(
            torch.compile(step, fullgraph=True, backend="eager")(*args), step(*args), strict=True
        ):
            assert torch.equal(ours, expected)


def test_operators_run_on_fake_tensors():
    """A full-size call needs no memory under FakeTensorMode."""
    with FakeTensorMode():
        q = torch.empty(1, 75600, 40, 128, dtype=torch.bfloat16)
        out, lse = attention(q, q, q)
    assert (tuple(out.shape), tuple(lse.shape), lse.dtype) == ((1, 75600, 40, 128), (1, 40, 75600), torch.float32)
