"""Which pipeline renders a checkpoint: the `spec.py` of each package beside this file says. Imports no torch."""

import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from models.checkpoint_files import read_json
from models.errors import ModelError


@cache
def pipelines() -> Mapping[str, str]:
    """`_class_name` of a model_index.json -> "module:class" of the pipeline of ours."""
    found: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("*/spec.py")):
        module = importlib.import_module(f"models.{path.parent.name}.spec")
        found.update(getattr(module, "PIPELINES", {}))
    return found


@cache
def architectures() -> Mapping[str, Any]:
    """Published sizes by name, such as `wan2.2-t2v-a14b`."""
    found: dict[str, Any] = {}
    for path in sorted(Path(__file__).parent.glob("*/spec.py")):
        module = importlib.import_module(f"models.{path.parent.name}.spec")
        found.update(getattr(module, "ARCHITECTURES", {}))
    return found


def pipeline_name(folder: Path) -> str:
    """The class name that a checkpoint folder asks for; raises ModelError("checkpoint" or "unsupported")."""
    name = str(read_json(folder / "model_index.json").get("_class_name"))
    if name not in pipelines():
        known = ", ".join(sorted(pipelines()))
        raise ModelError("unsupported", f"{folder}: pipeline {name!r} is not supported; supported: {known}")
    return name


def load_pipeline_class(folder: Path) -> Any:
    """The class that renders the checkpoint in `folder`; this imports torch."""
    module, _, name = pipelines()[pipeline_name(folder)].partition(":")
    return getattr(importlib.import_module(module), name)
