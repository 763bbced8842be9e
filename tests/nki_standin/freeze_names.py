"""Freeze the names of the public NKI API: functions, their parameters, classes and their members, nothing else.

Usage: python tests/nki_standin/freeze_names.py FOLDER, where FOLDER is `nki/api/nki` of a checkout of the AWS Neuron
documentation (importable stubs without bodies). It rewrites names.json beside this file.
"""

import ast
import json
import sys
from pathlib import Path

MODULES = {
    "nki": "__init__.py",
    "nki.language": "language/__init__.py",
    "nki.isa": "isa/__init__.py",
    "nki.collectives": "collectives/__init__.py",
}


def parameters(function: ast.FunctionDef) -> list[str]:
    args = function.args
    names = [arg.arg for arg in args.posonlyargs + args.args + args.kwonlyargs]
    return [name for name in names if name != "self"]


def members(node: ast.ClassDef) -> dict[str, list[str] | None]:
    found: dict[str, list[str] | None] = {}
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and not part.name.startswith("__init"):
            found[part.name] = parameters(part)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found[part.target.id] = None
        elif isinstance(part, ast.Assign):
            found.update({t.id: None for t in part.targets if isinstance(t, ast.Name)})
    return found


def names(source: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = parameters(node)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = members(node)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = None
        elif isinstance(node, ast.Assign):
            found.update({t.id: None for t in node.targets if isinstance(t, ast.Name)})
    return dict(sorted(found.items()))


def main() -> None:
    folder = Path(sys.argv[1])
    frozen = {module: names((folder / path).read_text()) for module, path in MODULES.items()}
    target = Path(__file__).with_name("names.json")
    target.write_text(json.dumps(frozen, indent=1) + "\n")


if __name__ == "__main__":
    main()
