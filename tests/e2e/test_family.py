"""LoRA and step caching through whole runs; a clip is the same whatever ran before it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from helpers import hashes, records, run, small_manifest

from batch_gen.cli import invoke
from batch_gen.tables import read_table
from tests.parity import lora

pytestmark = pytest.mark.slow


def test_lora_and_step_cache(tmp_path, tiny_checkpoint):
    """With adapters and step cache a clip alone has the frames of the clip after others, on a mesh all ranks agree, the
    record counts the skips, and other strengths are another run."""
    path = lora.write(tmp_path / "a.safetensors", "original", alpha=8)
    flags = ["--model", str(tiny_checkpoint), "--step-cache", "0.8", "--step-cache-warm-up", "1", "--threads", "1"]
    flags += ["--override", "steps=6"]
    manifest = small_manifest(tmp_path / "m.parquet", 3)
    with_lora = [*flags, "--lora", f"{path}@0.7:high", "--lora", f"{path}@0.2"]
    assert run(manifest, tmp_path / "all", *with_lora)[0] == 0
    (tmp_path / "ids").write_text("clip-2\n")
    assert run(manifest, tmp_path / "one", *with_lora, "--ids", str(tmp_path / "ids"))[0] == 0
    assert hashes(tmp_path / "one")["clip-2"] == hashes(tmp_path / "all")["clip-2"]
    assert set(records(tmp_path / "all")["clip-2"].metrics["skipped_steps"]) == {"high.0", "high.1", "low.0", "low.1"}
    rows = read_table((tmp_path / "all" / "metrics.parquet").read_bytes()).to_pylist()
    skipped = {row["clip_id"]: row["skipped_steps"] for row in rows}
    made = records(tmp_path / "all").items()
    assert skipped == {clip_id: sum(record.metrics["skipped_steps"].values()) for clip_id, record in made}
    [record] = (tmp_path / "one").glob("clips/*/clip-2.json")
    assert invoke(["reproduce", str(record), "--json"]) == 0
    code, _, said = run(manifest, tmp_path / "all", *flags, "--lora", f"{path}@0.6:high")
    assert code == 2
    assert "lora" in said
    assert run(manifest, tmp_path / "mesh", *with_lora, "--mesh", "tp=2,cp=2", "--limit", "1")[0] == 0
