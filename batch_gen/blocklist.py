"""`--block-list`: prompts that this studio does not render. One regular expression a line, case does not count.

A blocked row is set aside before anything is spent on it, with the pattern's line in its error row; the rest goes on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from batch_gen.errors import ConfigError
from batch_gen.request import clean_prompt


@dataclass(frozen=True, slots=True)
class BlockList:
    """Patterns with the lines that they stand in."""

    source: str
    patterns: tuple[tuple[int, re.Pattern[str]], ...]

    def match(self, prompt: str) -> str | None:
        """Why a prompt is blocked, None when it is not; the prompt is looked at as the model would see it."""
        cleaned = clean_prompt(prompt)
        for line, pattern in self.patterns:
            if pattern.search(cleaned):
                return f"blocked by {self.source}, line {line}"
        return None


def read_block_list(path: str | None) -> BlockList | None:
    """Read a block list; None when there is none.

    Raises:
        ConfigError: unreadable, without a pattern, or a line that is no regular expression.
    """
    if path is None:
        return None
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--block-list {path}: {error}; expected a text file with one pattern a line") from error
    patterns = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            patterns.append((number, re.compile(line.strip(), re.IGNORECASE)))
        except re.error as error:
            raise ConfigError(f"--block-list {path}, line {number}: {error}; write \\ before special signs") from error
    if not patterns:
        raise ConfigError(f"--block-list {path}: holds no pattern")
    return BlockList(Path(path).name, tuple(patterns))
