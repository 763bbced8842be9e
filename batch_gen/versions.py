"""Versions of what makes a clip, for run.json and records; imports none of it."""

from __future__ import annotations

import importlib.metadata
import platform
from functools import cache

from batch_gen import __version__

_PACKAGES = ("torch", "diffusers", "transformers", "tokenizers", "safetensors", "numpy", "imageio-ffmpeg")
_DEVICE_PACKAGES = ("torch-neuronx", "neuronx-cc", "nki")


@cache
def versions() -> dict[str, str]:
    """`{"batch-gen": ..., "python": ..., "torch": ...}`; device packages appear where they are installed."""
    found = {"batch-gen": __version__, "python": platform.python_version()}
    for name in (*_PACKAGES, *_DEVICE_PACKAGES):
        version = _version(name)
        if version is not None:
            found[name] = version
    return found


@cache
def cpu_class() -> str:
    """The processor's name: another one may give other bits."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
