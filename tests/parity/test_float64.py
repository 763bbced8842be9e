"""The float64 reference is one: what asks for float32 gets float64, and what slips through is noticed."""

import pytest
import torch

from tests.parity.float64 import float64_reference


def test_requests_for_float32_are_lifted():
    """`.float()`, `.to(torch.float32)` and factories give float64 inside, and float32 again behind."""
    wide = torch.ones(2, dtype=torch.float64)
    with float64_reference():
        lifted = [
            wide.float(),
            wide.to(torch.float32),
            torch.zeros(2, dtype=torch.float32),
            torch.ones(2),
            torch.arange(3, dtype=torch.float32),
        ]
    assert {tensor.dtype for tensor in lifted} == {torch.float64}
    assert torch.ones(2).dtype == torch.float32


def test_a_float32_tensor_is_noticed():
    """A float32 tensor made outside and used inside is an error that names the operator."""
    narrow = torch.ones(2)
    with float64_reference(), pytest.raises(AssertionError, match="a float32 tensor of shape"):
        narrow + narrow
