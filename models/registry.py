"""Which pipeline renders a checkpoint: the `spec.py` of each package beside this file says. Imports no torch."""

import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from models.checkpoint_files import read_json
from models.entry import PipelineEntry
from models.errors import ModelError


@cache
def pipelines() -> Mapping[str, PipelineEntry]:
    """`_class_name` of a model_index.json -> the pipeline of ours that renders it."""
    return discover(Path(__file__).parent, "models", "PIPELINES")


@cache
def architectures() -> Mapping[str, Any]:
    """Published sizes by name, such as `wan2.2-t2v-a14b`."""
    return discover(Path(__file__).parent, "models", "ARCHITECTURES")


def discover(folder: Path, package: str, table: str) -> dict[str, Any]:
    """The entries of a table in every `spec.py` one level below a package's folder.

    Raises ValueError when two packages claim one name.
    """
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*/spec.py")):
        module = importlib.import_module(f"{package}.{path.parent.name}.spec")
        entries = getattr(module, table, {})
        twice = sorted(set(found) & set(entries))
        if twice:
            raise ValueError(f"{path}: {table} of another package has {', '.join(twice)} too")
        found.update(entries)
    return found


def entry_of(index: Mapping[str, Any], where: object) -> PipelineEntry:
    """The pipeline for a model_index.json that was read from `where`; raises ModelError("unsupported")."""
    name = str(index.get("_class_name"))
    if name not in pipelines():
        known = ", ".join(sorted(pipelines()))
        raise ModelError("unsupported", f"{where}: pipeline {name!r} is not supported; supported: {known}")
    return pipelines()[name]


def load_pipeline_class(folder: Path) -> Any:
    """The class that renders the checkpoint in `folder`; this imports torch.

    Raises ModelError("checkpoint" or "unsupported").
    """
    return load_entry(entry_of(read_json(folder / "model_index.json"), folder))


def load_entry(entry: PipelineEntry) -> Any:
    """The class that an entry names; this imports torch."""
    module, _, name = entry.path.partition(":")
    return getattr(importlib.import_module(module), name)
