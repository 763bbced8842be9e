"""The tests keep their own habits."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def all_tests():
    """Every test function with its file."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield path.relative_to(ROOT).as_posix(), node


def test_every_test_states_its_promise():
    """Each test has a docstring that says which promise it keeps."""
    silent = [f"{name}:{node.lineno} {node.name}" for name, node in all_tests() if not ast.get_docstring(node)]
    assert not silent, "say the promise: " + ", ".join(silent)


def test_every_test_can_fail():
    """Each test asserts something: by assert, by pytest.raises, or through a helper named check_ or assert_."""
    empty = []
    for name, node in all_tests():
        checks = any(
            isinstance(child, ast.Assert)
            or (
                isinstance(child, ast.Call)
                and any(word in ast.unparse(child.func) for word in ("raises", "warns", "assert", "check", "expect"))
            )
            for child in ast.walk(node)
        )
        if not checks:
            empty.append(f"{name}:{node.lineno} {node.name}")
    assert not empty, "assert something: " + ", ".join(empty)


def test_skips_are_listed():
    """Every skip and expected failure in the tests is named in docs/testing.md with its reason."""
    listed = (ROOT / "docs/testing.md").read_text("utf-8")
    marks = ("pytest.skip(", "mark.skip", "mark.xfail", "importorskip(")
    unlisted = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path != Path(__file__)
        and any(mark in path.read_text("utf-8") for mark in marks)
        and path.relative_to(ROOT).as_posix() not in listed
    ]
    assert not unlisted, "docs/testing.md must list: " + ", ".join(unlisted)
