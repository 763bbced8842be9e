"""What `run`, `compile` and `regress` refuse alike before an engine starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from batch_gen.cli import invoke
from batch_gen.commands import regress, regress_tiers
from batch_gen.errors import EnvironmentFault, MemoryTooSmall
from batch_gen.preflight import check_start, preflight
from batch_gen.prepare import prepare
from batch_gen.request import Bucket
from tests.regression import make_setup, write_suite

ON_NEURON = {"device": "neuron", "kernels": "nki", "compile": "off"}
ABSENT = ("--device", "cuda") if any(Path("/dev").glob("neuron[0-9]*")) else ("--device", "neuron", "--kernels", "nki")
"""A device that the machine which runs these tests does not have."""
HUGE = {(Bucket(8192, 8192, 81, "text"), 4, True): 1}


@pytest.fixture
def ready(tmp_path, tiny_checkpoint):
    """A function that prepares a small manifest for the tiny checkpoint."""
    path = write_suite(tmp_path)
    return lambda **given: prepare([str(path)], {"model": str(tiny_checkpoint), "out": str(tmp_path / "o"), **given})


def test_memory_comes_before_the_driver(ready, tmp_path):
    """What does not fit on a Neuron core is refused with a number, unless told to go on; then the device must be there."""
    prepared = ready(**ON_NEURON)
    with pytest.raises(MemoryTooSmall):
        check_start(prepared.settings, prepared.checkpoint, HUGE, tmp_path)
    ignoring = prepared.settings.model_copy(update={"ignore_memory": True})
    with pytest.raises(EnvironmentFault, match="no Neuron device"):
        check_start(ignoring, prepared.checkpoint, HUGE, tmp_path)
    (tmp_path / "neuron0").touch()
    check_start(ignoring, prepared.checkpoint, HUGE, tmp_path)


def test_graphs_are_supplied_after_the_checks(ready, tmp_path):
    """On a Neuron machine the shapes without graphs are named; with --allow-compile this machine's own folder is used."""
    (tmp_path / "neuron0").touch()
    with pytest.raises(EnvironmentFault, match="missing for 1 shapes: 64x64x9-text"):
        preflight(ready(**ON_NEURON | {"compile": "block"}), tmp_path)
    supply = preflight(ready(**ON_NEURON | {"compile": "block", "allow_compile": True}), tmp_path)
    assert [str(variant) for variant in supply.missing] == ["64x64x9-text"]


@pytest.mark.parametrize(
    "command",
    [
        ["run", "{path}"],
        ["compile", "{path}", "--graphs", "{out}/graphs"],
        ["regress", "run", "{path}"],
        ["regress", "calibrate", "{path}"],
        ["regress", "mutate", "{path}"],
        ["regress", "bisect", "{path}"],
        ["regress", "step", "{path}"],
        ["regress", "components"],
    ],
)
def test_every_command_that_renders_asks(tmp_path, tiny_checkpoint, capsys, command):
    """A device that is not here is exit 2 with one sentence, whichever command would render on it."""
    words = {"path": write_suite(tmp_path), "out": tmp_path}
    out = [] if command[-1] == "components" else ["--out", str(tmp_path / "o")]
    flags = [*out, "--model", str(tiny_checkpoint), *ABSENT, "--compile", "block"]
    assert invoke([*(word.format(**words) for word in command), *flags]) == 2
    assert f"--device {ABSENT[1]}: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run", "calibrate", "mutate", "bisect", "components", "step"])
def test_regress_takes_the_flags_of_graphs(name):
    """Graphs that were compiled ahead of time serve the nightly renders as they serve a run."""
    command = {**regress.COMMANDS, **regress_tiers.COMMANDS}[name]
    options = {option for parameter in command.params for option in parameter.opts}
    assert options >= {"--graphs", "--graphs-digest", "--allow-compile", "--compile-backend", "--ignore-memory"}


def test_a_suite_knows_where_its_graphs_are(tmp_path, tiny_checkpoint):
    """Engines of a night look into the folder that the run's would."""
    from batch_gen.placement import local_graphs

    assert make_setup(tmp_path).graphs is None
    compiled = make_setup(tmp_path, model=str(tiny_checkpoint), compile="block", compile_backend="eager")
    assert compiled.graphs == local_graphs()
