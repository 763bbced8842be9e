"""Fixtures that several test folders share."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from batch_gen.storage.base import Store


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A running SeaweedFS with the bucket `runs`; credentials are in the environment while it runs."""
    from tests.seaweed import ACCESS_KEY, REGION, SECRET_KEY, SeaweedServer

    server = SeaweedServer(tmp_path_factory.mktemp("seaweed"))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        environment.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        environment.setenv("AWS_DEFAULT_REGION", REGION)
        try:
            server.start().make_bucket("runs")
            yield server
        finally:
            server.stop()


@pytest.fixture
def s3_store(s3_server) -> Store:
    """A store on the server, below a prefix of its own."""
    from batch_gen.storage.base import StoreOptions, open_store

    return open_store(f"s3://runs/{uuid.uuid4().hex}", StoreOptions(endpoint_url=s3_server.endpoint))


@pytest.fixture(scope="session")
def tiny_variant(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a variant of the random checkpoint `tiny` to its folder, built once per session."""
    from models.wan.tiny import ensure_tiny

    cache = tmp_path_factory.mktemp("tiny")
    return lambda variant: ensure_tiny(cache, variant)


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_variant) -> Path:
    """The folder of the random checkpoint `tiny`; do not write into it."""
    return tiny_variant("default")
