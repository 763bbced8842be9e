"""LoRA files: low-rank changes of weights, merged when a checkpoint is read, into whole tensors or one rank's slices.

Key forms: diffusers and PEFT (`transformer.<layer>.lora_A.weight`), the original repository's layer names as most
community files have them (`diffusion_model.<layer>.lora_down.weight`, with `.alpha`, `.diff` and `.diff_b`), and names
joined by underscores (`lora_unet_<layer>.lora_up.weight`). Which layer a name means is looked up among the checkpoint's
own keys; a name that means none is an error, never skipped.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.checkpoint import MAX_NAMES_SHOWN, Checkpoint, Shard
from models.errors import ModelError

PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.", "transformer_2.")
JOINED = ("lora_unet_", "lora_transformer_")
SECOND = "transformer_2."  # diffusers' prefix for the second expert
_ROLES = {
    ".lora_A.weight": "down",
    ".lora_A.default.weight": "down",
    ".lora_down.weight": "down",
    ".lora_B.weight": "up",
    ".lora_B.default.weight": "up",
    ".lora_up.weight": "up",
    ".alpha": "alpha",
    ".diff": "diff",
    ".diff_b": "diff_b",
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """One LoRA file and how much of it: `stage` is "high" or "low" for one expert, "" for each that it names."""

    path: str
    strength: float = 1.0
    stage: str = ""


@dataclass(slots=True)
class Change:
    """What one file adds to one tensor: scale * up @ down, or scale * diff."""

    scale: float
    up: Tensor | None = None
    down: Tensor | None = None
    diff: Tensor | None = None

    def add_to(self, tensor: Tensor, shard: Shard | None) -> Tensor:
        """A whole tensor or a shard of it, float32, plus this change."""
        if self.diff is not None:
            return tensor + self.scale * _part(self.diff, shard).float().view(tensor.shape)
        assert self.up is not None
        assert self.down is not None
        up, down = self.up.flatten(1), self.down.flatten(1)
        if shard is not None:
            up = _part(up, shard) if shard.dim == 0 else up
            down = _part(down, shard) if shard.dim == 1 else down
        return tensor + self.scale * (up.float() @ down.float()).view(tensor.shape)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the change, as a matrix."""
        if self.diff is not None:
            return self.diff.shape[0], self.diff[0].numel()
        assert self.up is not None
        assert self.down is not None
        return self.up.shape[0], self.down[0].numel()


def _part(tensor: Tensor, shard: Shard | None) -> Tensor:
    if shard is None:
        return tensor
    part = shard.of(tensor.shape[shard.dim], "LoRA")
    return tensor[(*(slice(None) for _ in range(shard.dim)), part)]


@dataclass(slots=True)
class MergedCheckpoint(Checkpoint):
    """A checkpoint whose tensors come with the adapters' changes; a changed tensor comes in float32."""

    changes: dict[str, list[Change]] = field(default_factory=dict)

    def read(self, key: str, shard: Shard | None = None) -> Tensor:
        """As `Checkpoint.read`."""
        tensor = Checkpoint.read(self, key, shard)
        for change in self.changes.get(key, ()):
            tensor = change.add_to(tensor.float(), shard)
        return tensor


def merged(
    checkpoint: Checkpoint, adapters: Iterable[Adapter], stage: str, names: Callable[[str], Iterable[str]]
) -> Checkpoint:
    """The checkpoint of expert `stage` with its adapters; the very same one when none of them changes it.

    names: other names of a layer, given its name in the checkpoint. A strength of 0 changes nothing, bit for bit.
    Raises ModelError("checkpoint"): unreadable file, unknown layers, wrong shapes.
    """
    wanted = [adapter for adapter in adapters if adapter.stage in ("", stage)]
    layers = _layer_names(checkpoint, names) if wanted else {}
    changes: dict[str, list[Change]] = {}
    for adapter in wanted:
        for key, change in read_changes(adapter, layers, stage).items():
            _check_shape(checkpoint, key, change, adapter)
            if adapter.strength != 0:
                changes.setdefault(key, []).append(change)
    if not changes:
        return checkpoint
    return MergedCheckpoint(checkpoint.folder, checkpoint.files, checkpoint.scales, changes=changes)


def _layer_names(checkpoint: Checkpoint, names: Callable[[str], Iterable[str]]) -> dict[str, str]:
    """Every name of a layer -> its name in the checkpoint."""
    layers: dict[str, str] = {}
    for key in checkpoint.files:
        layer = key.removesuffix(".weight")
        if layer == key:
            continue
        for name in (layer, *names(layer)):
            layers[name] = layer
            layers |= {prefix + name.replace(".", "_"): layer for prefix in JOINED}
    return layers


def read_changes(adapter: Adapter, layers: Mapping[str, str], stage: str) -> dict[str, Change]:
    """Checkpoint key -> what the adapter adds to it on expert `stage`; raises ModelError("checkpoint")."""
    tensors, metadata = _read(Path(adapter.path))
    both = any(name.startswith(SECOND) for name in tensors) and any(not name.startswith(SECOND) for name in tensors)
    if both:
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(SECOND) == (stage == "low")}
    found: dict[str, dict[str, Tensor]] = {}
    unknown = []
    for name, tensor in tensors.items():
        role = next((end for end in _ROLES if name.endswith(end)), "")
        layer = layers.get(_bare(name.removesuffix(role)))
        if not role or layer is None:
            unknown.append(name)
            continue
        found.setdefault(layer, {})[_ROLES[role]] = tensor
    if unknown or not found:
        what = f"{len(unknown)} of its keys mean no layer of this model: {_some(unknown)}" if unknown else "no keys"
        raise ModelError("checkpoint", f"LoRA {adapter.path}: {what}; is it made for another model?")
    changes: dict[str, Change] = {}
    for layer, parts in found.items():
        changes |= _changes_of(layer, parts, adapter, _stated_scale(metadata, adapter))
    return changes


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if path.suffix != ".safetensors":
        raise ModelError("checkpoint", f"LoRA {path}: only safetensors files are read; convert it first")
    try:
        with safe_open(path, framework="pt") as handle:  # type: ignore[no-untyped-call,unused-ignore]
            return {name: handle.get_tensor(name) for name in handle.keys()}, handle.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError("checkpoint", f"LoRA {path}: not a readable safetensors file ({error})") from error


def _bare(name: str) -> str:
    """A layer's name without what frameworks put before it."""
    while True:
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
        if not prefix:
            return name
        name = name.removeprefix(prefix)


def _stated_scale(metadata: Mapping[str, str], adapter: Adapter) -> float | None:
    """The factor alpha / rank as diffusers' metadata states it for the whole file; None where it says nothing."""
    text = metadata.get("lora_adapter_metadata")
    if text is None:
        return None
    try:
        stated: dict[str, Any] = {name.rpartition(".")[2]: value for name, value in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise ModelError("checkpoint", f"LoRA {adapter.path}: its metadata is not a JSON object ({error})") from error
    odd = [name for name in ("alpha_pattern", "rank_pattern", "use_dora", "use_rslora") if stated.get(name)]
    if odd:
        raise ModelError("unsupported", f"LoRA {adapter.path}: {', '.join(odd)} in its metadata is not supported")
    if "lora_alpha" not in stated or "r" not in stated:
        return None
    try:
        return float(stated["lora_alpha"]) / float(stated["r"])
    except (ValueError, TypeError, ZeroDivisionError) as error:
        what = f"lora_alpha {stated['lora_alpha']!r} over r {stated['r']!r}"
        raise ModelError("checkpoint", f"LoRA {adapter.path}: {what} in its metadata is no factor") from error


def _changes_of(layer: str, parts: dict[str, Tensor], adapter: Adapter, stated: float | None) -> dict[str, Change]:
    changes: dict[str, Change] = {}
    if ("up" in parts) != ("down" in parts) or set(parts) == {"alpha"}:
        raise ModelError("checkpoint", f"LoRA {adapter.path}: {layer} has {', '.join(sorted(parts))} alone")
    if "diff" in parts and "up" in parts:
        raise ModelError("unsupported", f"LoRA {adapter.path}: {layer} has both a difference and a low-rank change")
    if "up" in parts:
        up, down = parts["up"], parts["down"]
        if up.ndim < 2 or down.ndim < 2 or up[0].numel() != down.shape[0]:
            shapes = f"{list(up.shape)} and {list(down.shape)}"
            raise ModelError("checkpoint", f"LoRA {adapter.path}: {layer}: shapes {shapes} do not multiply")
        scale = 1.0 if stated is None else stated
        if "alpha" in parts:
            scale = float(parts["alpha"]) / down.shape[0]
        changes[f"{layer}.weight"] = Change(adapter.strength * scale, up=up, down=down)
    if "diff" in parts:
        changes[f"{layer}.weight"] = Change(adapter.strength, diff=parts["diff"])
    if "diff_b" in parts:
        changes[f"{layer}.bias"] = Change(adapter.strength, diff=parts["diff_b"])
    return changes


def _check_shape(checkpoint: Checkpoint, key: str, change: Change, adapter: Adapter) -> None:
    if key not in checkpoint.files:
        raise ModelError("checkpoint", f"LoRA {adapter.path}: {key} is no tensor of {checkpoint.folder}")
    shape = checkpoint.shape(key)
    matrix = shape[0], torch.Size(shape[1:]).numel()
    if change.shape != matrix:
        found, wanted = list(change.shape), list(matrix)
        raise ModelError("checkpoint", f"LoRA {adapter.path}: {key}: its change has shape {found}, the weight {wanted}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(sorted(names)[:MAX_NAMES_SHOWN]) + more
