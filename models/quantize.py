"""FP8 linear layers: `quantization: fp8_row`, one scale per token and one per output channel.

Only the linear layers inside a transformer's blocks are converted; embedders, norms, tables and the output head stay as
they are, and so does what `modules_to_not_convert` names. On Trainium2 e4m3 ends at 240, elsewhere at 448. Works on
plain weights; FP8 checkpoints are read as plain weights first (`fp8_checkpoint`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn import functional

from kernels import backend
from kernels.fp8_matmul import FP8_MAX_OCP, FP8_MAX_TRN2, fp8_matmul, quantize_weight
from models.errors import ModelError

QUANTIZATIONS = ("none", "fp8_row")
CONVERTED = "blocks.*"


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a model's linear layers are quantised.

    fp8_max: the largest magnitude of the format. modules_to_not_convert: names or patterns of modules to leave alone,
    each with all that is inside.
    """

    fp8_max: float
    modules_to_not_convert: tuple[str, ...] = ()

    def converts(self, name: str) -> bool:
        """Whether the linear layer of this name is converted."""
        kept = any(
            fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in self.modules_to_not_convert
        )
        return fnmatchcase(name, CONVERTED) and not kept


def quantization(name: str, modules_to_not_convert: Sequence[str] = (), device: str = "cpu") -> Quantization | None:
    """The setting `quantization`; None for "none". Raises ModelError("unsupported")."""
    if name not in QUANTIZATIONS:
        raise ModelError("unsupported", f"quantization {name!r} is unknown; choose one of {', '.join(QUANTIZATIONS)}")
    if name == "none":
        return None
    on_trainium = device == "neuron" or backend.current() == "nki"
    return Quantization(FP8_MAX_TRN2 if on_trainium else FP8_MAX_OCP, tuple(modules_to_not_convert))


class Fp8Linear(nn.Module):
    """A linear layer in FP8.

    weight: [inputs, outputs] float8_e4m3fn, weight_scale: [outputs] float32. `finish` sums over ranks where the input
    channels are spread over them; the bias is added after it.
    """

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, layer: nn.Linear, fp8_max: float) -> None:
        super().__init__()
        self.in_features, self.out_features, self.fp8_max = layer.in_features, layer.out_features, fp8_max
        self.finish: Callable[[Tensor], Tensor] | None = getattr(layer, "_finish", None)
        weight, scale = quantize_weight(layer.weight.detach(), fp8_max)
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", scale)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs] in the dtype of x."""
        own = self.bias if self.finish is None else None
        rows = x.reshape(-1, x.shape[-1])
        out = fp8_matmul(rows, self.weight, self.weight_scale, own, self.fp8_max).view(*x.shape[:-1], -1)
        if self.finish is None:
            return out
        total = self.finish(out)
        return total if self.bias is None else total + self.bias


def converted_layers(model: nn.Module, how: Quantization) -> Iterator[tuple[str, nn.Linear]]:
    """Name and layer of everything that `how` converts.

    Raises:
        ModelError: "unsupported", an entry of modules_to_not_convert that names no module.
    """
    names = [name for name, _ in model.named_modules()]
    for pattern in how.modules_to_not_convert:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError("unsupported", f"modules_to_not_convert: {pattern!r} names no module of the transformer")
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and how.converts(name):
            yield name, layer


def quantize(model: nn.Module, how: Quantization) -> dict[str, float]:
    """Convert the model's linear layers in place; returns per module the relative L2 error of its weight."""
    errors = {}
    for name, layer in list(converted_layers(model, how)):
        replacement = Fp8Linear(layer, how.fp8_max)
        # what gathers a layer's input over ranks hangs on the layer as a hook
        replacement._forward_pre_hooks.update(layer._forward_pre_hooks)  # noqa: SLF001
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, replacement)
        errors[name] = weight_error(layer.weight, replacement)
    return errors


def weight_error(weight_NK: Tensor, layer: Fp8Linear) -> float:
    """|| weight - what FP8 and scales stand for || / || weight ||, of [N, K]."""
    exact = weight_NK.detach().float()
    ours = (layer.weight.float() * layer.weight_scale).T
    return float((ours - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float32).tiny))


def module_errors(model: nn.Module, how: Quantization, run: Callable[[], object]) -> dict[str, float]:
    """What FP8 would do to each module's result, on real inputs: relative L2 error against the layer as it is.

    Args:
        model: not converted.
        how: what would be converted.
        run: calls the model; each layer is judged on the inputs that it gets there.
    """
    sums: dict[str, list[float]] = {}
    handles = []
    for name, layer in converted_layers(model, how):
        twin = Fp8Linear(layer, how.fp8_max)
        twin.finish, twin.bias = None, layer.bias

        def judge(
            _layer: nn.Module,
            args: tuple[Tensor, ...],
            _output: Tensor,
            name: str = name,
            layer: nn.Linear = layer,
            twin: Fp8Linear = twin,
        ) -> None:
            exact = functional.linear(args[0], layer.weight, layer.bias).float()
            found = sums.setdefault(name, [0.0, 0.0])
            found[0] += float((twin(args[0]).float() - exact).square().sum())
            found[1] += float(exact.square().sum())

        handles.append(layer.register_forward_hook(judge))
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {name: (error / max(size, 1e-30)) ** 0.5 for name, (error, size) in sums.items()}
