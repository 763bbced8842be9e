"""Check that every dependency of pyproject.toml is pinned in scripts/constraints-cpu.txt, and installed as pinned.

Run: python scripts/check_constraints.py
"""

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Print what is wrong; the exit code is the number of faults, at most 1."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    pins = dict(
        line.split("==") for line in (ROOT / "scripts/constraints-cpu.txt").read_text().splitlines() if "==" in line
    )
    faults = []
    for requirement in wanted:
        name = _normal(re.match(r"[A-Za-z0-9._-]+", requirement)[0])
        if name not in pins:
            faults.append(f"{name} is not pinned in scripts/constraints-cpu.txt")
            continue
        installed = importlib.metadata.version(name).split("+")[0]
        if installed != pins[name]:
            faults.append(f"{name} {installed} is installed, {pins[name]} is pinned")
    print("\n".join(faults) or f"{len(wanted)} dependencies are pinned and installed as pinned")
    return bool(faults)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
