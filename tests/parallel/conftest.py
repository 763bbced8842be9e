"""The pool of ranks that all tests of this folder share."""

import pytest

from models.wan.tiny import ensure_tiny
from tests.parallel.pool import RankPool


@pytest.fixture(scope="session")
def pool():
    """Eight rank processes."""
    ranks = RankPool()
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A folder with the random checkpoint: 8 heads, two experts."""
    return ensure_tiny(tmp_path_factory.mktemp("tiny"))
