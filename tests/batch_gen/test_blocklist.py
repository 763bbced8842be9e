"""Prompts that a studio does not render."""

import pytest

from batch_gen.blocklist import read_block_list
from batch_gen.errors import ConfigError


def test_patterns(tmp_path):
    """Patterns match without case anywhere in the cleaned prompt, comments and blank lines do not count."""
    path = tmp_path / "blocked.txt"
    path.write_text("# names\n\n\\bACME\\b\ngun(s)?\n")
    blocked = read_block_list(str(path))
    assert blocked.match("an acme   truck") == "blocked by blocked.txt, line 3"
    assert blocked.match("Guns&amp;roses") == "blocked by blocked.txt, line 4"
    assert blocked.match("an acmeist poem") is None


def test_none():
    """Without a list nothing is blocked."""
    assert read_block_list(None) is None


@pytest.mark.parametrize(
    ("body", "words"), [(b"a(\n", "line 1"), (b"#\n", "holds no pattern"), (b"\xff\xfe", "expected a text file")]
)
def test_wrong_files(tmp_path, body, words):
    """A broken pattern is named by its line; an empty list or no text is refused."""
    path = tmp_path / "blocked.txt"
    path.write_bytes(body)
    with pytest.raises(ConfigError, match=words):
        read_block_list(str(path))


def test_a_missing_file(tmp_path):
    """A file that is not there is refused before the run."""
    with pytest.raises(ConfigError, match="block-list"):
        read_block_list(str(tmp_path / "no.txt"))
