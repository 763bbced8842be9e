from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batch_gen import rules, tables


def metrics_row(clip_id: str, **cells: object) -> dict[str, object]:
    return {"clip_id": clip_id, "row_id": clip_id, "sample": 0, "status": "committed", "epoch": 1, "attempt": 1} | cells


def error_row(clip_id: str, **cells: object) -> dict[str, object]:
    return {"clip_id": clip_id, "row_id": clip_id, "sample": 0, "status": "quarantined", "epoch": 1} | cells


def test_part_has_fixed_schema() -> None:
    """A metrics part has every column and type of the schema, however few cells its rows fill."""
    part = tables.metrics_part([metrics_row("fox", denoise_s=1.5)])
    assert tables.read_table(part).schema.equals(tables.METRICS_SCHEMA)
    assert tables.read_rows(part, ["clip_id", "denoise_s", "decode_s"]) == [
        {"clip_id": "fox", "denoise_s": 1.5, "decode_s": None}
    ]


def test_empty_part_has_fixed_schema() -> None:
    """A part of no rows still carries the whole schema."""
    assert tables.read_table(tables.errors_part([])).schema.equals(tables.ERRORS_SCHEMA)


def test_unknown_column_is_refused() -> None:
    """A cell that the schema lacks is an error, not a lost column."""
    with pytest.raises(ValueError, match=r"\['denoise_ms'\] are not in the table's schema"):
        tables.metrics_part([metrics_row("fox", denoise_ms=3)])


def test_wrong_type_is_refused() -> None:
    """A cell of another type is an error."""
    with pytest.raises(ValueError, match="does not fit the table's schema"):
        tables.metrics_part([metrics_row("fox", denoise_s="long")])


def test_same_rows_same_bytes() -> None:
    """Equal rows give equal Parquet bytes."""
    rows = [metrics_row("fox", extra={"b": 1, "a": 2}), metrics_row("owl", extra={"a": 2})]
    assert tables.metrics_part(rows) == tables.metrics_part(rows)


def test_instants_keep_their_zone() -> None:
    """Instants are stored in UTC to the millisecond."""
    instant = dt.datetime(2026, 5, 1, 12, 0, 0, 5000, tzinfo=dt.UTC)
    assert tables.read_rows(tables.metrics_part([metrics_row("fox", started_at=instant)]))[0]["started_at"] == instant


def test_long_error_message_is_cut() -> None:
    """An error message is cut to 2,000 characters."""
    part = tables.errors_part([error_row("fox", message="x" * 5000)])
    assert len(tables.read_rows(part)[0]["message"]) == tables.MESSAGE_MAX_CHARS


def test_merge_keeps_last_epoch() -> None:
    """A clip that two attempts report stands once, with the later epoch's figures."""
    parts = [
        tables.metrics_part([metrics_row("fox", epoch=2, denoise_s=2.0)]),
        tables.metrics_part([metrics_row("fox", epoch=1, denoise_s=1.0), metrics_row("ant")]),
    ]
    rows = tables.read_rows(tables.merge_metrics(parts))
    assert [(row["clip_id"], row["denoise_s"]) for row in rows] == [("ant", None), ("fox", 2.0)]


def test_merge_spreads_extra_columns() -> None:
    """Carried-through columns stand as text columns in the merged table, structures as JSON."""
    part = tables.metrics_part(
        [metrics_row("fox", extra={"tag": "hero", "shot": 3, "crew": ["a"]}), metrics_row("owl")]
    )
    rows = tables.read_rows(tables.merge_metrics([part]))
    assert rows[0]["extra.tag"] == "hero"
    assert rows[0]["extra.shot"] == "3"
    assert rows[0]["extra.crew"] == '["a"]'
    assert rows[1]["extra.tag"] is None


def test_clips_prefers_the_commit() -> None:
    """clips.parquet shows a clip as committed when a later attempt succeeded, else with its last error."""
    metrics = tables.metrics_part([metrics_row("fox", sha256="ab")])
    errors = tables.errors_part(
        [
            error_row("fox", kind="flat", message="one colour"),
            error_row("owl", kind="nonfinite", message="NaN", **{"class": "clip"}),
        ]
    )
    rows = tables.read_rows(tables.merge_clips([metrics], [errors]))
    assert [(row["clip_id"], row["status"], row["kind"], row["class"]) for row in rows] == [
        ("fox", "committed", None, None),
        ("owl", "quarantined", "nonfinite", "clip"),
    ]


def test_merge_of_nothing_is_an_empty_table() -> None:
    """A run without a clip has its two tables all the same."""
    assert tables.read_table(tables.merge_clips([], [])).schema.equals(tables.CLIPS_SCHEMA)


def test_merge_reads_older_parts() -> None:
    """A part without a newer column is read with nulls, one with an unknown column without it."""
    older = pa.table({"clip_id": ["fox"], "epoch": pa.array([1], pa.int64()), "gone": ["x"]})
    merged = tables.read_table(tables.merge_metrics([tables.to_bytes(older)]))
    assert merged.schema.equals(tables.METRICS_SCHEMA)
    assert merged.column("clip_id").to_pylist() == ["fox"]


def test_manifest_schema_follows_the_rules() -> None:
    """The canonical manifest schema has the rules' columns in their order."""
    assert tuple(tables.manifest_schema().names) == rules.COLUMNS


def test_writer_cuts_row_groups_alike(tmp_path) -> None:
    """The same rows give the same file, written in one call or in many."""
    schema = tables.manifest_schema(["row_id", "prompt"])
    count = tables.ROW_GROUP_ROWS * 2 + 7
    whole = pa.table({"row_id": [f"r{k}" for k in range(count)], "prompt": ["p"] * count}, schema=schema)
    with tables.ManifestWriter(tmp_path / "one.parquet", schema) as writer:
        writer.write(whole)
    with tables.ManifestWriter(tmp_path / "many.parquet", schema) as writer:
        for start in range(0, count, 777):
            writer.write(whole.slice(start, 777))
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "many.parquet").read_bytes()
    metadata = pq.read_metadata(tmp_path / "one.parquet")
    assert [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)] == [10_000, 10_000, 7]
