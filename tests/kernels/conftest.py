"""Where kernels run: on the NumPy stand-in, or with NKI_TEST_TARGET=simulate or device on the real package.

What PyPI holds under the name `nki` is a placeholder that raises ImportError.
"""

import pytest

from tests.nki_standin.target import TARGET

if TARGET != "standin":
    pytest.importorskip("nki", reason="the real nki package is not installed", exc_type=ImportError)


@pytest.fixture
def standin() -> None:
    """For tests of what only the stand-in has: several ranks, reports of work, refusals."""
    if TARGET != "standin":
        pytest.skip("only the stand-in simulates ranks, counts work and tracks memory")
