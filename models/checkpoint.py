"""Reading safetensors checkpoints: which file holds a key, whole tensors or one rank's slices, exact key sets.

Only safetensors is read: the other formats run code when they are opened.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from models.checkpoint_files import read_json
from models.errors import ModelError
from models.fp8_checkpoint import FP8_DTYPES, plain, scale_keys

MAX_NAMES_SHOWN = 8
Transform = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class ReadCounter:
    """Bytes of tensors that this process has read from checkpoints."""

    num_bytes: int = 0

    def add(self, tensor: Tensor) -> None:
        """Count one tensor or slice."""
        self.num_bytes += tensor.numel() * tensor.element_size()


READ = ReadCounter()


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `index` of `count` equal parts of a tensor along `dim`."""

    dim: int
    index: int
    count: int

    def of(self, size: int, what: str) -> slice:
        """This part of `size` elements; raises ModelError("unsupported") when it does not divide."""
        if size % self.count:
            raise ModelError("unsupported", f"{what}: {size} elements do not divide into {self.count} parts")
        part = size // self.count
        return slice(self.index * part, (self.index + 1) * part)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a parameter of ours comes from.

    The tensors under `keys` are read (each sliced alone, so that a fused projection can be sharded), each goes through
    its entry of `transforms` (none: as it is), and they are joined along dim 0. `aliases` are further keys that may
    hold the same data and are not read.
    """

    keys: tuple[str, ...]
    transforms: tuple[Transform | None, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(slots=True)
class Checkpoint:
    """One folder of safetensors files; tensors are read on demand."""

    folder: Path
    files: dict[str, Path]
    scales: dict[str, tuple[str, Path]] = field(default_factory=dict)  # of FP8 weights: key and file of the scale
    _handles: dict[Path, Any] = field(default_factory=dict)

    def keys(self) -> set[str]:
        """Every key of the folder."""
        return set(self.files)

    def read(self, key: str, shard: Shard | None = None) -> Tensor:
        """The tensor under `key` in its stored dtype (FP8: times its scale, in float32), or one part of it.

        Nothing else is read from the file.
        """
        handle = self._handle(self.files[key])
        if shard is None:
            tensor: Tensor = handle.get_tensor(key)
            index: tuple[slice, ...] = ()
        else:
            view = handle.get_slice(key)
            part = shard.of(view.get_shape()[shard.dim], f"{self.folder}: {key}")
            index = (*(slice(None) for _ in range(shard.dim)), part)
            tensor = view[index]
        READ.add(tensor)
        if tensor.dtype not in FP8_DTYPES or tensor.ndim != 2:
            return tensor
        rows, columns = (*index, slice(None), slice(None))[:2]
        return plain(tensor, self._scale(key), rows, columns, f"{self.folder}: {key}")

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the tensor under `key`, from the file's head."""
        return tuple(self._handle(self.files[key]).get_slice(key).get_shape())

    def _scale(self, key: str) -> Tensor | None:
        if key not in self.scales:
            return None
        name, path = self.scales[key]
        scale: Tensor = self._handle(path).get_tensor(name)
        return scale

    def close(self) -> None:
        """Forget the open files (tensors that were read stay valid)."""
        self._handles.clear()

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            self._handles[path] = _open(path)
        return self._handles[path]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")  # type: ignore[no-untyped-call,unused-ignore]
    except (OSError, SafetensorError) as error:
        raise ModelError("checkpoint", f"{path}: not a readable safetensors file ({error}); fetch it again") from error


def open_checkpoint(folder: Path) -> Checkpoint:
    """Find every tensor of a folder, by its index file or by its files.

    Raises ModelError("checkpoint") when files are missing, or when two files hold one key.
    """
    if not folder.is_dir():
        raise ModelError("checkpoint", f"{folder}: folder not found; the checkpoint is incomplete")
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise ModelError("checkpoint", f"{folder}: {len(indices)} index files, expected one: {_names(indices)}")
    files = _files_of_index(indices[0]) if indices else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            "checkpoint", f"{folder}: no *.safetensors file; other formats are not read, convert them first"
        )
    return _scan(folder, files)


def _files_of_index(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError("checkpoint", f"{index}: no weight_map; fetch the index again")
    files = sorted({index.parent / str(name) for name in weight_map.values()})
    absent = [path for path in files if not path.is_file()]
    if absent:
        raise ModelError("checkpoint", f"{index}: {len(absent)} of its files are missing: {_names(absent)}")
    return files


def _scan(folder: Path, files: list[Path]) -> Checkpoint:
    checkpoint = Checkpoint(folder, {})
    for path in files:
        handle = checkpoint._handle(path)  # noqa: SLF001 -- its own constructor
        for key in handle.keys():  # noqa: SIM118 -- a file handle, not a mapping
            if key in checkpoint.files:
                both = f"{checkpoint.files[key].name} and {path.name}"
                raise ModelError("checkpoint", f"{folder}: key {key!r} is in {both}; remove the stale file")
            checkpoint.files[key] = path
    scales, others = scale_keys(checkpoint.files)
    checkpoint.scales = {key: (name, checkpoint.files[name]) for key, name in scales.items()}
    for key in others:
        del checkpoint.files[key]
    return checkpoint


def check_keys(checkpoint: Checkpoint, sources: Mapping[str, Source], beside: Mapping[str, Source]) -> None:
    """Each key is read by one parameter, none is missing, none is left over; else ModelError("checkpoint").

    beside: of another module in the same files, whose keys are not read here.
    """
    counts = Counter(key for source in sources.values() for key in source.keys)
    allowed = {alias for source in sources.values() for alias in source.aliases}
    allowed |= {key for source in beside.values() for key in source.keys}
    faults = {
        "missing": [key for key in counts if key not in checkpoint.files],
        "unexpected": [key for key in checkpoint.files if key not in counts and key not in allowed],
        "mapped twice": [key for key, count in counts.items() if count > 1],
    }
    text = "; ".join(f"{len(keys)} {fault}: {_names(sorted(keys))}" for fault, keys in faults.items() if keys)
    if text:
        raise ModelError("checkpoint", f"{checkpoint.folder}: weights do not fit the config: {text}")


def load_parameters(
    module: nn.Module,
    checkpoint: Checkpoint,
    sources: Mapping[str, Source],
    dtype_of: Callable[[str], torch.dtype],
    shard_of: Callable[[str], Shard | None] = lambda _name: None,
    beside: Mapping[str, Source] | None = None,
) -> None:
    """Give each parameter of `module` (built on the meta device) its tensor, one at a time.

    `dtype_of` names a parameter's dtype, `shard_of` the part that this rank owns; `beside`: see `check_keys`. Raises
    ModelError("checkpoint") when keys or whole shapes do not fit the module.
    """
    check_keys(checkpoint, sources, beside or {})
    parameters = dict(module.named_parameters())
    if set(parameters) != set(sources):
        raise AssertionError(f"sources and module differ: {sorted(set(parameters) ^ set(sources))}")
    for name, parameter in parameters.items():
        shard = shard_of(name)
        tensor = _assemble(checkpoint, sources[name], shard)
        if shard is None and tensor.shape != parameter.shape:
            found, wanted = list(tensor.shape), list(parameter.shape)
            raise ModelError(
                "checkpoint", f"{checkpoint.folder}: {name} has shape {found}, the config asks for {wanted}"
            )
        owner, _, attribute = name.rpartition(".")
        value = nn.Parameter(tensor.to(dtype_of(name)), requires_grad=False)
        setattr(module.get_submodule(owner), attribute, value)
    checkpoint.close()


def _assemble(checkpoint: Checkpoint, source: Source, shard: Shard | None) -> Tensor:
    parts = [checkpoint.read(key, shard) for key in source.keys]
    for index, transform in enumerate(source.transforms):
        if transform is not None:
            parts[index] = transform(parts[index])
    # Always a copy: what safetensors returns may lie in the mapped file, badly aligned and slow on its first touch.
    return torch.cat(parts)


def _names(items: Iterable[object]) -> str:
    names = [item.name if isinstance(item, Path) else str(item) for item in items]
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more
