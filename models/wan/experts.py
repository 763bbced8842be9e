"""The one or two DiTs of a checkpoint: which of them does a step, and where their weights are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint_files import read_json
from models.device import Device
from models.errors import ModelError
from models.lora import Adapter
from models.wan.graphs import ExpertGraphs
from models.wan.model import Rope, TextKeys, WanTransformer
from models.wan.spec import TransformerSpec, transformer_spec
from models.wan.text import TextHandle, stack_texts

HIGH, LOW = "high", "low"

# Slots of texts of several clips, counted from here on for each slot of one clip.
SEVERAL = 100


@dataclass(slots=True)
class Experts:
    """The experts of one checkpoint.

    boundary: timesteps at or above it go to the high-noise expert; None: there is one expert for all.
    read: one expert (this rank's part of it) from its folder, onto the device.
    swap: only the expert in use is in memory, the other is read again at each switch.
    as_graphs: what is compiled of an expert.
    """

    folders: dict[str, Path]
    spec: TransformerSpec
    boundary: float | None
    read: Callable[[Path], WanTransformer]
    device: Device
    swap: bool
    as_graphs: Callable[[WanTransformer], ExpertGraphs] = ExpertGraphs
    _graphs: dict[str, ExpertGraphs] = field(default_factory=dict)
    _texts: dict[tuple[str, int], tuple[tuple[str, ...], list[TextKeys]]] = field(default_factory=dict)

    def stage(self, timestep: float) -> str:
        """Which expert does the step at `timestep`."""
        return HIGH if self.boundary is None or timestep >= self.boundary else LOW

    def model(self, stage: str) -> WanTransformer:
        """The expert of a stage, read if it is not in memory."""
        return self.graphs(stage).model

    def graphs(self, stage: str) -> ExpertGraphs:
        """The same as graphs."""
        if stage not in self._graphs:
            if self.swap:
                self._graphs.clear()
                self._texts.clear()
            self._graphs[stage] = self.as_graphs(self.read(self.folders[stage]))
        return self._graphs[stage]

    def velocity(
        self, stage: str, slot: int, handles: Sequence[TextHandle], inputs: tuple[Tensor, Tensor, Rope]
    ) -> Tensor:
        """An expert's velocity [B, C, T, h, w] under a batch of texts; inputs: latents, timestep, rope tables.

        The first evaluation under a text makes its keys and values, the later ones take them.
        """
        latents, timestep, rope = inputs
        graphs = self.graphs(stage)
        keys = self._kept(stage, slot, handles)
        if keys is not None:
            return graphs.steady(latents, timestep, keys, rope)
        velocity, keys = graphs.first(latents, timestep, *stack_texts(handles, full=self.device.static_shapes), rope)
        self._keep(stage, slot, handles, keys)
        return velocity

    def velocity_of_clips(
        self, stage: str, slot: int, texts: Sequence[Sequence[TextHandle]], inputs: tuple[Tensor, Tensor, Rope]
    ) -> Tensor:
        """As `velocity` of N clips at once, latents [N, C, T, h, w]; each clip's texts make keys of their own.

        They all need equally many rows. Returns the clips' velocities under their texts, clip by clip.
        """
        latents, timestep, rope = inputs
        first = SEVERAL * (slot + 1)
        found = [self.text_keys(stage, first + number, handles) for number, handles in enumerate(texts)]
        return self.graphs(stage).steady(latents, timestep, [joined(layer) for layer in zip(*found, strict=True)], rope)

    def text_keys(self, stage: str, slot: int, handles: Sequence[TextHandle]) -> list[TextKeys]:
        """Keys and values of a batch of texts for each layer of an expert.

        The last texts of each slot (0: the prompt, 1: a negative prompt that runs on its own) are kept.
        """
        keys = self._kept(stage, slot, handles)
        if keys is None:
            keys = self.graphs(stage).keys(*stack_texts(handles, full=self.device.static_shapes))
            self._keep(stage, slot, handles, keys)
        return keys

    def _kept(self, stage: str, slot: int, handles: Sequence[TextHandle]) -> list[TextKeys] | None:
        ids, keys = self._texts.get((stage, slot), ((), None))
        return keys if ids == _ids(handles) else None

    def _keep(self, stage: str, slot: int, handles: Sequence[TextHandle], keys: list[TextKeys]) -> None:
        self._texts[stage, slot] = (_ids(handles), keys)


def joined(keys: Sequence[TextKeys]) -> TextKeys:
    """One layer's keys and values of several clips' texts, one after the other."""
    assert len({each.repeats for each in keys}) == 1
    return TextKeys(torch.cat([each.k for each in keys]), torch.cat([each.v for each in keys]), keys[0].repeats)


def _ids(handles: Sequence[TextHandle]) -> tuple[str, ...]:
    return tuple(handle.id for handle in handles)


def check_adapters(adapters: Sequence[Adapter], index: dict[str, Any]) -> None:
    """Raise ModelError("unsupported") for an adapter that names an expert which the checkpoint does not have."""
    known = ("", HIGH, LOW) if index.get("boundary_ratio") is not None else ("", HIGH)
    for adapter in adapters:
        if adapter.stage not in known:
            raise ModelError("unsupported", f"LoRA {adapter.path}: there is no expert {adapter.stage!r} in this model")


def load_experts(
    folder: Path,
    index: dict[str, Any],
    num_train_timesteps: int,
    read: Callable[[Path], WanTransformer],
    device: Device,
    *,
    swap: bool,
    as_graphs: Callable[[WanTransformer], ExpertGraphs] = ExpertGraphs,
) -> Experts:
    """The experts that a model_index.json names; raises ModelError("checkpoint" or "unsupported")."""
    ratio = index.get("boundary_ratio")
    folders = {HIGH: folder / "transformer"}
    if ratio is not None:
        folders[LOW] = folder / "transformer_2"
    specs = [transformer_spec(read_json(path / "config.json")) for path in folders.values()]
    if specs[0] != specs[-1]:
        raise ModelError("unsupported", f"{folder}: transformer and transformer_2 have different sizes")
    boundary = None if ratio is None else float(ratio) * num_train_timesteps
    experts = Experts(folders, specs[0], boundary, read, device, swap, as_graphs)
    if not swap:
        for stage in folders:
            experts.model(stage)
    return experts
