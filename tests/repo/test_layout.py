"""The top level is what the design says, and the packages import as they promise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {
    "batch_gen", "models", "kernels", "manifests", "scripts", "tests", "pyproject.toml", "README.md",
    "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "docs",
}  # fmt: skip


def tracked():
    """Names of all files that git tracks."""
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def loaded_by(code):
    """Modules that a fresh interpreter has loaded after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_top_level():
    """The top level holds exactly the named entries, beside dot files."""
    entries = {name.split("/")[0] for name in tracked()}
    assert {name for name in entries if not name.startswith(".")} == TOP_LEVEL


def test_manifests_hold_no_python():
    """manifests/ is data."""
    assert not [name for name in tracked() if name.startswith("manifests/") and name.endswith(".py")]


@pytest.mark.parametrize("package", ["kernels", "models"])
def test_package_roots_are_docstrings(package):
    """`import kernels` and `import models` load nothing else: transformers may import the former by accident."""
    loaded = loaded_by(f"import {package}")
    assert not loaded & {"torch", "nki", "torch_neuronx", "transformers", "diffusers", "numpy"}


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["models"]])
def test_the_command_line_loads_no_torch(arguments):
    """Help and listings import neither torch nor the heavy libraries."""
    code = f"from batch_gen.cli import invoke; invoke({arguments!r})"
    assert not loaded_by(code) & {"torch", "transformers", "diffusers", "pyarrow", "boto3", "matplotlib"}


def test_the_repository_speaks_of_itself_alone():
    """No absolute paths of one machine, no registry hosts, no unfinished marks."""
    dot = r"\."
    words = [
        f"/wo{'rk'}/main",
        f"bash{'_'}jobs",
        f"files{dot}python{'hosted'}",
        f"registry{dot}npm{'js'}",
        "TO" + "DO",
        "FIX" + "ME",
    ]
    pattern = "|".join(words)
    done = subprocess.run(
        ["git", "grep", "-nIE", pattern, "--", "."], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == ""


def test_the_environment_is_read_in_three_places():
    """Only cli.py, environment.py and models/device.py read the process environment."""
    done = subprocess.run(
        ["git", "grep", "-lE", r"os\.environ|os\.getenv", "--", "batch_gen", "models", "kernels"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert set(done.stdout.split()) <= {"batch_gen/cli.py", "batch_gen/environment.py", "models/device.py"}
