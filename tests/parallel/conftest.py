"""The pool of ranks that all tests of this folder share."""

import pytest

from tests.parallel.pool import RankPool


@pytest.fixture(scope="session")
def pool():
    """Eight rank processes."""
    ranks = RankPool()
    yield ranks
    ranks.close()
