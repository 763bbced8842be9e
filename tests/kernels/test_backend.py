"""The one switch: what it refuses, and the model's blocks with the kernels behind it."""

import pytest
import torch

from kernels import backend
from kernels.adaln import adaln
from kernels.attention import attention
from kernels.conv3d import conv3d
from models.vae.model import Memory, MiddleBlock, ResidualBlock, Upsample
from models.wan.model import WanTransformer
from models.wan.rope import rope_tables
from models.wan.spec import transformer_spec
from models.wan.weights import FLOAT32_PARTS
from tests.kernels.judge import assert_close, assert_three_way
from tests.nki_standin.launch import wrapper


@pytest.fixture
def with_kernels():
    """The backend `nki` for one test."""
    backend.use("nki", wrapper)
    yield
    backend.use("reference")


def test_the_switch_refuses_what_is_unclear():
    """Unknown names, a missing wrapper and a wrapper too many are errors, and leave the choice as it was."""
    with pytest.raises(ValueError, match="unknown; use 'reference' or 'nki'"):
        backend.use("cuda")
    with pytest.raises(ValueError, match="needs the wrapper"):
        backend.use("nki")
    with pytest.raises(ValueError, match="'reference' takes none"):
        backend.use("reference", wrapper)
    assert backend.current() == "reference"


def test_the_switch_says_what_runs(with_kernels):
    """After use("nki") the kernels run, and current() says so; a shape beyond their limits is an error, no fallback."""
    assert backend.current() == "nki"
    q = torch.ones(1, 4, 1, 129)
    with pytest.raises(AssertionError, match="MAX_HEAD_WIDTH = 128; got 129: use the backend 'reference'"):
        attention(q, q, q)


REFUSED = {
    "attention dtype": (lambda: attention(*[torch.ones(1, 4, 1, 8, dtype=torch.float64)] * 3), "dtype float64"),
    "k_valid": (lambda: attention(*[torch.ones(1, 4, 1, 8)] * 3, None, 5), "k_valid is 1 to 4"),
    "scale": (lambda: attention(*[torch.ones(1, 4, 1, 8)] * 3, -1.0), "scale is positive"),
    "adaln width": (lambda: adaln(torch.ones(1, 2, 6145), None, None, None, None), "MAX_WIDTH = 6144"),
    "conv channels": (lambda: conv3d(torch.ones(1, 513, 1, 1, 1), torch.ones(1, 513, 1, 1, 1), None, (0, 0)), "MAX_CHANNEL_BYTES = 2048; got 2052"),
    "conv taps": (lambda: conv3d(torch.ones(1, 1, 4, 4, 4), torch.ones(1, 1, 4, 3, 3), None, (0, 0)), "MAX_TAPS = 27"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_limits_are_named_when_they_are_broken(with_kernels, name):
    """A shape beyond a limit is refused by a message that names the limit."""
    call, message = REFUSED[name]
    with pytest.raises(AssertionError, match=message):
        call()


def small_dit(dtype=torch.float32):
    """A DiT of two blocks with heads of width 128, random weights of unit gain."""
    config = {
        "num_attention_heads": 2, "attention_head_dim": 128, "in_channels": 16, "out_channels": 16, "text_dim": 64,
        "freq_dim": 64, "ffn_dim": 384, "num_layers": 2, "patch_size": [1, 2, 2], "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads", "eps": 1e-6, "rope_max_seq_len": 1024,
    }  # fmt: skip
    model = WanTransformer(transformer_spec(config))
    make = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.copy_(
                gain + torch.randn(parameter.shape, generator=make) * (0.05 if gain else parameter.shape[-1] ** -0.5)
            )
    return in_dtype(model, dtype)


def in_dtype(model, dtype):
    """Everything in the dtype but what stays float32 when a checkpoint is loaded."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if any(part in name for part in FLOAT32_PARTS) else dtype)
    return model.eval()


def dit_inputs():
    """Latents, timestep, text rows and rotary tables of a clip of 5 x 6 x 10 / 4 = 75 tokens."""
    make = torch.Generator().manual_seed(1)
    latents, text = torch.randn(1, 16, 5, 6, 10, generator=make), torch.randn(2, 9, 64, generator=make)
    return latents, torch.tensor([500.0]), text, rope_tables((5, 3, 5), 128)


def velocity(model, repeats=0):
    """The model's velocity [2, 16, 5, 6, 10] float32."""
    latents, time, text, rope = dit_inputs()
    with torch.inference_mode():
        return model(latents, time, model.text_keys(text, repeats), rope)


@pytest.mark.parametrize("repeats", [0, 503])
def test_a_dit_with_kernels_gives_the_references_velocity(repeats):
    """Two whole blocks, self and cross attention, norms and rotation: the kernels give the reference's velocity."""
    model = small_dit()
    expected = velocity(model, repeats)
    backend.use("nki", wrapper)
    try:
        ours = velocity(model, repeats)
    finally:
        backend.use("reference")
    assert_close(ours, expected.double(), 1e-5)


def test_a_dit_in_bfloat16_with_kernels():
    """In bfloat16 the kernels err as much as torch does, against the float32 model with the same weights."""
    model = small_dit(torch.bfloat16)
    torchs = velocity(model)
    truth = velocity(in_dtype(model, torch.float32))
    in_dtype(model, torch.bfloat16)
    backend.use("nki", wrapper)
    try:
        ours = velocity(model)
    finally:
        backend.use("reference")
    assert_three_way(ours.bfloat16(), torchs.bfloat16(), truth.double(), 0.05)


def vae_blocks():
    """Blocks of the VAE with their inputs."""
    return {
        "residual": (ResidualBlock(8, 12), 8),
        "middle": (MiddleBlock(8), 8),
        "up": (Upsample(8, 4, temporal=True), 8),
    }


@pytest.mark.parametrize("name", ["residual", "middle", "up"])
def test_a_vae_block_with_kernels_gives_the_references_frames(name):
    """First frame and later frames through the caches: kernels and reference agree on every block."""
    block, channels = vae_blocks()[name]
    make = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=make) * 0.2)
    frames = torch.randn(1, channels, 3, 6, 7, generator=make)

    def both_calls():
        with torch.inference_mode():
            first = Memory()
            start = block(frames[:, :, :1].clone(), first)
            return start, block(frames[:, :, 1:].clone(), Memory(first.new))

    expected = both_calls()
    backend.use("nki", wrapper)
    try:
        ours = both_calls()
    finally:
        backend.use("reference")
    for mine, theirs in zip(ours, expected, strict=True):
        assert_close(mine, theirs.double(), 1e-5)
