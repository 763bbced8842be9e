"""The kernels that work token by token, and the FP8 matmul, against their references and float64."""

import pytest
import torch
from torch.nn import functional

from kernels import adaln, fp8_matmul, qk_norm_rope
from tests.kernels.judge import assert_close, assert_three_way
from tests.nki_standin.launch import launch

import kernels.adaln_nki as adaln_nki  # isort: skip - after the launcher
import kernels.fp8_matmul_nki as fp8_nki  # isort: skip
import kernels.qk_norm_rope_nki as qk_nki  # isort: skip

FLOATS = [torch.float32, torch.bfloat16]
TOKENS = [1, 63, 127, 128, 129, 515]


def randn(*shape, dtype=torch.float32, seed=0):
    """Gaussian numbers, the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(value):
    """Arguments in float64."""
    return value.double() if isinstance(value, torch.Tensor) else value


def check_rows(kernel, reference, *args):
    """Every result three-way against the reference in float64."""
    ours, torchs = launch(kernel, *args), reference(*args)
    truths = reference(*[wide(a) for a in args])
    alone = isinstance(ours, torch.Tensor)
    for mine, theirs, truth in zip(*(((part,) if alone else part) for part in (ours, torchs, truths)), strict=True):
        assert_three_way(mine, theirs, truth)


def modulations(kind, B, L, D):
    """gate, scale, shift, weight, bias of one use of adaln in the model."""
    shape = {"clip": (B, 1, D), "shared": (1, 1, D), "token": (B, L, D)}.get(kind, (B, 1, D))
    gate, scale, shift = (randn(*shape, seed=s) for s in (2, 3, 4))
    w, b = randn(D, seed=5), randn(D, seed=6)
    return {
        "affine": (None, None, None, w, b),
        "plain": (gate, None, None, None, None),
        "both": (gate, scale, shift, w, b),
        "vector": (gate, scale[0, 0], shift[0, 0], None, None),
    }.get(kind, (gate, scale, shift, None, None))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_adaln_at_odd_numbers_of_tokens(dtype, tokens):
    """Any number of tokens works, two clips, modulated per clip."""
    x, residual = randn(2, tokens, 96, dtype=dtype), randn(2, tokens, 96, dtype=dtype, seed=1)
    check_rows(adaln_nki.adaln, adaln.adaln, x, residual, *modulations("clip", 2, tokens, 96), 1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("width", [1, 70, 511, 513, 1536])
@pytest.mark.parametrize("kind", ["shared", "token", "affine", "plain", "both", "vector"])
def test_adaln_in_every_use(dtype, width, kind):
    """All forms of gate, modulation and affine norm work, at widths around the chunk of the statistics."""
    x, residual = randn(2, 130, width, dtype=dtype) + 0.5, randn(2, 130, width, dtype=dtype, seed=1)
    gate, *others = modulations(kind, 2, 130, width)
    if width == 1:  # a norm over one value is its bias, exactly: nothing to compare three-way
        assert_close(launch(adaln_nki.adaln, x, residual, gate, *others)[1], adaln.adaln(x, residual, gate, *others)[1])
        return
    check_rows(adaln_nki.adaln, adaln.adaln, x, residual, gate, *others, 1e-6)
    check_rows(adaln_nki.adaln_norm, lambda *a: adaln.adaln(a[0], None, None, *a[1:])[1], x, *others, 1e-6)


@pytest.mark.parametrize("name", ["large mean", "outlier", "constant", "zero"])
def test_adaln_on_adversarial_rows(name):
    """A mean far above the deviation, one huge channel, constant and zero rows: as good as torch, and finite."""
    x = randn(1, 130, 96)
    if name == "large mean":
        x = x + 1000
    elif name == "outlier":
        x[:, :, 3] = 1e4
    else:
        x[:] = 7.0 if name == "constant" else 0.0
    scale, shift = randn(1, 1, 96, seed=1), randn(1, 1, 96, seed=2)
    y = launch(adaln_nki.adaln_norm, x, scale, shift)
    truth = adaln.adaln(x.double(), None, None, scale.double(), shift.double())[1]
    assert_close(y, truth, 2e-4 if name == "large mean" else 2e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [1, 129])
def test_adaln_fp8_gives_the_bits_of_the_reference(dtype, tokens):
    """From the same y, kernel and reference quantise to the same FP8 bits."""
    x, g = randn(1, tokens, 96, dtype=dtype), randn(1, 1, 96, seed=2)
    r, q, scale = launch(adaln_nki.adaln_fp8, x, x + 1, g, g, g)
    y = launch(adaln_nki.adaln, x, x + 1, g, g, g)[1]
    expected_q, expected_scale = fp8_matmul.quantize_rows(y[0], 240.0)
    assert torch.equal(q[0].view(torch.uint8), expected_q.view(torch.uint8))
    assert torch.equal(scale[0], expected_scale)
    assert_close(r, adaln.adaln(x, x + 1, g, g, g)[0].double())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("summed", [False, True])
def test_norm_and_rotation_at_odd_numbers_of_tokens(dtype, tokens, summed):
    """Queries and keys are normalised over their heads and rotated, with own and with summed mean squares."""
    q, k = randn(2, tokens, 3, 32, dtype=dtype), randn(2, tokens, 3, 32, dtype=dtype, seed=1)
    wq, wk, cos, sin = randn(96, seed=2), randn(96, seed=3), randn(tokens, 16, seed=4), randn(tokens, 16, seed=5)
    means = randn(2, 2, tokens).abs() + 0.5 if summed else None
    check_rows(qk_nki.qk_norm_rope, qk_norm_rope.qk_norm_rope, q, k, wq, wk, cos, sin, 1e-6, means)
    check_rows(qk_nki.head_norm, qk_norm_rope.head_norm, q, wq, 1e-6, None if means is None else means[0])


def test_norm_of_large_small_and_zero_heads():
    """Tokens scaled by 1e-6 to 1e6, and a token of zeros, stay finite and as close as torch."""
    q = randn(1, 130, 2, 64) * torch.logspace(-6, 6, 130).view(1, -1, 1, 1)
    q[:, 5] = 0
    out = launch(qk_nki.head_norm, q, randn(128))
    assert_close(out, qk_norm_rope.head_norm(q.double(), randn(128).double()))


def test_sums_of_squares():
    """The partial sums for tensor parallelism agree with float64."""
    q, k = randn(2, 130, 3, 64), randn(2, 130, 3, 64, seed=1) * 100
    ours = launch(qk_nki.sum_squares, q, k)
    for mine, x in zip(ours, (q, k), strict=True):
        assert_close(mine, x.double().square().sum((2, 3)))


FP8_SHAPES = [(1, 1, 1), (63, 127, 129), (129, 256, 513), (128, 257, 512), (515, 300, 70), (130, 5120, 96)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("M", "K", "N"), FP8_SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_fp8_matmul_is_bit_equal_to_its_emulation(dtype, M, K, N, biased):
    """The CPU emulation and the kernel give the same bits, with and without bias, from plain and from quantised rows."""
    x = randn(M, K, dtype=dtype)
    weight, scale = fp8_matmul.quantize_weight(randn(N, K, seed=1))
    bias = randn(N, seed=2) if biased else None
    ours = launch(fp8_nki.fp8_matmul, x, weight, scale, bias)
    assert torch.equal(ours, fp8_matmul.fp8_matmul(x, weight, scale, bias))
    q, row_scale = fp8_matmul.quantize_rows(x, 240.0)
    ours = launch(fp8_nki.fp8_matmul, q, weight, scale, bias, 240.0, row_scale)
    assert torch.equal(ours, fp8_matmul.fp8_matmul(q, weight, scale, bias, 240.0, row_scale))


@pytest.mark.parametrize("spread", [1.0, 1e4])
def test_fp8_matmul_on_rows_of_any_size(spread):
    """Rows that differ by orders of magnitude, rows of zeros and a huge channel keep kernel and emulation equal."""
    x = randn(130, 300) * torch.logspace(-3, 3, 130).view(-1, 1)
    x[:, 5] *= spread
    x[7] = 0
    weight, scale = fp8_matmul.quantize_weight(randn(70, 300, seed=1))
    ours = launch(fp8_nki.fp8_matmul, x, weight, scale)
    assert torch.equal(ours, fp8_matmul.fp8_matmul(x, weight, scale))
    assert ours[7].abs().max() == 0


@pytest.mark.slow
def test_rows_at_the_shapes_of_480p():
    """4,095 tokens of a rank at TP4: adaLN over 5,120, ten heads of norm and rotation, and the FP8 output projection."""
    x, residual = randn(1, 4095, 5120, dtype=torch.bfloat16), randn(1, 4095, 5120, dtype=torch.bfloat16, seed=1)
    check_rows(adaln_nki.adaln, adaln.adaln, x, residual, *modulations("clip", 1, 4095, 5120), 1e-6)
    q, w, angle = randn(1, 4095, 10, 128, dtype=torch.bfloat16), randn(1280), randn(4095, 64)
    check_rows(qk_nki.qk_norm_rope, qk_norm_rope.qk_norm_rope, q, q, w, w, angle.cos(), angle.sin(), 1e-6, None)
    weight, scale = fp8_matmul.quantize_weight(randn(5120, 1280))
    rows = q.view(4095, 1280)
    ours = launch(fp8_nki.fp8_matmul, rows, weight, scale)
    assert torch.equal(ours, fp8_matmul.fp8_matmul(rows, weight, scale))
    assert_close(ours, functional.linear(rows.double(), randn(5120, 1280).double()), 0.05)


@pytest.mark.usefixtures("standin")
def test_the_widest_rows_fit_sbuf():
    """At the largest width that its limits allow, in float32 and with every option, each kernel fits the memory."""
    D = adaln_nki.MAX_WIDTH
    x, clip, token = randn(1, 260, D), randn(1, 1, D), randn(1, 260, D)
    launch(adaln_nki.adaln, x, x, clip, clip, clip, randn(D), randn(D))
    launch(adaln_nki.adaln_fp8, x, x, token, token, token, randn(D), randn(D))
    heads, angle = randn(1, 260, 40, 128), randn(260, 64)
    assert heads[0, 0].numel() == qk_nki.MAX_WIDTH
    launch(qk_nki.qk_norm_rope, heads, heads, randn(5120), randn(5120), angle, angle)
    weight, scale = fp8_matmul.quantize_weight(randn(8, fp8_nki.MAX_CONTRACTION))
    out = launch(fp8_nki.fp8_matmul, randn(1024, fp8_nki.MAX_CONTRACTION), weight, scale, randn(8))
    assert out.shape == (1024, 8)
