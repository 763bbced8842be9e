"""Manifests: Parquet files of rows, checked whole before any weight is read, then streamed as requests.

sources -> canon -> checks -> identity -> survey -> requests
files      types    rules     ids         warnings  one per clip
"""

from batch_gen.manifest.options import (
    Location,
    ManifestOptions,
    ManifestSource,
    TokenCounter,
    local_source,
    parse_overrides,
    read_ids,
)
from batch_gen.manifest.read import Manifest, read_manifest
from batch_gen.manifest.survey import Survey, Warned

__all__ = [
    "Location",
    "Manifest",
    "ManifestOptions",
    "ManifestSource",
    "Survey",
    "TokenCounter",
    "Warned",
    "local_source",
    "parse_overrides",
    "read_ids",
    "read_manifest",
]
