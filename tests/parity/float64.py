"""Run diffusers and transformers in float64, although their code asks for float32 in many places."""

from contextlib import contextmanager

import torch
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiftFloat32(TorchDispatchMode):
    """Every request for float32 becomes one for float64; a float32 tensor that comes by all the same is an error."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        out = func(*args, **kwargs)
        for leaf in tree_leaves((args, kwargs, out)):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32:
                raise AssertionError(f"{func}: a float32 tensor of shape {tuple(leaf.shape)} in a float64 reference")
        return out


@contextmanager
def float64_reference():
    """Inside, `.float()`, `.to(torch.float32)`, float32 factories and the default dtype mean float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), LiftFloat32():
            yield
    finally:
        torch.set_default_dtype(before)


def lift_module(module):
    """A diffusers or transformers module in float64, in place; rotary tables are made again, not rounded ones widened."""
    torch.nn.Module.double(module)
    for part in module.modules():
        if isinstance(part, WanRotaryPosEmbed):
            with float64_reference():
                fresh = WanRotaryPosEmbed(part.attention_head_dim, part.patch_size, part.max_seq_len)
            part.freqs_cos, part.freqs_sin = fresh.freqs_cos, fresh.freqs_sin
    return module
