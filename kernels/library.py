"""How an operator of batch-gen joins torch: `torch.library`, one namespace, a fake and a FLOP formula for each.

`torch.library.custom_op` costs about 2 us more per call than the plain `Library` used here, and a small model makes
thousands of calls per clip.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

NAMESPACE = "batch_gen"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def define(
    schema: str, *, reference: Callable[..., Any], fake: Callable[..., Any], flops: Callable[..., int]
) -> Callable[..., Any]:
    """Register one operator and return the callable overload.

    Args:
        schema: "name(Tensor x, ...) -> ...": the torch schema, without the namespace.
        reference: the torch implementation, used on CPU and CUDA.
        fake: the same on fake tensors: right shapes, dtypes and strides, no arithmetic.
        flops: from shapes (`out_shape` by keyword) to floating-point operations, 2 per multiply-add.
    """
    name = schema.partition("(")[0]
    library: Any = _LIBRARY
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        library.impl(name, reference, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    packet = getattr(getattr(torch.ops, NAMESPACE), name)
    register_flop_formula(packet)(flops)
    overload: Callable[..., Any] = packet.default
    return overload


def no_flops(*_args: object, **_kwargs: object) -> int:
    """The count of norms and element-wise work: torch's counter sees matrix products, convolutions, attention only."""
    return 0
