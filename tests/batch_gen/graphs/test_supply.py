"""What a run does before it starts: it fetches what its digest names, and says what is missing."""

import dataclasses

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch_gen.commands.compile_ import check_compiles, wanted_of
from batch_gen.errors import ConfigError, EnvironmentFault, UsageError
from batch_gen.graphs.artefact import ArtefactRefused, GraphSet, key_of, pack, put_document
from batch_gen.graphs.keys import facts_of, variants_of
from batch_gen.graphs.supply import count_graphs, graphs_in, supply_graphs
from batch_gen.prepare import prepare
from batch_gen.storage.folder import FolderStore

ON_NEURON = {"device": "neuron", "kernels": "nki"}


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """A function that prepares a run of two shapes, as if the fake checkpoint had weights."""
    monkeypatch.setenv("BATCH_GEN_CACHE", str(tmp_path / "machine"))
    shapes = {"prompt": ["a", "b", "c"], "width": [64, 64, 128], "height": [64] * 3, "num_frames": [5] * 3}
    shapes |= {"guidance_high": [4.0] * 3, "guidance_low": [3.0] * 3}

    def make(columns=(), **given):
        pq.write_table(pa.table({**shapes, **dict(columns)}), tmp_path / "m.parquet")
        given = {"model": "fake", "out": str(tmp_path / "out"), "compile": "block", "profile": "cpu", **given}
        prepared = prepare([str(tmp_path / "m.parquet")], given)
        return dataclasses.replace(prepared, checkpoint=dataclasses.replace(prepared.checkpoint, folder=tmp_path))

    return make


def compiled(prepared, tmp_path, num=2):
    """A store with artefacts of the first variants; returns its folder and the digest of the set."""
    store = FolderStore(tmp_path / "graphs")
    artefacts = {}
    for variant in variants_of(prepared)[:num]:
        folder = tmp_path / f"cache-{variant}"
        folder.mkdir()
        (folder / f"{variant}.so").write_bytes(str(variant).encode())
        facts = facts_of(prepared.settings, prepared.checkpoint.digest, variant)
        artefacts[key_of(facts)] = pack(store, folder, facts, {}).digest
    return {
        "graphs": str(tmp_path / "graphs"),
        "graphs_digest": put_document(store, "sets", GraphSet(artefacts=artefacts)),
    }


def test_variants_are_shapes_and_guidance(ready):
    """One variant per shape and kind of guidance, the most frequent first."""
    assert [str(variant) for variant in variants_of(ready())] == ["64x64x5-text", "128x64x5-text"]
    unguided = ready(override=("guidance_high=1", "guidance_low=1"))
    assert str(variants_of(unguided)[0]) == "64x64x5-text without guidance"


def test_graphs_are_counted_once_for_all_engines(tmp_path):
    """What lies in the cache folder before and after counts, in both compilers' layouts, whoever looked how often."""
    folder = tmp_path / "cache"
    assert count_graphs(folder, graphs_in(folder)) == {"hits": 0, "misses": 0}
    for name in ("neff/a.neff", "fxgraph/ab/fab1/x", "fxgraph/ab/fab1/y"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    before = graphs_in(folder)
    assert before == {"neff/a.neff", "fxgraph/ab/fab1"}
    (folder / "neff/b.neff").touch()
    assert count_graphs(folder, before) == {"hits": 2, "misses": 1}


def test_a_run_fetches_what_its_digest_names(ready, tmp_path):
    """All shapes are found, and their files lie in this machine's cache under the digest."""
    supply = supply_graphs(ready(**compiled(ready(), tmp_path)))
    assert (len(supply.found), supply.missing) == (2, ())
    assert sorted(path.name for path in supply.folder.iterdir()) == ["128x64x5-text.so", "64x64x5-text.so"]
    assert str(tmp_path / "machine") in str(supply.folder)
    assert str(supply) == "2 of 2 shapes compiled ahead of time"


def test_what_is_missing_is_compiled_here_on_a_cpu(ready, tmp_path):
    """Off Neuron a missing shape is named and the run goes on."""
    supply = supply_graphs(ready(**compiled(ready(), tmp_path, num=1)))
    assert [str(variant) for variant in supply.missing] == ["128x64x5-text"]
    assert supply_graphs(ready()).missing == tuple(variants_of(ready()))


@pytest.mark.parametrize("num", [0, 1])
def test_on_neuron_a_missing_artefact_stops_the_run(ready, tmp_path, num):
    """Exit 2 with the shapes and both ways on, unless --allow-compile."""
    given = ON_NEURON | (compiled(ready(**ON_NEURON), tmp_path, num) if num else {})
    with pytest.raises(EnvironmentFault, match=r"128x64x5-text.*--allow-compile") as caught:
        supply_graphs(ready(**given))
    assert caught.value.exit_code == 2
    assert len(supply_graphs(ready(**given, allow_compile=True)).missing) == 2 - num


def test_another_model_is_another_key(ready, tmp_path):
    """Artefacts of another checkpoint, dtype, mode or thread count are not found: nothing foreign is used."""
    given = compiled(ready(), tmp_path)
    for change in ({"dtype": "bfloat16"}, {"compile": "model"}, {"threads": 7}, {"decode": "tiled"}):
        assert supply_graphs(ready(**given, **change)).found == ()


def test_a_store_is_not_trusted_by_its_name(ready, tmp_path):
    """--graphs alone is refused: the digest says what is trusted; a wrong digest is refused too."""
    given = compiled(ready(), tmp_path)
    with pytest.raises(UsageError, match="--graphs needs --graphs-digest"):
        supply_graphs(ready(graphs=given["graphs"]))
    with pytest.raises(ArtefactRefused, match="missing"):
        supply_graphs(ready(graphs=given["graphs"], graphs_digest="0" * 64))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"compile": "off", "graphs": "g"}, "--graphs needs --compile"),
        ({"graphs_digest": "0" * 64}, "--graphs-digest needs --graphs"),
        ({"graphs": "g", "graphs_digest": "abc"}, "graphs.digest"),
        ({**ON_NEURON, "compile_backend": "inductor"}, "its own compiler"),
    ],
)
def test_settings_that_contradict_each_other(ready, given, words):
    """Each contradiction is one clear error before anything is fetched."""
    with pytest.raises(ConfigError, match=words):
        ready(**given)


def test_a_missing_compiler_is_said_before_the_start(ready, monkeypatch):
    """Without a C++ compiler --compile on a CPU is exit 2 with both ways on; eager needs none."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EnvironmentFault, match="install g\\+\\+ or use --compile off"):
        supply_graphs(ready())
    assert supply_graphs(ready(compile_backend="eager")) is not None


def test_a_rehearsal_for_each_kind_of_guidance(ready):
    """Clips of one shape that guide all steps, or the low-noise ones alone, use other graphs: both are rehearsed."""
    mixed = {"width": [64] * 3, "guidance_high": [4.0, 1.0, 1.0], "guidance_low": [3.0, 3.0, 1.0]}
    wanted = wanted_of(ready(mixed, graphs="g"))
    assert [(str(one.variant), [request.guidance_high for request in one.requests]) for one in wanted] == [
        ("64x64x5-text", [4.0, 1.0]),
        ("64x64x5-text without guidance", [1.0]),
    ]
    assert len({one.key for one in wanted}) == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"compile": "off"}, "nothing to compile"),
        ({"compile_backend": "eager"}, "nothing to compile"),
        ({}, "--graphs must say where"),
    ],
)
def test_compile_says_what_it_needs(ready, given, words):
    """Without a mode, a compiler or a place for the result there is one clear error."""
    with pytest.raises(UsageError, match=words):
        check_compiles(ready(**given))


def test_without_compiling_there_is_nothing_to_fetch(ready):
    """--compile off asks for no graphs at all."""
    assert supply_graphs(ready(compile="off")) is None
