"""Which worker this is, and the guard against packages that share our names."""

import pytest

from batch_gen.config import load_preset, resolve
from batch_gen.environment import guard_names, worker_hint, worker_name
from batch_gen.errors import EnvironmentFault, UsageError
from batch_gen.worker import claim_options

NAMES = (
    "AWS_BATCH_JOB_ARRAY_INDEX", "AWS_BATCH_JOB_ARRAY_SIZE", "AWS_BATCH_JOB_ATTEMPT", "JOB_COMPLETION_INDEX",
    "JOB_COMPLETIONS", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_RESTART_COUNT", "AWS_BATCH_JOB_ID",
    "JOB_INDEX_FAILURE_COUNT", "JOB_NAME", "SLURM_ARRAY_JOB_ID",
)  # fmt: skip


@pytest.fixture
def environment(monkeypatch):
    """An environment without array variables, and a way to set some."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return lambda **values: [monkeypatch.setenv(name, value) for name, value in values.items()]


def test_alone(environment):
    """Without any variable a worker is 0 of 1."""
    hint = worker_hint()
    assert (hint.index, hint.count, hint.attempt) == (0, 1, 1)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "3", "AWS_BATCH_JOB_ARRAY_SIZE": "8", "AWS_BATCH_JOB_ATTEMPT": "2"}, (3, 8, 2)),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "3"}, (3, None, 1)),
        ({"AWS_BATCH_JOB_ATTEMPT": "4"}, (0, 1, 4)),
        ({"JOB_COMPLETION_INDEX": "1"}, (1, None, 1)),
        ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "6"}, (5, 6, 1)),
        ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "6", "SLURM_RESTART_COUNT": "1"}, (5, 6, 2)),
        ({"JOB_COMPLETION_INDEX": "1", "JOB_INDEX_FAILURE_COUNT": "2"}, (1, None, 3)),
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "-1"}, (0, 1, 1)),
    ],
)
def test_array_variables(environment, variables, expected):
    """Batch, Kubernetes and Slurm say which worker this is; nonsense is not taken for a number."""
    environment(**variables)
    hint = worker_hint()
    assert (hint.index, hint.count, hint.attempt) == expected


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({"AWS_BATCH_JOB_ARRAY_INDEX": "3", "AWS_BATCH_JOB_ID": "a-b:3"}, "a-b:3"),
        ({"AWS_BATCH_JOB_ID": "a-b", "AWS_BATCH_JOB_ATTEMPT": "2"}, "a-b"),
        ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_JOB_ID": "77"}, "77:5"),
        ({"JOB_COMPLETION_INDEX": "1", "JOB_NAME": "film"}, "film:1"),
        ({"JOB_COMPLETION_INDEX": "1"}, ""),
    ],
)
def test_all_starts_of_a_child_have_one_name(environment, variables, job):
    """The job's id with the child's index, so that a start finds how the last one ended."""
    environment(**variables)
    assert worker_hint().job == job


def test_shard_wins(environment):
    """--shard is stronger than the environment."""
    environment(AWS_BATCH_JOB_ARRAY_INDEX="3", AWS_BATCH_JOB_ARRAY_SIZE="8")
    assert (worker_hint("1/2").index, worker_hint("1/2").count) == (1, 2)


@pytest.mark.parametrize("shard", ["2/2", "a/b", "1", "-1/2", "1/0", ""])
def test_wrong_shards(shard):
    """A shard that is not i/n with i < n is refused with an example."""
    with pytest.raises(UsageError, match="0/4"):
        worker_hint(shard)


def test_every_start_has_its_own_name():
    """Two starts of a worker never share a name."""
    assert worker_name() != worker_name()


def test_names_resolve_here():
    """In a clean installation the guard is silent."""
    assert guard_names() is None


def test_a_foreign_kernels_distribution_is_refused(tmp_path, monkeypatch):
    """A distribution named kernels beside us stops the command line with the fix."""
    folder = tmp_path / "kernels-0.18.5.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EnvironmentFault, match="pip uninstall kernels"):
        guard_names()


def test_static_shards_count_from_0(environment):
    """A Slurm array of 1-4 has no worker for shard 0: its chunks would never be made, so its last worker refuses."""
    environment(SLURM_ARRAY_TASK_ID="4", SLURM_ARRAY_TASK_COUNT="4")
    settings = resolve({"model": "fake", "out": "o", "assign": "static"}, load_preset("pocket", "pocket"), "cpu")
    with pytest.raises(UsageError, match="number the array 0 to 3"):
        claim_options(settings, worker_hint(), lambda _end: None)
