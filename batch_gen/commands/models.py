"""`batch-gen models`: what can be rendered, with which presets and profiles."""

from __future__ import annotations

import json
from typing import Any

import click

from batch_gen.checkpoint import pocket_folder
from batch_gen.config import load_preset, preset_names, profile_names
from models.registry import architectures, pipelines


def models(as_json: bool) -> int:
    """Print architectures, built-in checkpoints, presets and profiles; loads no torch."""
    body = _facts()
    if as_json:
        click.echo(json.dumps(body, indent=1))
        return 0
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(soft_wrap=True)
    table = Table(
        Column("preset", no_wrap=True),
        "size",
        "frames",
        "fps",
        "steps",
        "guidance high/low",
        "shift",
        title="Presets",
        title_justify="left",
    )
    for row in body["presets"]:
        guidance = f"{row['guidance_high']:g} / {row['guidance_low']:g}"
        size = f"{row['width']}x{row['height']}"
        table.add_row(
            row["name"], size, str(row["num_frames"]), row["fps"], str(row["steps"]), guidance, f"{row['flow_shift']:g}"
        )
    console.print(table)
    for row in body["pipelines"]:
        console.print(f"pipeline      {row['name']} ({row['class']}); cards: {', '.join(row['cards']) or 'none'}")
    console.print("architectures " + ", ".join(body["architectures"]))
    console.print("built-in      " + ", ".join(f"{name} ({text})" for name, text in body["built_in"].items()))
    console.print("profiles      " + ", ".join(body["profiles"]))
    return 0


def _facts() -> dict[str, Any]:
    presets = []
    for name in preset_names():
        sampling = load_preset(name, "pocket").sampling
        row = {field: getattr(sampling, field) for field in sampling.__dataclass_fields__ if field != "negative_prompt"}
        presets.append({"name": name, **row, "fps": str(sampling.fps)})
    built_in = {"tiny": "random weights, for tests"}
    if (pocket_folder() / "model_index.json").exists():
        built_in = {"pocket": "trained; draws coloured shapes that move", **built_in}
    return {
        "pipelines": [
            {"name": name, "class": entry.path, "presets": list(entry.presets), "cards": list(entry.cards)}
            for name, entry in sorted(pipelines().items())
        ],
        "architectures": sorted(architectures()),
        "built_in": built_in,
        "presets": presets,
        "profiles": profile_names(),
    }
