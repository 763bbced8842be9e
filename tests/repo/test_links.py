"""Links inside the repository lead somewhere."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def pages():
    """Every Markdown page that git tracks."""
    done = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("page", pages())
def test_relative_links_exist(page):
    """Each relative link and image of a page names a file of the repository."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text("utf-8"), flags=re.DOTALL)
    targets = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", text)
    missing = [target for target in targets if not ((ROOT / page).parent / target).exists()]
    assert not missing
