"""The convolution of the VAE against its reference and float64, at every use the model makes of it."""

import pytest
import torch

from kernels.conv3d import conv3d
from tests.kernels.judge import assert_three_way
from tests.nki_standin.launch import launch

import kernels.conv3d_nki as twin  # isort: skip - after the launcher

# channels in, channels out, frames, rows, columns, kernel, stride, norm and SiLU
USES = {
    "one pixel": (3, 5, 1, 1, 1, (1, 1, 1), (1, 1, 1), False),
    "conv_in": (16, 24, 2, 7, 9, (3, 3, 3), (1, 1, 1), False),
    "first frame": (16, 24, 1, 7, 9, (1, 3, 3), (1, 1, 1), True),
    "residual": (24, 130, 2, 12, 13, (3, 3, 3), (1, 1, 1), True),
    "129 channels": (129, 20, 1, 5, 131, (3, 3, 3), (1, 1, 1), True),
    "long frame": (8, 8, 1, 67, 40, (3, 3, 3), (1, 1, 1), True),
    "wide frame": (8, 8, 1, 9, 300, (1, 3, 3), (1, 1, 1), False),
    "time": (8, 16, 3, 4, 4, (3, 1, 1), (1, 1, 1), False),
    "down": (8, 8, 2, 17, 18, (1, 3, 3), (1, 2, 2), False),
    "time down": (8, 8, 4, 4, 5, (3, 1, 1), (2, 1, 1), False),
    "shortcut": (24, 48, 3, 6, 5, (1, 1, 1), (1, 1, 1), False),
}


def arguments(use, dtype, clips=1):
    """Arguments of conv3d for one use; the first frame of the context is zeros, as at the start of a clip."""
    C, outs, T, H, W, kernel, stride, norm = USES[use]
    make = torch.Generator().manual_seed(0)
    x = torch.randn(clips, C, T, H, W, generator=make).to(dtype)
    w = (torch.randn(outs, C, *kernel, generator=make) / (C * kernel[0] * kernel[1] * kernel[2]) ** 0.5).to(dtype)
    bias, gamma = torch.randn(outs, generator=make).to(dtype), torch.randn(C, generator=make).to(dtype)
    context = (
        torch.randn(clips, C, kernel[0] - stride[0], H, W, generator=make).to(dtype) if kernel[0] > stride[0] else None
    )
    if context is not None:
        context[:, :, 0] = 0
    padding = (0, 0) if stride[1] > 1 else (kernel[1] // 2, kernel[2] // 2)
    return x, w, bias, padding, gamma if norm else None, norm, stride, context


def check_conv(args):
    """Three-way against float64."""
    truth = conv3d(*[a.double() if isinstance(a, torch.Tensor) else a for a in args])
    assert_three_way(launch(twin.conv3d, *args), conv3d(*args).contiguous(), truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use", USES)
def test_conv3d_in_every_use(dtype, use):
    """Each convolution of the VAE, odd sizes and borders included, is as close to float64 as torch is."""
    check_conv(arguments(use, dtype))


def test_conv3d_of_two_clips():
    """Clips of a batch do not mix, and a missing bias is zero."""
    args = list(arguments("residual", torch.float32, clips=2))
    args[2] = None
    check_conv(args)


@pytest.mark.parametrize("scale", [1e-8, 1e8])
def test_conv3d_norms_tiny_and_huge_inputs(scale):
    """The channel norm takes inputs of any size."""
    args = list(arguments("residual", torch.float32))
    args[0], args[7] = args[0] * scale, args[7] * scale
    check_conv(args)


def test_conv3d_splits_output_channels_that_do_not_fit():
    """Weights larger than their share of SBUF are used in groups of output channels."""
    make = torch.Generator().manual_seed(0)
    x, w = torch.randn(1, 300, 1, 4, 4, generator=make), torch.randn(600, 300, 3, 3, 3, generator=make) / 90
    context = torch.randn(1, 300, 2, 4, 4, generator=make)
    assert twin.group_channels(w) < 600
    check_conv((x, w, None, (1, 1), None, False, (1, 1, 1), context))


@pytest.mark.slow
def test_conv3d_at_the_size_of_480p():
    """A strip of the last stage of 480p: 96 channels, 832 columns, two new frames."""
    make = torch.Generator().manual_seed(0)
    x, w = torch.randn(1, 96, 2, 64, 832, generator=make), torch.randn(96, 96, 3, 3, 3, generator=make) / 50
    context, gamma = torch.randn(1, 96, 2, 64, 832, generator=make), torch.randn(96, generator=make)
    args = [t.bfloat16() for t in (x, w)] + [None, (1, 1), gamma.bfloat16(), True, (1, 1, 1), context.bfloat16()]
    check_conv(tuple(args))


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize(("dtype", "channels"), [(torch.bfloat16, 1024), (torch.float32, 512)])
def test_the_most_channels_fit_sbuf(dtype, channels):
    """As many channels as the limit allows, three frames, at the full width of a tile, fit the memory."""
    assert channels * dtype.itemsize == twin.MAX_CHANNEL_BYTES
    x, context = torch.randn(1, channels, 1, 8, 128).to(dtype), torch.randn(1, channels, 2, 8, 128).to(dtype)
    w, gamma = torch.randn(130, channels, 3, 3, 3).to(dtype) / 100, torch.randn(channels).to(dtype)
    out = launch(twin.conv3d, x, w, None, (1, 1), gamma, True, (1, 1, 1), context)
    assert out.shape == (1, 130, 1, 8, 128)
