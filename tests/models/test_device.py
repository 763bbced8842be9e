"""Devices and the choice of operators: what is not there is refused by name."""

import pytest

from kernels import backend
from models.device import open_device, use_kernels
from models.errors import ModelError


@pytest.mark.parametrize(("name", "kind"), [("tpu", "unsupported"), ("neuron", "unsupported")])
def test_a_device_that_is_not_there_is_refused(name, kind):
    """Unknown and absent devices are errors of the right kind that name the device."""
    with pytest.raises(ModelError, match=name) as caught:
        open_device(name)
    assert caught.value.kind == kind


def test_kernels_without_their_device_are_refused():
    """The NKI kernels on a CPU are an error that names the alternative, and the reference stays in use."""
    with pytest.raises(ModelError, match="use --kernels reference") as caught:
        use_kernels("nki", "cpu")
    assert caught.value.kind == "unsupported"
    use_kernels("reference", "cpu")
    assert backend.current() == "reference"
