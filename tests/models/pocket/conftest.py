"""Shared parts of the pocket tests; the training helpers live beside the scripts."""

import sys
from pathlib import Path

import pytest

from models.pocket import spec

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))


@pytest.fixture(scope="session")
def pipe():
    import torch
    from diffusers import WanPipeline

    loaded = WanPipeline.from_pretrained(spec.WEIGHTS, torch_dtype=torch.float32, local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    return loaded
