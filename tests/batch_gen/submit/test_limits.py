"""AWS Batch's rules, checked by us where AWS answers late or never."""

import pytest

from batch_gen.submit import limits
from batch_gen.submit.definition import Fleet, job_definition, submission, worker_command
from batch_gen.submit.retries import strategy

IMAGE = "repository@sha256:" + "a" * 64


def test_our_own_definition_is_legal():
    """The job definition that we build breaks no rule, alone or as an array."""
    fleet = Fleet("queue", IMAGE, num_nodes=8)
    definition = job_definition(fleet)
    assert list(limits.definition_faults(definition)) == []
    body = submission(fleet, "run", definition["jobDefinitionName"], ["batch-gen", "run", "s3://b/m.parquet"])
    assert list(limits.size_faults(body)) == []
    assert body["arrayProperties"] == {"size": 8}


def test_one_node_is_a_plain_job():
    """Batch has no arrays of one."""
    assert "arrayProperties" not in submission(Fleet("queue", IMAGE), "run", "d", [])


@pytest.mark.parametrize("nodes", [0, -1, 10_001])
def test_illegal_arrays(nodes):
    """An array has 2 to 10,000 children."""
    assert "must be 1" in " ".join(limits.array_faults(nodes))


@pytest.mark.parametrize("nodes", [1, 2, 10_000])
def test_legal_arrays(nodes):
    """One node, or 2 to 10,000."""
    assert list(limits.array_faults(nodes)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attempts": 11}, "must be 1 to 10"),
        ({"attempts": 0}, "must be 1 to 10"),
        (
            {"evaluateOnExit": [{"onExitCode": "1", "action": "EXIT"}] * 5 + [{"onReason": "*", "action": "EXIT"}]},
            "at most 5",
        ),
        (
            {"evaluateOnExit": [{"onReason": "Host-EC2*", "action": "RETRY"}, {"onReason": "*", "action": "EXIT"}]},
            "letters, digits",
        ),
        (
            {"evaluateOnExit": [{"onReason": "a*b", "action": "RETRY"}, {"onReason": "*", "action": "EXIT"}]},
            "at the end only",
        ),
        ({"evaluateOnExit": [{"onExitCode": "7?", "action": "RETRY"}, {"onReason": "*", "action": "EXIT"}]}, "digits"),
        ({"evaluateOnExit": [{"onExitCode": "75", "action": "RETRY"}]}, "last exit rule"),
        ({"evaluateOnExit": []}, "last exit rule"),
    ],
)
def test_retry_rules(change, words):
    """Attempts, the number of rules, their alphabet, and the last rule that ends everything else."""
    assert words in " ".join(limits.retry_faults(strategy(10) | change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory_mib": 2_097_152}, "would wait forever"),
        ({"vcpus": 193}, "has 192"),
        ({"devices": 8}, "needs all of"),
    ],
)
def test_a_node_is_a_whole_trn2(change, words):
    """More memory than ECS registers, more vCPUs or fewer devices than the machine has are refused."""
    assert words in " ".join(limits.definition_faults(job_definition(Fleet("queue", IMAGE, **change))))


def test_overrides_and_timeouts():
    """Overrides have 8,192 characters at most; Batch's final timeout lies beyond our own deadline."""
    command = worker_command([f"s3://bucket/{'x' * 60}-{i}.parquet" for i in range(200)], {})
    assert "name one folder" in " ".join(limits.size_faults({"containerOverrides": {"command": command}}))
    assert "must be beyond" in " ".join(limits.timeout_faults(3600, 3600.0))
    assert "at least 60" in " ".join(limits.timeout_faults(30, 1.0))


def test_a_definition_is_named_by_its_content():
    """The same fleet gives the same name, another image another one; nodes and queue do not count."""
    assert job_definition(Fleet("a", IMAGE, num_nodes=2)) == job_definition(Fleet("b", IMAGE, num_nodes=9))
    other = "repository@sha256:" + "b" * 64
    assert (
        job_definition(Fleet("a", IMAGE))["jobDefinitionName"] != job_definition(Fleet("a", other))["jobDefinitionName"]
    )


def test_flags_of_the_worker():
    """Settings become flags again: on and off switches, repeated ones, plain values."""
    command = worker_command(
        ["m.parquet"], {"crf": 20, "keep_latents": True, "file_metadata": False, "override": ("a=1", "b=2")}
    )
    assert command == [
        "batch-gen", "run", "m.parquet", "--crf", "20", "--keep-latents", "--no-file-metadata",
        "--override", "a=1", "--override", "b=2",
    ]  # fmt: skip
