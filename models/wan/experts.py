"""The one or two DiTs of a checkpoint: which of them does a step, and where their weights are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from models.checkpoint_files import read_json
from models.device import Device
from models.errors import ModelError
from models.lora import Adapter
from models.wan.model import TextKeys, WanTransformer
from models.wan.spec import TransformerSpec, transformer_spec
from models.wan.text import TextHandle, stack_texts

HIGH, LOW = "high", "low"


@dataclass(slots=True)
class Experts:
    """The experts of one checkpoint.

    boundary: timesteps at or above it go to the high-noise expert; None: there is one expert for all.
    read: one expert (this rank's part of it) from its folder, onto the device.
    swap: only the expert in use is in memory, the other is read again at each switch.
    """

    folders: dict[str, Path]
    spec: TransformerSpec
    boundary: float | None
    read: Callable[[Path], WanTransformer]
    device: Device
    swap: bool
    _models: dict[str, WanTransformer] = field(default_factory=dict)
    _texts: dict[tuple[str, int], tuple[tuple[str, ...], list[TextKeys]]] = field(default_factory=dict)

    def stage(self, timestep: float) -> str:
        """Which expert does the step at `timestep`."""
        return HIGH if self.boundary is None or timestep >= self.boundary else LOW

    def model(self, stage: str) -> WanTransformer:
        """The expert of a stage, read if it is not in memory."""
        if stage not in self._models:
            if self.swap:
                self._models.clear()
                self._texts.clear()
            self._models[stage] = self.read(self.folders[stage])
        return self._models[stage]

    def text_keys(self, stage: str, slot: int, handles: Sequence[TextHandle]) -> list[TextKeys]:
        """Keys and values of a batch of texts for each layer of an expert.

        The last texts of each slot (0: the prompt, 1: a negative prompt that runs on its own) are kept.
        """
        ids = tuple(handle.id for handle in handles)
        kept = self._texts.get((stage, slot))
        if kept is not None and kept[0] == ids:
            return kept[1]
        model = self.model(stage)
        rows, repeats = stack_texts(handles, full=self.device.static_shapes)
        keys: list[TextKeys] = model.text_keys(rows, repeats)
        self._texts[stage, slot] = (ids, keys)
        return keys


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
    experts = Experts(folders, specs[0], boundary, read, device, swap)
    if not swap:
        for stage in folders:
            experts.model(stage)
    return experts
