"""Pipelines and reference runs that the parity tests share."""

from functools import cache

import pytest
import torch

from models.wan.pipeline import PipelineOptions, WanPipeline
from tests.parity.reference import run_reference


@pytest.fixture(scope="session")
def ours(tiny_variant):
    """A function from variant and options to our pipeline, loaded once."""

    @cache
    def load(variant="default", **options):
        return WanPipeline.load(tiny_variant(variant), PipelineOptions(**options))

    return load


@pytest.fixture(scope="session")
def traces(tiny_variant):
    """A function from variant, clip and solver to diffusers' traces of it, in float32 and in float64."""

    @cache
    def run(variant, clip, solver="unipc"):
        folder = tiny_variant(variant)
        return tuple(run_reference(folder, clip, solver, dtype)[1] for dtype in (torch.float32, torch.float64))

    return run
