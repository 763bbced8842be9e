"""Devices by name, and the few things that differ between them."""

from dataclasses import dataclass

import torch

from kernels import backend
from models.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEVICES = ("cpu", "cuda", "neuron")


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a setting's name; raises ModelError("unsupported")."""
    if name not in DTYPES:
        raise ModelError("unsupported", f"dtype {name!r} is unknown; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True, slots=True)
class Device:
    """One device that a pipeline runs on."""

    name: str
    torch_device: torch.device

    @property
    def static_shapes(self) -> bool:
        """Whether each new tensor shape costs a compilation, so that text is kept at its full length."""
        return self.name == "neuron"

    def synchronize(self) -> None:
        """Wait until queued work is done (the host's own work already is)."""
        if self.name == "cuda":
            torch.cuda.synchronize(self.torch_device)


def open_device(name: str = "cpu", index: int = 0) -> Device:
    """The device `cpu`, `cuda` or `neuron`.

    Raises ModelError: "device" when torch sees none (it may have failed), "unsupported" when it can never be had here.
    """
    if name not in DEVICES:
        raise ModelError("unsupported", f"device {name!r} is unknown; choose one of {', '.join(DEVICES)}")
    if name == "cpu":
        return Device("cpu", torch.device("cpu"))
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ModelError("device", "device 'cuda': torch sees no CUDA device; use --device cpu or check the driver")
        return Device("cuda", torch.device("cuda", index))
    raise ModelError("unsupported", "device 'neuron': the extra 'neuron' is not installed in this environment")


def use_kernels(name: str, device: str) -> None:
    """Choose what runs behind the operators of this process: `reference` or `nki`.

    Raises ModelError("unsupported") where the NKI kernels cannot run; nothing falls back by itself.
    """
    if name == "nki" and device != "neuron":
        raise ModelError(
            "unsupported", f"kernels 'nki' run on device 'neuron', not on {device!r}; use --kernels reference"
        )
    if name == "nki":
        raise ModelError("unsupported", "kernels 'nki': the extra 'neuron' is not installed in this environment")
    backend.use("reference")
