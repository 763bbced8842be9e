"""How close is close: the same rules for every kernel.

Three-way: with float64 as the truth, a result in low precision may err a few times as much as torch does in the same dtype.
Global maximum: beside that, no element may be off by more than a share of the largest one.
"""

import torch
from torch import Tensor

# dtype -> share of the largest value: float32 carries rounding of long sums, 16 bits half a unit in the last place and more
GLOBAL_SHARE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MAX_L2_RATIO = 3.0
MAX_PEAK_RATIO = 5.0
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def assert_close(ours: Tensor, truth: Tensor, share: float | None = None) -> None:
    """No element is off by more than a share of the largest true value."""
    assert ours.shape == truth.shape
    assert torch.isfinite(ours.double()).all()
    limit = (GLOBAL_SHARE[ours.dtype] if share is None else share) * truth.abs().max().item() + 1e-30
    error = (ours.double() - truth.double()).abs().max().item()
    assert error <= limit, f"off by {error:.3g}, limit {limit:.3g}"


def assert_three_way(ours: Tensor, torchs: Tensor, truth: Tensor, share: float | None = None) -> None:
    """The error is at most 3 times (its peak 5 times) that of torch in the same dtype, and within the global share."""
    assert ours.dtype == torchs.dtype
    assert_close(ours, truth, share)
    unit = UNIT[ours.dtype] * truth.abs().max().item()  # torch may be exact by luck
    mine, theirs = (ours.double() - truth.double()), (torchs.double() - truth.double())
    l2, floor = mine.norm().item(), unit * mine.numel() ** 0.5 / 4
    assert l2 <= MAX_L2_RATIO * max(theirs.norm().item(), floor), f"L2 error {l2:.3g}"
    peak = mine.abs().max().item()
    assert peak <= MAX_PEAK_RATIO * max(theirs.abs().max().item(), unit), f"peak error {peak:.3g}"
