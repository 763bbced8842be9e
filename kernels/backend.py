"""The one switch between the torch references and the NKI kernels; it is set once, and nothing falls back silently.

An accelerator package is imported only by `use("nki", ...)`, through the twin modules `kernels.<op>_nki`.
"""

import importlib
from collections.abc import Callable
from typing import Any, Literal

Backend = Literal["reference", "nki"]
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

# operator -> module of its twin; the function in the module has the operator's name
TWINS = {
    "attention": "kernels.attention_nki",
    "adaln": "kernels.adaln_nki",
    "adaln_norm": "kernels.adaln_nki",
    "adaln_fp8": "kernels.adaln_nki",
    "qk_norm_rope": "kernels.qk_norm_rope_nki",
    "head_norm": "kernels.qk_norm_rope_nki",
    "sum_squares": "kernels.qk_norm_rope_nki",
    "conv3d": "kernels.conv3d_nki",
    "fp8_matmul": "kernels.fp8_matmul_nki",
    "ring_attention": "kernels.ring_attention_nki",
    "ring_attention_constmax": "kernels.ring_attention_constmax_nki",
}

_current: Backend = "reference"
_kernels: dict[str, Callable[..., Any]] = {}


def use(backend: Backend, wrapper: Wrapper | None = None) -> None:
    """Choose what runs behind every operator of this process.

    Args:
        backend: "reference" (torch, any device) or "nki".
        wrapper: from an NKI kernel to a function of torch tensors; the device adapter supplies it, for "nki" only.

    Raises:
        ValueError: an unknown name, or a wrapper that is missing or not wanted.
        ImportError: the package `nki` is not the real one (PyPI's placeholder raises this).
    """
    global _current  # noqa: PLW0603 - the switch is the one state of this package
    if backend not in ("reference", "nki"):
        raise ValueError(f"kernel backend {backend!r} is unknown; use 'reference' or 'nki'")
    if (backend == "nki") != (wrapper is not None):
        raise ValueError("backend 'nki' needs the wrapper of the device adapter, and 'reference' takes none")
    chosen: dict[str, Callable[..., Any]] = {}
    if wrapper is not None:
        for op, module in TWINS.items():
            chosen[op] = wrapper(getattr(importlib.import_module(module), op))
    _kernels.clear()
    _kernels.update(chosen)
    _current = backend


def current() -> Backend:
    """The backend in use; a clip's record names it."""
    return _current


def resolve(op: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """What runs for `op` now: the wrapped kernel, or the reference given."""
    return _kernels.get(op, reference)
