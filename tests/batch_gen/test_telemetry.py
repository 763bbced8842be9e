"""What a worker tells CloudWatch, Prometheus and its output root."""

import io
import json

import pytest

from batch_gen.drain import Drain
from batch_gen.errors import ConfigError, RunStopped
from batch_gen.ledger import Start, read_starts
from batch_gen.metrics import Meter
from batch_gen.storage.memory import MemoryStore
from batch_gen.telemetry import Outlets, Telemetry, outlets

START = Start(worker="host-1", job="j:0", queue="batch-gen", instance="trn2.48xlarge")


def meter():
    """A meter on a clock that stands still."""
    return Meter(1, now=lambda: 5.0, wall=lambda: 1_700_000_000.0)


def test_emf_lines_sum_to_the_totals():
    """Each line holds what came since the last one, under three dimensions of few values, in the format that AWS reads."""
    stream, counted = io.StringIO(), meter()
    telemetry = Telemetry(MemoryStore(), START, counted, Outlets(emf=stream), "bucket/run")
    counted.committed(5.0)
    counted.spent("render", 30.0)
    telemetry.tell()
    counted.committed(5.0)
    telemetry.tell()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["ClipsCommitted"] for line in lines] == [1, 1]
    assert [line["RenderSeconds"] for line in lines] == [30.0, 0.0]
    spec = lines[0]["_aws"]["CloudWatchMetrics"][0]
    assert spec["Dimensions"] == [["Run", "Queue", "InstanceType"]]
    assert spec["Namespace"] == "batch-gen"
    assert lines[0]["_aws"]["Timestamp"] == 1_700_000_000_000
    assert {name: lines[0][name] for name in spec["Dimensions"][0]} == {
        "Run": "bucket/run", "Queue": "batch-gen", "InstanceType": "trn2.48xlarge",
    }  # fmt: skip
    assert all(isinstance(lines[0][metric["Name"]], int | float) for metric in spec["Metrics"])
    assert {metric["Unit"] for metric in spec["Metrics"]} == {"Count", "Seconds", "Bytes"}


def test_the_textfile_is_prometheus_text(tmp_path):
    """Every sample has help and type before it, labels are escaped, and nothing half-written is left."""
    path, counted = tmp_path / "batch_gen.prom", meter()
    counted.spent("cold_start", 12.5)
    Telemetry(MemoryStore(), START, counted, Outlets(prometheus=path), 'a"b').tell()
    lines = path.read_text().splitlines()
    assert (
        'batch_gen_cold_start_seconds_total{run="a\\"b",queue="batch-gen",instance_type="trn2.48xlarge"} 12.5' in lines
    )
    samples = [line.partition("{")[0] for line in lines if not line.startswith("#")]
    for name in samples:
        assert any(line.startswith(f"# TYPE {name} ") for line in lines)
        assert any(line.startswith(f"# HELP {name} ") for line in lines)
    assert [each.name for each in tmp_path.iterdir()] == ["batch_gen.prom"]


def test_the_ledger_says_how_a_start_ended():
    """It stands there from the beginning without an end, and at the end with one; an error is its own last word."""
    store = MemoryStore()
    with Telemetry(store, START, meter(), Outlets(), "r") as told:
        assert read_starts(store)[0].exit_code is None
        told.ended("finished", 0)
    assert (read_starts(store)[0].ended, read_starts(store)[0].exit_code) == ("finished", 0)
    with pytest.raises(RunStopped), Telemetry(store, START, meter(), Outlets(), "r"):
        raise RunStopped("the run was stopped (cancel): by hand")
    assert read_starts(store)[0].exit_code == 4
    assert read_starts(store)[0].memory_bytes > 0


def test_a_drain_is_written_down_before_its_end(tmp_path):
    """Whoever is killed while it drains was not killed by its memory."""
    store, drain = MemoryStore(), Drain(25.0)
    with Telemetry(store, START, meter(), Outlets(), "r") as told:
        told.watch(drain)
        drain.request("SIGTERM")
        while read_starts(store)[0].exit_code is None:
            drain.wait(0.0)
        assert read_starts(store)[0].ended == "draining"


def test_a_textfile_needs_its_folder(tmp_path):
    """A folder that is not there is exit 2 before the start."""
    with pytest.raises(ConfigError, match="no folder"):
        outlets(emf=False, prometheus=str(tmp_path / "none" / "x.prom"))
    assert outlets(emf=True, prometheus=None).emf is not None
