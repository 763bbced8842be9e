from __future__ import annotations

from pathlib import Path

import pytest

from batch_gen import tables
from models.pocket.grammar import parse

FOLDER = Path(__file__).parents[2] / "manifests"


@pytest.mark.parametrize("name", ["demo", "regression"])
def test_prompts_are_in_the_grammar(name: str) -> None:
    """Every prompt that ships is one that `pocket` understands, and every row has its own id."""
    rows = tables.read_rows(FOLDER / f"{name}.parquet")
    assert len(rows) >= 8
    assert len({row["row_id"] for row in rows}) == len(rows)
    assert all(parse(row["prompt"]).prompt == row["prompt"] for row in rows)


def test_demo_shows_what_a_manifest_can() -> None:
    """The demo has an extra column to select by and a row of two samples."""
    rows = tables.read_rows(FOLDER / "demo.parquet")
    assert {row["tag"] for row in rows} >= {"hero", "takes"}
    assert [row["samples"] for row in rows if row["samples"]] == [2]


def test_regression_seeds_are_fixed() -> None:
    """Regression clips may change only with the product, so each row has its seed."""
    assert all(row["seed"] is not None for row in tables.read_rows(FOLDER / "regression.parquet"))
