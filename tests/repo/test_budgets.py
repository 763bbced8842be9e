"""The code keeps its shape: functions, files and nesting within budgets, docstrings where the public looks."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("batch_gen", "models", "kernels")
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
MAX_FILE_LINES = 400
MAX_NESTING = 4
NESTS = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources():
    """Every Python file of the product."""
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@cache
def parse(path):
    """The syntax tree of a file."""
    return ast.parse(path.read_text("utf-8"))


def functions():
    """Every function of the product with its file."""
    for path in sources():
        for node in ast.walk(parse(path)):
            if isinstance(node, FUNCTIONS):
                yield path.relative_to(ROOT).as_posix(), node


def length(node):
    """Lines of a function without its docstring."""
    lines = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def depth(node, level=0):
    """Deepest nesting of control flow; `elif` does not nest."""
    deepest = level
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTIONS):
            continue
        is_elif = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        deepest = max(deepest, depth(child, level + (isinstance(child, NESTS) and not is_elif)))
    return deepest


def test_no_function_is_long():
    """No function is longer than 60 lines, no NKI kernel longer than 120, docstrings not counted."""
    limit = lambda name: MAX_KERNEL_LINES if name.endswith("_nki.py") else MAX_FUNCTION_LINES  # noqa: E731
    long = [
        f"{name}:{node.lineno} {node.name} {length(node)}" for name, node in functions() if length(node) > limit(name)
    ]
    assert not long, "split these functions: " + ", ".join(long)


def test_functions_are_short_as_a_rule():
    """The median function has at most 10 lines and 95 of 100 at most 45."""
    lengths = sorted(length(node) for name, node in functions() if not name.endswith("_nki.py"))
    assert lengths[len(lengths) // 2] <= 10
    assert lengths[int(len(lengths) * 0.95)] <= 45


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_is_long(package):
    """No file of the product is longer than 400 lines."""
    long = [
        f"{path.relative_to(ROOT)} {count}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if (count := len(path.read_text("utf-8").splitlines())) > MAX_FILE_LINES
    ]
    assert not long, "split these files: " + ", ".join(long)


def test_nesting_is_shallow():
    """Control flow nests at most four deep."""
    deep = [
        f"{name}:{node.lineno} {node.name} {depth(node)}" for name, node in functions() if depth(node) > MAX_NESTING
    ]
    assert not deep, "flatten these functions: " + ", ".join(deep)


def test_public_tensor_functions_give_shapes():
    """Public modules of models and kernels that take tensors say shapes in brackets somewhere in their docstring."""
    silent = []
    for name, node in functions():
        if not name.startswith(
            ("models/wan/model", "models/vae/model", "models/umt5/model", "kernels/")
        ) or name.endswith("_nki.py"):
            continue
        takes = any("Tensor" in ast.unparse(arg.annotation) for arg in node.args.args if arg.annotation)
        doc = ast.get_docstring(node)
        if takes and not node.name.startswith("_") and doc is not None and "[" not in doc and node.name != "forward":
            silent.append(f"{name}:{node.lineno} {node.name}")
    assert not silent, "give shapes such as [B, L, D]: " + ", ".join(silent)
