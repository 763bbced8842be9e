"""Devices: the environment before the import, what is refused, what an error means, where memory is read."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batch_gen.errors import KINDS, RetryClass
from batch_gen.ranks import kind_of
from kernels import backend
from models import neuron_facts
from models.device import Compiling, Start, open_device, prepare, use_kernels
from models.device_faults import COMPILER, PHRASES, RUNTIME, classify
from models.errors import ModelError

ROOT = Path(__file__).resolve().parents[2]
GOOD = {"torch": "2.13.0", "torch-neuronx": "2.13.3.0", "neuronx-cc": "2.28.7631.0", "nki": "0.7.0"}


@pytest.mark.parametrize(("name", "kind"), [("tpu", "unsupported"), ("neuron", "unsupported")])
def test_a_device_that_is_not_there_is_refused(name, kind):
    """Unknown and absent devices are errors of the right kind that name the device."""
    with pytest.raises(ModelError, match=name) as caught:
        open_device(name)
    assert caught.value.kind == kind


def test_kernels_without_their_device_are_refused():
    """The NKI kernels on a CPU are an error that names the alternative, and the reference stays in use."""
    with pytest.raises(ModelError, match="use --kernels reference") as caught:
        use_kernels("nki", "cpu")
    assert caught.value.kind == "unsupported"
    with pytest.raises(ModelError, match="--kernels nki"):
        use_kernels("reference", "neuron")
    use_kernels("reference", "cpu")
    assert backend.current() == "reference"


@pytest.mark.parametrize("compiling", [Compiling("graph"), Compiling("model", "tvm")])
def test_unknown_ways_to_compile_are_refused(compiling):
    """A mode or backend that does not exist is an error that lists those that do."""
    with pytest.raises(ModelError, match="choose one of"):
        open_device("cpu", compiling=compiling)


def test_the_environment_of_a_rank(tmp_path):
    """Core, LNC, caches, threads; the runtime's scratchpad page equals the compiler's flag; leftovers are dropped."""
    given = {"NEURON_RT_VISIBLE_CORES": "0-7,12", "NEURON_RT_ROOT_COMM_ID": "old", "NEURON_CC_FLAGS": "--verbose=info"}
    said = prepare(Start("neuron", core=5, threads=3, cache=tmp_path / "graphs"), given)
    assert {name: said[name] for name in ("NEURON_RT_VISIBLE_CORES", "NEURON_LOGICAL_NC_CONFIG", "OMP_NUM_THREADS")} == {
        "NEURON_RT_VISIBLE_CORES": "5", "NEURON_LOGICAL_NC_CONFIG": "2", "OMP_NUM_THREADS": "3"
    }  # fmt: skip
    page = re.search(r"--hbm-scratchpad-page-size=(\d+)", given["NEURON_CC_FLAGS"])
    assert page is not None
    assert page[1] == given["NEURON_SCRATCHPAD_PAGE_SIZE"]
    assert given["NEURON_CC_FLAGS"].startswith("--verbose=info ")
    assert given["TORCH_NEURONX_NEFF_CACHE_DIR"] == str(tmp_path / "graphs" / "neff")
    assert given["TORCH_NEURONX_DEBUG_DIR"].startswith(str(tmp_path / "graphs.local"))
    assert "NEURON_RT_ROOT_COMM_ID" not in given


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"NEURON_LOGICAL_NC_CONFIG": "1"}, "NEURON_LOGICAL_NC_CONFIG is 1; the kernels need 2"),
        ({"NEURON_RT_VIRTUAL_CORE_SIZE": "1"}, "NEURON_RT_VIRTUAL_CORE_SIZE"),
        ({"NEURON_RT_VISIBLE_CORES": "0-3"}, "this rank runs on core 5"),
        ({"NEURON_CC_FLAGS": "--hbm-scratchpad-page-size=1024"}, "batch-gen needs --hbm-scratchpad-page-size=2048"),
        ({"NEURON_CC_FLAGS": "-lnc=1"}, "batch-gen needs --logical-nc-config=2"),
    ],
)
def test_an_environment_that_cannot_work_is_refused(given, words):
    """What contradicts kernels or launcher is said before anything is imported or compiled."""
    with pytest.raises(ModelError, match=re.escape(words)) as caught:
        prepare(Start("neuron", core=5), given)
    assert caught.value.kind == "environment"


def test_the_environment_comes_before_torch():
    """In a process that has torch already, a Neuron environment comes too late and says so."""
    with pytest.raises(ModelError, match="torch was imported before"):
        prepare(Start("neuron", core=0))


def test_other_devices_get_a_cache_folder_alone(tmp_path):
    """On CPU and CUDA only threads and cache folders are set."""
    given = {}
    assert set(prepare(Start("cuda", cache=tmp_path), given)) == set(given)
    assert {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "OMP_NUM_THREADS"} <= set(given)
    assert not [name for name in given if "NEURON" in name]


def test_the_right_stack_passes():
    """The versions of the extra pass."""
    assert neuron_facts.check_stack(GOOD, (3, 12)) is None


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"torch-neuronx": None}, "unsupported", "the extra 'neuron' is not installed"),
        ({"torch-neuronx": "1.0"}, "environment", "a placeholder or too old"),
        ({"torch-neuronx": "2.9.0.2.11"}, "environment", "too old"),
        ({"neuronx-cc": "1.0.post1"}, "environment", "neuronx-cc is 1.0.post1, a placeholder"),
        ({"nki": "0.0.1"}, "environment", "nki is 0.0.1, a placeholder"),
        ({"nki": None}, "environment", "nki is missing"),
        ({"libtorch-neuronx-lite": "2.11.0.1.0"}, "environment", "the two break each other"),
        ({"torch-xla": "2.9.0"}, "environment", "the XLA stack"),
        ({"libneuronxla": "2.2"}, "environment", "the XLA stack"),
        ({"torch": "2.14.0"}, "environment", "do not belong together"),
    ],
)
def test_wrong_stacks_are_refused(change, kind, words):
    """XLA, Lite beside it, placeholders and pairs that do not fit are refused with the fix."""
    versions = {name: version for name, version in (GOOD | change).items() if version is not None}
    with pytest.raises(ModelError, match=re.escape(words)) as caught:
        neuron_facts.check_stack(versions, (3, 12))
    assert caught.value.kind == kind
    assert kind == "unsupported" or "fresh environment" in str(caught.value) or "belong" in str(caught.value)


def test_roles_have_their_compiler_arguments():
    """Transformer and VAE are compiled as different kinds of model; what must agree agrees in all roles."""
    flags = {role: neuron_facts.compiler_flags(role, {}) for role in neuron_facts.COMPILER_ARGS}
    assert "--model-type=transformer" in flags["transformer"]
    assert "--model-type=unet-inference" in flags["vae"]
    assert "--internal-max-instruction-limit" in flags["vae"]
    assert all("--auto-cast=none" in said and "--hbm-scratchpad-page-size=2048" in said for said in flags.values())


@pytest.mark.parametrize("status", sorted(RUNTIME))
def test_each_runtime_status_has_its_kind(status):
    """Every documented status of the runtime, as number, becomes its kind with a remedy."""
    kind, message = kind_of(RuntimeError(f"nrt_execute failed with status {status}"))
    assert kind == RUNTIME[status].kind
    assert kind in KINDS
    assert RUNTIME[status].remedy in message


@pytest.mark.parametrize("code", sorted(COMPILER))
def test_each_compiler_code_has_its_kind(code):
    """Every documented code of the compiler becomes its kind with a remedy, with and without its prefix."""
    for said in (f"[NCC_{code}] failed", f"neuronx-cc: {code}: failed"):
        kind, message = kind_of(RuntimeError(said))
        assert kind == COMPILER[code].kind
        assert kind in KINDS
        assert COMPILER[code].remedy in message


def test_the_policy_of_the_runtime_guide():
    """Broken hardware leaves the machine, memory is no second try on another device, wrong input is never retried."""
    retry = {status: KINDS[fault.kind].retry for status, fault in RUNTIME.items()}
    assert {retry[status] for status in (1201, 1202, 1203)} == {RetryClass.HOST}
    assert {retry[status] for status in (2, 1002, 1006)} == {RetryClass.SYSTEMIC}
    assert {retry[status] for status in (5, 1200, 101)} == {RetryClass.DEVICE}
    assert {RUNTIME[status].kind for status in (4, 11)} == {"oom"}
    assert RUNTIME[1003].kind == "nonfinite"


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("NRT_EXEC_HW_ERR_HBM_UE on nd0", "hardware"),
        ("no_hier no_mesh, NRT_INVALID", "bug"),
        ("mc_alloc failed: status 4", "oom"),
        ("dmesg: NEURON_HW_ERR=3", "hardware"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "oom"),
        ("[Errno 5] in a file called status", "engine_died"),
        ("CppCompileError: C++ compile error, ld returned 1", "unsupported"),
        ("BackendCompilerFailed: backend='neuron' raised: [NCC_EOOM001] too large", "memory"),
    ],
)
def test_words_of_an_error_decide(said, kind):
    """Names, phrases and numbers are understood; a text without a documented code is nobody's device error."""
    assert kind_of(RuntimeError(said))[0] == kind
    assert all(fault.kind in KINDS for _, fault in PHRASES)
    assert classify("ValueError: width 830 is no multiple of 16") is None


def test_memory_of_a_core_is_read_from_the_driver(tmp_path):
    """Two physical cores make one logical one; a missing file is None, not zero."""
    for core, value in ((2, 5), (3, 7)):
        folder = tmp_path / "neuron1" / f"neuron_core{core}" / "stats" / "memory_usage" / "device_mem"
        folder.mkdir(parents=True)
        (folder / "peak").write_text(f"{value}\n")
    assert neuron_facts.core_bytes(5, "peak", tmp_path) == 12
    assert neuron_facts.core_bytes(5, "present", tmp_path) is None


def test_memory_of_the_cpu():
    """The CPU's figures are those of the process, and its peak is not below what a test process holds."""
    figures = open_device("cpu").memory()
    assert 0 < figures.used_bytes < figures.total_bytes
    assert figures.peak_bytes >= figures.used_bytes / 2


def test_the_compile_interface():
    """off returns the function itself; eager runs one graph with the same numbers and notes its name and role."""

    def double(x):
        return x * 2

    off = open_device("cpu")
    assert off.compile(double, "double", "text") is double
    device = open_device("cpu", compiling=Compiling("model", "eager"))
    assert torch.equal(device.compile(double, "double", "text")(torch.ones(3)), torch.full((3,), 2.0))
    assert device.graphs == ["text/double"]
    assert (device.static_shapes, open_device("cpu", compiling=Compiling("block")).static_shapes) == (False, True)


def test_a_graph_break_is_an_error():
    """What cannot be one graph is refused at the first call; nothing falls back to separate pieces."""
    device = open_device("cpu", compiling=Compiling("model", "eager"))

    def broken(x):
        return x + 1 if float(x.sum()) > 0 else x

    with pytest.raises(Exception, match=r"(?i)data-dependent|unsupported|item"):
        device.compile(broken, "broken", "text")(torch.ones(3))


def test_a_process_reports_its_own_peak_and_not_its_starters():
    """The peak on the CPU is this process's, whatever the process held that started it: that one's outlives exec."""
    code = "from models.device import Device; print(Device('cpu', None).memory().peak_bytes)"
    held = torch.ones(50_000_000)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 5_000_000 < int(done.stdout) < held.nbytes / 2
