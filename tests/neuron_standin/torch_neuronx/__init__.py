"""A stand-in for AWS's `torch_neuronx`: it runs nothing on a device and writes down what it is asked, in order.

It registers the device name `neuron` (without kernels: tensors stay on the CPU in tests), a `torch.compile` backend
`neuron` that runs the captured graph with torch, and a process-group backend `neuron` that is gloo. `LOG` holds
`(what, details)` pairs.
"""

import hashlib
import os
import types
from pathlib import Path

import torch
import torch.distributed as dist

LOG: list[tuple[str, dict]] = []
WATCHED = ("NEURON_", "TORCH_NEURONX_", "NKI_", "OMP_NUM_THREADS")


def environment() -> dict[str, str]:
    """What a real backend could have read at this moment."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(WATCHED)}


def _backend(graph: torch.fx.GraphModule, example_inputs: list, options: dict | None = None) -> object:
    """One captured graph: its name, compiler flags, operators, shapes, and a key as a NEFF cache would form it."""
    shapes = [list(value.shape) for value in example_inputs if isinstance(value, torch.Tensor)]
    flags = os.environ.get("NEURON_CC_FLAGS", "")
    ops = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    key = hashlib.sha256(repr((ops, shapes, flags)).encode()).hexdigest()
    LOG.append(("compile", {"options": options, "flags": flags, "num_ops": len(ops), "shapes": shapes, "key": key}))
    cache = os.environ.get("TORCH_NEURONX_NEFF_CACHE_DIR")
    if cache:
        place = Path(cache) / key[:2] / key[2:4] / f"{key}.neff"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(key.encode())
    return graph.forward


def _process_group(prefix_store, rank: int, size: int, timeout):
    LOG.append(("process group", {"rank": rank, "size": size}))
    return dist.ProcessGroupGloo(prefix_store, rank, size, timeout=timeout)


def synchronize() -> None:
    """Nothing is queued."""
    LOG.append(("synchronize", {}))


def wrap_nki(kernel):
    """As the real one: `wrap_nki(kernel)[grid](...)`."""

    class Wrapped:
        def __getitem__(self, grid):
            LOG.append(("nki", {"kernel": getattr(kernel, "__name__", str(kernel)), "grid": grid}))
            return lambda *args: args

    return Wrapped()


LOG.append(("import", {"environment": environment()}))
torch.utils.rename_privateuse1_backend("neuron")
torch._register_device_module("neuron", types.SimpleNamespace(
    synchronize=synchronize, is_available=lambda: False, device_count=lambda: 0, current_device=lambda: 0,
    set_device=lambda _index: None, is_initialized=lambda: True,
))  # fmt: skip
torch._dynamo.register_backend(_backend, name="neuron")
dist.Backend.register_backend("neuron", _process_group, devices=["neuron"])
