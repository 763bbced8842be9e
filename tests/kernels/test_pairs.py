"""Each kernel stands beside its reference with the same signature, documents its limits, and keeps to the language."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import backend
from tests.nki_standin import target  # noqa: F401 - says what `import nki` finds

import nki  # isort: skip
import nki.collectives  # isort: skip
import nki.isa  # isort: skip
import nki.language  # isort: skip

ROOT = Path(__file__).resolve().parents[2]
NAMES = json.loads((ROOT / "tests/nki_standin/names.json").read_text("utf-8"))
FILES = sorted((ROOT / "kernels").glob("*_nki.py"))
HEADINGS = ("Dimensions:", "Args:", "Returns:", "Limits:", "Pseudocode:")
HELPERS = {"tiles_nki.py"}
ALIASES = {"nki": "nki", "nl": "nki.language", "nisa": "nki.isa", "ncc": "nki.collectives"}
TRN3_ONLY = {
    "nc_matmul_mx",
    "quantize_mx",
    "exponential",
    "activate2",
    "abs_max",
    "abs_min",
    "float8_e4m3fn",
    "priority",
    "indirect",
}
ALLOWED_IMPORTS = re.compile(r"nki(\.language|\.isa|\.collectives)?|kernels\.\w+_nki|typing|collections\.abc")


def function_of(op):
    """The plain Python function of a twin."""
    kernel = getattr(importlib.import_module(backend.TWINS[op]), op)
    return getattr(kernel, "func", kernel)


def reference_of(op):
    """The contract of an operator; `adaln_norm` is the case of adaln without a residual."""
    module = importlib.import_module(backend.TWINS[op].removesuffix("_nki"))
    return getattr(module, op, None)


@pytest.mark.parametrize("op", [op for op in backend.TWINS if op != "adaln_norm"])
def test_twins_have_one_signature(op):
    """Names, order and defaults of the parameters are the same in `<op>.py` and `<op>_nki.py`."""
    ours, theirs = (inspect.signature(f).parameters.values() for f in (reference_of(op), function_of(op)))
    constants = {"FP8_MAX_TRN2": 240.0}
    assert [(p.name, constants.get(p.default, p.default)) for p in ours] == [(p.name, p.default) for p in theirs]


def test_the_norm_alone_takes_what_adaln_takes():
    """`adaln_norm` has adaln's parameters without residual and gate."""
    whole = [
        name for name in inspect.signature(reference_of("adaln")).parameters if name not in {"residual_BLD", "gate"}
    ]
    assert list(inspect.signature(function_of("adaln_norm")).parameters) == whole


@pytest.mark.parametrize("op", backend.TWINS)
def test_kernels_document_their_limits(op):
    """The docstring has its five parts, and every limit that it names stands there with its value."""
    text = function_of(op).__doc__
    assert [heading for heading in HEADINGS if heading not in text] == []
    modules = [importlib.import_module(name) for name in (backend.TWINS[op], "kernels.attention_nki")]
    named = set(re.findall(r"\b[A-Z][A-Z0-9]*_[A-Z0-9_]+\b", text))
    assert named
    for name in named:
        value = next(getattr(module, name) for module in modules if hasattr(module, name))
        if not isinstance(value, tuple):
            assert f"{name} = {value:g}" in text or name == "MIN_DENOMINATOR"


def test_every_kernel_file_is_a_twin():
    """Every `<op>_nki.py` but the shared tiles stands beside `<op>.py`, and the switch knows it."""
    twins = {path.name for path in FILES} - HELPERS
    assert {f"{module.removeprefix('kernels.')}.py" for module in backend.TWINS.values()} == twins
    assert [name for name in twins if not (ROOT / "kernels" / name.replace("_nki.py", ".py")).exists()] == []


def test_constants_of_both_sides_agree():
    """Numbers that reference and kernel must share are the same."""
    pairs = [
        ("ring_attention_constmax", "MIN_DENOMINATOR", "MIN_DENOMINATOR"),
        ("fp8_matmul", "FP8_MAX_TRN2", "FP8_MAX_TRN2"),
        ("fp8_matmul", "AMAX_FLOOR", "AMAX_FLOOR"),
        ("fp8_matmul", "CONTRACTION_TILE", "CONTRACTION_TILE"),
    ]
    for module, ours, theirs in pairs:
        reference, kernel = (importlib.import_module(f"kernels.{module}{end}") for end in ("", "_nki"))
        assert getattr(reference, ours) == getattr(kernel, theirs)
    conv = importlib.import_module("kernels.conv3d"), importlib.import_module("kernels.conv3d_nki")
    assert pytest.approx(conv[1].SQUARE_FLOOR) == conv[0].NORM_FLOOR ** 2
    assert (
        importlib.import_module("kernels.adaln_nki").AMAX_FLOOR
        == importlib.import_module("kernels.fp8_matmul").AMAX_FLOOR
    )


def calls(tree):
    """(alias, name, call) of every call of the nki modules."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ) and node.func.value.id in ALIASES:
            yield node.func.value.id, node.func.attr, node


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kernels_call_the_documented_api(path):
    """Every name of nki that a kernel uses is documented, and every argument has a documented keyword."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ALIASES:
            assert node.attr in NAMES[ALIASES[node.value.id]], f"{node.value.id}.{node.attr}"
    for alias, name, call in calls(tree):
        known = NAMES[ALIASES[alias]][name]
        if isinstance(known, list):
            assert {k.arg for k in call.keywords} <= set(known), f"{alias}.{name}"
            assert len(call.args) <= len(known)
            assert not (alias == "nisa" and call.args), f"nisa.{name}: instructions take keywords"


def language_faults(tree):
    """Constructs that the compiler refuses or that no documentation and no public kernel shows."""
    unknown = (ast.Is, ast.IsNot, ast.Try, ast.With, ast.Lambda, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp,
               ast.Yield, ast.Raise, ast.Delete, ast.Global, ast.Nonlocal, ast.Starred, ast.MatMult, ast.Dict, ast.Match)  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, unknown):
            yield type(node).__name__
        elif isinstance(node, ast.FunctionDef) and (node.args.kwonlyargs or node.args.vararg or node.args.kwarg):
            yield f"{node.name}: keyword-only or variable arguments"
        elif isinstance(node, ast.For) and not isinstance(node.target, ast.Name):
            yield "a loop with several targets"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"zip", "enumerate", "list", "map"}
        ):
            yield node.func.id
    for alias, name, call in calls(tree):
        for value in (*call.args, *(k.value for k in call.keywords)):
            if isinstance(value, (ast.List, ast.BinOp)) and isinstance(
                getattr(value, "left", None), (ast.List, type(None))
            ):
                yield f"{alias}.{name}: a list as an argument"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kernels_keep_to_the_language(path):
    """No construct outside of the documented language, and no import but nki and other kernels."""
    tree = ast.parse(path.read_text("utf-8"))
    assert list(language_faults(tree)) == []
    for node in ast.walk(tree):
        modules = (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        assert [m for m in modules if not ALLOWED_IMPORTS.fullmatch(m)] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_kernels_use_nothing_of_trn3(path):
    """No name or argument that exists on trn3 only."""
    tree = ast.parse(path.read_text("utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    used |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
    assert used & TRN3_ONLY == set()


@pytest.mark.parametrize(
    "code",
    ["x is None", "zip(a, b)", "nisa.memset(dst=[t], value=0.0)", "def f(*, a): pass", "[a for a in b]", "f(*a)"],
)
def test_the_language_check_finds_faults(code):
    """The check above sees each trap when it is planted."""
    assert list(language_faults(ast.parse(code)))


def test_the_stand_in_has_the_documented_signatures():
    """Every function of the stand-in takes exactly the parameters that the documentation names."""
    for module in (nki.isa, nki.collectives, nki.language):
        for name, known in NAMES[module.__name__].items():
            function = getattr(module, name, None)
            if isinstance(known, list) and inspect.isfunction(function):
                assert list(inspect.signature(function).parameters) == known, f"{module.__name__}.{name}"
    tensor = NAMES["nki.language"]["NkiTensor"]
    from nki._tensor import NkiTensor

    for name, known in tensor.items():
        function = getattr(NkiTensor, name, None)
        if isinstance(known, list) and inspect.isfunction(function):
            assert list(inspect.signature(function).parameters)[1:] == known, name


def test_the_stand_in_has_everything_that_kernels_use():
    """No kernel uses a name that the stand-in lacks."""
    for path in FILES:
        for alias, name, _ in calls(ast.parse(path.read_text("utf-8"))):
            assert hasattr(importlib.import_module(ALIASES[alias]), name), f"{path.name}: {alias}.{name}"


def test_kernels_import_no_accelerator_package():
    """All references import without nki, torch_neuronx or neuronxcc."""
    modules = sorted(
        p.stem for p in (ROOT / "kernels").glob("*.py") if not p.stem.endswith("_nki") and p.stem != "__init__"
    )
    code = "import sys\n" + "".join(f"import kernels.{m}\n" for m in modules)
    code += "print(sorted(m for m in sys.modules if m.split('.')[0] in {'nki', 'torch_neuronx', 'neuronxcc'}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
