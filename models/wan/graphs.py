"""The graphs of one expert: tensors in, tensors out; every decision of the host stands between them.

Of a whole model there are two per bucket: `first` takes a text and also returns its keys and values, `steady` takes
those. By blocks there are `keys`, `begin`, `block` and `end`; `block` is traced once for the first layer, whose stream
has no open sum, and once for all the others, which share it. Guidance is a graph of its own.
What varies between steps and clips (latents, timestep, text, guidance) is a tensor argument, never a constant.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from models.parallel.collectives import gather_blocks, order_of
from models.parallel.mesh import Axis
from models.wan.model import Block, Frame, Modulation, Rope, Stream, TextKeys, WanTransformer

CompileGraph = Callable[[nn.Module, str], Callable[..., Any]]  # (what is traced, its name) -> what is called
Unit = Literal["model", "block"]


def uncompiled(module: nn.Module, _name: str) -> Callable[..., Any]:
    """The module as it is."""
    return module


class FirstStep(nn.Module):
    """An evaluation that makes the keys and values of its text."""

    def __init__(self, model: WanTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, latents: Tensor, timestep: Tensor, text_BSE: Tensor, repeats: int, rope: Rope
    ) -> tuple[Tensor, list[TextKeys]]:
        """As `WanTransformer.forward`, of text [B, S, E]: the velocity and each layer's keys and values."""
        keys = self.model.text_keys(text_BSE, repeats)
        return self.model(latents, timestep, keys, rope), keys


class Keys(nn.Module):
    """Each layer's keys and values of a text."""

    def __init__(self, model: WanTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, text_BSE: Tensor, repeats: int) -> list[TextKeys]:
        """As `WanTransformer.text_keys`; text [B, S, E]."""
        return self.model.text_keys(text_BSE, repeats)


class Begin(nn.Module):
    """What comes before the first block."""

    def __init__(self, model: WanTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, latents: Tensor, timestep: Tensor, rope: Rope) -> tuple[Frame, Stream]:
        """As `WanTransformer.begin`."""
        return self.model.begin(latents, timestep, rope)


class OneBlock(nn.Module):
    """One block; which one is an argument, so that all layers share a graph and its weights are inputs of it."""

    def forward(
        self, block: Block, stream: Stream, modulation: Modulation, rope: Rope, num_tokens: int, text: TextKeys
    ) -> Stream:
        """As `Block.forward`."""
        out: Stream = block(stream, modulation, rope, num_tokens, text)
        return out


class End(nn.Module):
    """What comes behind the last block."""

    def __init__(self, model: WanTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, frame: Frame, stream: Stream) -> Tensor:
        """As `WanTransformer.end`."""
        return self.model.end(frame, stream)


class ExpertGraphs:
    """One expert as callers use it, whole or by blocks, compiled or not.

    Args:
        model: the expert, with a mesh's places filled in.
        compile_graph: makes a graph of a module; it is traced at its first call.
        unit: what is compiled at once.
    """

    def __init__(self, model: WanTransformer, compile_graph: CompileGraph = uncompiled, unit: Unit = "model") -> None:
        self.model, self.unit = model, unit
        self._keys = compile_graph(Keys(model), "keys")
        self._first = compile_graph(FirstStep(model), "first")
        self._steady = compile_graph(model, "steady")
        self._begin = compile_graph(Begin(model), "begin")
        self._block = compile_graph(OneBlock(), "block")
        self._end = compile_graph(End(model), "end")

    def first(
        self, latents: Tensor, timestep: Tensor, text_BSE: Tensor, repeats: int, rope: Rope
    ) -> tuple[Tensor, list[TextKeys]]:
        """An evaluation as `steady`, of text [B, S, E] (`repeats` as in `TextKeys`), and the keys that it made."""
        if self.unit == "block":
            keys = self.keys(text_BSE, repeats)
            return self.steady(latents, timestep, keys, rope), keys
        found: tuple[Tensor, list[TextKeys]] = self.model.settle(
            lambda: self._first(latents, timestep, text_BSE, repeats, rope)
        )
        return found

    def steady(self, latents: Tensor, timestep: Tensor, text: list[TextKeys], rope: Rope) -> Tensor:
        """The velocity [B, C, T, h, w] float32; arguments as in `WanTransformer.forward`."""
        if self.unit == "block":
            frame, stream = self.begin(latents, timestep, rope)
            return self.end(frame, self.through(frame, stream, text, slice(None)))
        out: Tensor = self.model.settle(lambda: self._steady(latents, timestep, text, rope))
        return out

    def keys(self, text_BSE: Tensor, repeats: int) -> list[TextKeys]:
        """Each layer's keys and values of text [B, S, E]."""
        found: list[TextKeys] = self._keys(text_BSE, repeats)
        return found

    def begin(self, latents: Tensor, timestep: Tensor, rope: Rope) -> tuple[Frame, Stream]:
        """As `WanTransformer.begin`."""
        found: tuple[Frame, Stream] = self._begin(latents, timestep, rope)
        return found

    def through(self, frame: Frame, stream: Stream, text: list[TextKeys], which: slice) -> Stream:
        """As `WanTransformer.through`, a graph per block."""

        def run() -> Stream:
            passed = stream
            for block, keys in list(zip(self.model.blocks, text, strict=True))[which]:
                passed = self._block(block, passed, frame.modulation, frame.rope, frame.num_tokens, keys)
            return passed

        found: Stream = self.model.settle(run)
        return found

    def end(self, frame: Frame, stream: Stream) -> Tensor:
        """As `WanTransformer.end`."""
        out: Tensor = self._end(frame, stream)
        return out


class Guide(nn.Module):
    """Classifier-free guidance from the two branches' velocities."""

    def forward(self, positive: Tensor, negative: Tensor, guidance: Tensor) -> Tensor:
        """[1, C, T, h, w] float32 each, guidance [1] float32 -> the guided velocity."""
        return negative + guidance * (positive - negative)


class GatherAndGuide(nn.Module):
    """The same where each rank of the guidance axis has one branch: 0 the prompt's, 1 the negative prompt's."""

    order: Tensor | None

    def __init__(self, axis: Axis, device: torch.device | None = None) -> None:
        super().__init__()
        self.axis = axis
        self.register_buffer("order", order_of(axis, device), persistent=False)

    def forward(self, own: Tensor, guidance: Tensor) -> Tensor:
        """This rank's velocity [1, C, T, h, w] float32, guidance [1] float32 -> the guided velocity, on both ranks."""
        positive, negative = gather_blocks(own, self.axis, self.order)
        return negative + guidance * (positive - negative)


class Guidance:
    """Guidance as callers use it; axis: the guidance axis, trivial where one rank does both branches."""

    def __init__(self, axis: Axis, device: torch.device, compile_graph: CompileGraph = uncompiled) -> None:
        self._device = device
        self._guide = compile_graph(Guide(), "guide")
        self._gather = compile_graph(GatherAndGuide(axis, device), "gather_guide")

    def guide(self, positive: Tensor, negative: Tensor, factor: float) -> Tensor:
        """[1, C, T, h, w] float32 each."""
        out: Tensor = self._guide(positive, negative, self._tensor(factor))
        return out

    def gather(self, own: Tensor, factor: float) -> Tensor:
        """[1, C, T, h, w] float32 of this rank's branch."""
        out: Tensor = self._gather(own, self._tensor(factor))
        return out

    def _tensor(self, factor: float) -> Tensor:
        return torch.tensor([factor], dtype=torch.float32, device=self._device)
