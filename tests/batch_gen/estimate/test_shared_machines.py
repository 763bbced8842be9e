"""Machines whose ranks share cores and memory, CPUs, and CUDA devices, of which each rank has one."""

import json

import pytest

from batch_gen.cli import invoke
from batch_gen.config import load_preset, resolve
from batch_gen.errors import ConfigError, MemoryTooSmall
from batch_gen.estimate.choose import check_memory
from batch_gen.estimate.machines import CUDA, TRN2, cpu_machine, machine_of
from batch_gen.estimate.memory import footprint
from batch_gen.estimate.ranking import Question, best, judge, rank
from batch_gen.estimate.speed import Rates, clip_seconds
from batch_gen.estimate.subject import Clips, published
from batch_gen.memory import limit_bytes
from batch_gen.placement import rank_threads
from batch_gen.request import Bucket
from batch_gen.worker import memory_limit_bytes
from models.parallel.layout import Degrees
from tests.manifests import save

SMALL = Clips(Bucket(256, 256, 17, "text"), 20)


def asked(machine, model="wan2.2-ti2v-5b"):
    """A question about small clips on this machine."""
    return Question(published(model), (SMALL,), machine, "auto", "float32", "float32")


def test_more_cores_are_faster():
    """16 CPU cores take a sixteenth of one core's seconds; `--threads 4` uses four of them."""
    one, all_, four = (
        judge(asked(machine), Degrees(), 1).seconds_per_clip
        for machine in (cpu_machine(1, 100e9), cpu_machine(16, 100e9), cpu_machine(16, 100e9, 4))
    )
    assert all_ == pytest.approx(one / 16)
    assert four == pytest.approx(one / 4)


def test_replicas_are_not_free():
    """Four replicas make as many clips an hour as one, each four times slower, each with a quarter of the memory."""
    machine = cpu_machine(16, 200e9)
    one, four = (judge(asked(machine), Degrees(), replicas) for replicas in (1, 4))
    assert four.clips_per_hour == pytest.approx(one.clips_per_hour)
    assert four.seconds_per_clip == pytest.approx(4 * one.seconds_per_clip)
    assert four.fullest.limit_bytes == machine.memory_bytes / 4
    assert four.fullest.peak_bytes == one.fullest.peak_bytes


def test_each_rank_has_a_cuda_device():
    """Four replicas on CUDA are four devices: four times the clips, each rank with a whole device's memory."""
    settings = resolve({"model": "m", "out": "o", "replicas": 4}, load_preset("ti2v-5b", "ti2v-5b"), "cuda")
    machine = machine_of(settings)
    assert (machine.name, machine.num_cores) == ("4 H200", 4)
    one, four = (judge(asked(machine), Degrees(), replicas) for replicas in (1, 4))
    assert four.clips_per_hour == pytest.approx(4 * one.clips_per_hour)
    assert four.fullest == one.fullest
    assert one.fullest.limit_bytes == CUDA.memory_bytes


def test_ranks_of_a_mesh_share_too():
    """Two replicas of tp=2,cp=2 on 8 cores: one core and an eighth of the memory a rank, as fast as one rank at best."""
    machine = cpu_machine(8, 80e9)
    question = asked(machine)
    spread, alone = question.placed(Degrees(2, 2), 2), question.placed(Degrees())
    assert footprint(question.subject, SMALL, spread, machine).limit_bytes == 10e9
    four, eight = (clip_seconds(question.subject, SMALL, each, machine, Rates(1.0)) for each in (spread, alone))
    assert four.denoise == pytest.approx(2 * eight.denoise)


@pytest.mark.parametrize(("num_cores", "num_ranks", "each"), [(16, 3, 5), (2, 4, 0.5), (8, 1, 8), (1, 1, 1)])
def test_cores_of_a_rank(num_cores, num_ranks, each):
    """A rank has whole threads, or a share where ranks outnumber the cores; on Neuron always one core."""
    assert cpu_machine(num_cores, 1e9).cores_of_rank(num_ranks) == each
    assert TRN2.cores_of_rank(num_ranks) == 1
    assert TRN2.rank_bytes(num_ranks) == TRN2.memory_bytes


@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_mesh_that_does_not_divide_the_model_is_refused(command, tmp_path, capsys):
    """24 heads over 5 ranks: exit 2 with the degrees that go, before anything starts."""
    manifest = save(tmp_path / "m.parquet", {"prompt": ["a fox"]})
    arguments = ["--model", "wan2.2-ti2v-5b", "--preset", "ti2v-5b", "--profile", "cpu", "--mesh", "tp=5"]
    assert invoke([command, str(manifest), *arguments, "--out", str(tmp_path / "out")]) == 2
    assert "must divide 24 heads and a feed-forward width of 14336; legal: 1, 2, 4, 8" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_memory_is_that_of_the_container():
    """A CPU machine has nine tenths of what this process may hold, a replica of two half of that, as in a run."""
    settings = resolve({"model": "fake", "out": "o", "replicas": 2}, load_preset("pocket", "pocket"), "cpu")
    assert machine_of(settings).memory_bytes == pytest.approx(0.9 * limit_bytes())
    assert machine_of(settings).rank_bytes(2) == pytest.approx(memory_limit_bytes(settings), rel=1e-6)


@pytest.mark.parametrize("profile", ["trn2-throughput", "trn3-throughput"])
def test_more_ranks_than_cores_are_refused(profile, capsys):
    """On Neuron each rank needs a core: 64 replicas of 16 ranks on 64 cores are exit 2, with the product."""
    arguments = ["plan", "--model", "wan2.2-t2v-a14b", "--preset", "t2v-a14b-720p", "--profile", profile]
    assert invoke([*arguments, "--mesh", "tp=8,cp=2", "--replicas", "64"]) == 2
    assert "replicas(64) * tp(8) * cp(2) * cfg(1) = 16 takes " in capsys.readouterr().err


def test_threads_are_those_of_the_run():
    """What the estimate gives a rank is what the launcher gives it."""
    for given in ({}, {"replicas": 2}, {"threads": 1}):
        settings = resolve({"model": "fake", "out": "o", **given}, load_preset("pocket", "pocket"), "cpu")
        machine = machine_of(settings)
        expected = min(rank_threads(settings), machine.num_cores / settings.replicas)
        assert machine.cores_of_rank(settings.replicas) == expected


def test_neuron_replicas_have_cores_of_their_own():
    """On Neuron four replicas make four times the clips of one, with the whole of a core's memory each."""
    question = Question(published("wan2.2-ti2v-5b"), (SMALL,), TRN2, "auto", "bfloat16")
    one, four = (judge(question, Degrees(4, 2, 2), replicas) for replicas in (1, 4))
    assert four.clips_per_hour == pytest.approx(4 * one.clips_per_hour)
    assert four.fullest == one.fullest


@pytest.mark.parametrize(("profile", "shared"), [("cpu", True), ("cuda", False)])
def test_mesh_auto_takes_replicas_elsewhere_than_on_neuron(profile, shared, capsys):
    """`--mesh auto --replicas 2` is one rank a replica, and the page says what they share on a CPU."""
    arguments = ["plan", "--model", "pocket", "--profile", profile, "--mesh", "auto", "--replicas", "2"]
    assert invoke([*arguments, "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["estimate"]["chosen"]
    assert (chosen["mesh"], chosen["replicas"]) == ("tp=1,cp=1,cfg=1", 2)
    assert invoke(arguments) == 0
    assert ("2 ranks on one machine, each with " in capsys.readouterr().out) is shared


@pytest.mark.parametrize("replicas", ["0", "65", "-1"])
def test_numbers_of_replicas_are_checked_with_mesh_auto_too(replicas, capsys):
    """What is no number of replicas is refused by name, exit 2."""
    arguments = ["--profile", "trn2-720p", "--mesh", "auto", "--replicas", replicas]
    assert invoke(["plan", "--model", "wan2.2-t2v-a14b", "--preset", "t2v-a14b-720p", *arguments]) == 2
    assert "--replicas: Input should be" in capsys.readouterr().err


def test_too_many_replicas_have_words_of_their_own():
    """Replicas that the memory has no room for: how many there is room for; more than cores on Neuron: the cores."""
    on_cpu, on_cuda = asked(cpu_machine(4, 100e9)), asked(CUDA, "wan2.2-t2v-a14b")
    peak = rank(on_cpu, "latency")[0].fullest.peak_bytes
    room = int(100e9 / peak)
    assert best(on_cpu, "throughput", room).replicas == room
    with pytest.raises(MemoryTooSmall, match=f"4 CPU cores has no memory for {room + 1} replicas, at most for {room};"):
        best(on_cpu, "throughput", room + 1)
    with pytest.raises(MemoryTooSmall, match=r"no mesh of one H200 fits; the smallest needs 1\d\d\.\d+e9 bytes"):
        best(on_cuda, "throughput", 1)
    on_trn2 = Question(published("wan2.2-t2v-a14b"), (SMALL,), TRN2, "auto", "bfloat16")
    with pytest.raises(
        MemoryTooSmall, match=r"no memory for 32 replicas, at most for 8; .* bytes a rank and has 24\.00e9"
    ):
        best(on_trn2, "throughput", 32)
    with pytest.raises(ConfigError, match=r"--replicas 65: trn2\.48xlarge has 64 cores"):
        best(on_trn2, "throughput", 65)


def test_ignore_memory_holds_for_mesh_auto(capsys):
    """With --ignore-memory `--mesh auto` takes what comes closest, exit 0; without it exit 2, with or without auto."""
    arguments = ["plan", "--model", "wan2.2-t2v-a14b", "--preset", "t2v-a14b-720p", "--profile", "cuda"]
    arguments += ["--dtype", "float32"]
    for mesh in ([], ["--mesh", "auto"]):
        assert invoke([*arguments, *mesh]) == 2
        assert "use a larger mesh, a smaller size, another --profile, or --ignore-memory" in capsys.readouterr().err
        assert invoke([*arguments, *mesh, "--ignore-memory"]) == 0
        assert "DOES NOT FIT" in capsys.readouterr().out


def test_a_refusal_on_a_shared_machine_offers_no_mesh(capsys):
    """Where ranks share the memory a larger mesh is no way out; fewer replicas are, or else smaller clips."""
    settings = resolve({"model": "m", "out": "o", "replicas": 2}, load_preset("ti2v-5b", "ti2v-5b"), "cpu")
    with pytest.raises(MemoryTooSmall, match="2 ranks share the memory of 4 CPU cores: try one replica on --mesh tp=1"):
        check_memory(settings, asked(cpu_machine(4, 60e9)))
    arguments = ["plan", "--model", "wan2.2-t2v-a14b", "--preset", "t2v-a14b-720p", "--profile", "cuda"]
    assert invoke([*arguments, "--dtype", "float32"]) == 2
    assert "no mesh of one H200 holds them: try smaller clips, --experts swap or" in capsys.readouterr().err
