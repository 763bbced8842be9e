"""`doctor`: true on this machine, red where something is wrong, with the fix beside it."""

import json
import resource

import pytest

from batch_gen.cli import invoke
from batch_gen.commands.doctor import diagnose, probed_lines, profile_needs, store_lines
from batch_gen.errors import ConfigError
from batch_gen.health import View, folder_line, locked_memory_line, machine_lines, names_line, python_line
from batch_gen.storage.folder import FolderStore
from batch_gen.storage.memory import MemoryStore
from tests.imds import StubImds

NEURON_PACKAGES = {"torch-neuronx": "2.13", "neuronx-cc": "2.28", "nki": "0.7"}
PACKAGES = {"batch-gen": "0.1", "torch": "2.13.1", "diffusers": "0.42.0", "transformers": "5.20.0"}
DEVICES = [{"neuron_device": k, "nc_count": 8, "neuron_processes": []} for k in range(16)]


def neuron_ls(folder, devices, code=0):
    """A tool that prints what neuron-ls prints."""
    tool = folder / "neuron-ls"
    (folder / "devices.json").write_text(json.dumps(devices))
    tool.write_text(f"#!/bin/sh\ncat {folder / 'devices.json'}\nexit {code}\n")
    tool.chmod(0o755)
    return str(tool)


@pytest.fixture
def trainium(tmp_path):
    """A sound trn2 machine, as files; the function makes views of it with changes."""
    for name in [f"dev/neuron{k}" for k in range(16)] + ["sys/module/neuron/version", "opt/aws/neuron/lib/libnrt.so.1"]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("2.24.7\n")
    (tmp_path / "dev/shm").mkdir()
    (tmp_path / "tools").mkdir()

    def view(**changes):
        sound = {
            "root": tmp_path,
            "packages": PACKAGES | NEURON_PACKAGES,
            "limit": lambda _: -1,
            "metadata": None,
            "logical_cores": None,
            "neuron_ls": neuron_ls(tmp_path / "tools", DEVICES),
        }
        return View(**sound | changes)

    return view


def named(lines, name):
    """The line of this name."""
    return next(line for line in lines if line.name == name)


def test_this_machine(capsys):
    """doctor on this machine has no red line, each line has a name and a text, and --json holds the same."""
    assert invoke(["doctor"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert invoke(["doctor", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert len(lines) == len(shown)
    assert all(line["text"] and line["mark"] in ("ok", "warn") for line in lines)
    assert {"python", "names", "torch", "devices", "ffmpeg", "cpu", "shared memory", "open files"} <= {
        line["name"] for line in lines
    }


def test_a_sound_trainium_machine_has_no_red_line(trainium):
    """Driver, runtime, packages, LNC and 64 free cores are seen."""
    lines = list(machine_lines(trainium(), profile_needs("trn2-720p")))
    assert not [line for line in lines if line.mark == "red"]
    assert named(lines, "free cores").text == "64 logical cores, none in use"
    assert named(lines, "neuron driver").text == "2.24.7"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("torch", {"packages": NEURON_PACKAGES}, "not installed"),
        ("torch", {"packages": PACKAGES | NEURON_PACKAGES | {"torch": "2.9.0"}}, "torch 2.9.0"),
        ("neuron packages", {"packages": PACKAGES | {"nki": "0.7"}}, "no torch-neuronx, neuronx-cc"),
        ("logical cores", {"logical_cores": "1"}, "the profiles mean 2"),
        ("locked memory", {"limit": lambda _: 65536}, "Neuron pins"),
        ("ffmpeg", {"executable": lambda: "/nowhere/ffmpeg"}, "/nowhere/ffmpeg"),
        ("python", {"python": (3, 10)}, "Python 3.10"),
        ("metadata", {"metadata": "http://127.0.0.1:9"}, "does not answer"),
    ],
)
def test_red_lines(trainium, name, changes, words):
    """Each thing that is wrong is red and says how to mend it."""
    line = named(machine_lines(trainium(**changes), {}), name)
    assert line.mark == "red"
    assert words in line.text
    assert line.fix


@pytest.mark.parametrize(
    ("name", "gone"),
    [("neuron driver", "sys/module/neuron/version"), ("neuron runtime", "opt/aws/neuron/lib/libnrt.so.1")],
)
def test_a_missing_driver_or_runtime_is_red(trainium, name, gone):
    """Devices without the driver's module or the runtime's library are red."""
    view = trainium()
    (view.root / gone).unlink()
    line = named(machine_lines(view, {}), name)
    assert (line.mark, bool(line.fix)) == ("red", True)


def test_cores_in_use_too_few_or_unknown(trainium, tmp_path):
    """Cores that another process holds, fewer than the profile takes, and a tool that fails are red; no tool is a warning."""
    busy = [DEVICES[0] | {"neuron_processes": [{"pid": 4711, "command": "python"}]}, *DEVICES[1:]]
    needs = profile_needs("trn2-720p")
    for devices, code, words in ((busy, 0, "4711"), (DEVICES[:1], 0, "takes 64"), (DEVICES, 3, "neuron-ls")):
        line = named(machine_lines(trainium(neuron_ls=neuron_ls(tmp_path, devices, code)), needs), "free cores")
        assert line.mark == "red"
        assert words in line.text
    assert named(machine_lines(trainium(neuron_ls=None), needs), "free cores").mark == "warn"


def test_a_profile_for_another_machine_is_red(capsys):
    """A profile whose device is not here is red, exit 5, before anything is rented or started."""
    assert invoke(["doctor", "--profile", "trn2-720p"]) == 5
    assert "the profile wants neuron" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="does not exist"):
        list(diagnose(None, {"profile": "trn9"}, View()))


def test_a_foreign_kernels_package_is_red(tmp_path, monkeypatch):
    """A distribution named `kernels` beside us is red."""
    info = tmp_path / "kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert names_line().mark == "red"


def test_limits_on_a_laptop(tmp_path):
    """Without Neuron a small limit of locked memory is fine; few open files are a warning."""
    view = View(root=tmp_path, limit=lambda which: 65536 if which == resource.RLIMIT_MEMLOCK else 256, metadata=None)
    assert locked_memory_line(view).mark == "ok"
    lines = list(machine_lines(view, {}))
    assert named(lines, "open files").mark == "warn"
    assert named(lines, "shared memory").mark == "warn"
    assert python_line(view).mark == "ok"


def test_metadata_that_answers(trainium):
    """On EC2 the metadata service is asked, and answers."""
    stub = StubImds()
    try:
        assert named(machine_lines(trainium(metadata=stub.endpoint), {}), "metadata").mark == "ok"
    finally:
        stub.close()


def test_folders_models_and_stores(tmp_path):
    """A folder without room or that is a file, a model that is not there and a store that cannot be reached are red."""
    (tmp_path / "file").write_text("")
    assert folder_line("scratch", tmp_path / "file", 0, "fix").mark == "red"
    assert folder_line("scratch", tmp_path, 1 << 60, "fix") == folder_line("scratch", tmp_path, 1 << 60, "fix")
    assert folder_line("scratch", tmp_path, 1 << 60, "fix").mark == "red"
    lines = list(diagnose(None, {"model": str(tmp_path / "none")}, View(metadata=None)))
    assert named(lines, "model").mark == "red"
    assert next(iter(store_lines(str(tmp_path / "file" / "out"), {}))).mark == "red"


class WrongClock(MemoryStore):
    """A store whose server is ten minutes ahead."""

    def clock_offset_s(self):
        """Seconds that the server is ahead."""
        return 600.0


def test_the_clock_by_the_store(tmp_path):
    """A store's clock that is far off is red with the fix; a folder has none to compare."""
    line = named(probed_lines(WrongClock()), "clock")
    assert line.mark == "red"
    assert "+600 s" in line.text
    assert line.fix
    assert named(probed_lines(FolderStore(tmp_path)), "clock").mark == "ok"
