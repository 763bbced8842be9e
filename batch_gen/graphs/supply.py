"""What a run does about compiled graphs before it starts: fetch what it was told to trust, and say what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batch_gen.checkpoint import Checkpoint
from batch_gen.config import Settings
from batch_gen.environment import cache_folder, host_compiler
from batch_gen.errors import EnvironmentFault, UsageError
from batch_gen.graphs.artefact import GraphSet, find_artefact, get_document, key_of, unpack
from batch_gen.graphs.keys import Variant, facts_of, variants_of
from batch_gen.placement import local_graphs
from batch_gen.prepare import Prepared, store_options
from batch_gen.storage.base import open_store


@dataclass(frozen=True, slots=True)
class Supply:
    """Where the ranks find compiled graphs, and which variants' are there.

    Attributes:
        folder: The compiler's cache folder.
        found: Variants whose artefact was fetched or was here already.
        missing: Those that are compiled when they come up.
        fetched_bytes: What was copied from the store.
    """

    folder: Path
    found: tuple[Variant, ...] = ()
    missing: tuple[Variant, ...] = ()
    fetched_bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        names = {"found": self.found, "missing": self.missing}
        return {name: [str(variant) for variant in variants] for name, variants in names.items()} | {
            "fetched_bytes": self.fetched_bytes
        }

    def __str__(self) -> str:
        return f"{len(self.found)} of {len(self.found) + len(self.missing)} shapes compiled ahead of time"


def supply_graphs(prepared: Prepared) -> Supply | None:
    """Fetch the graphs of a run; None where nothing is compiled. Raises as `supply_variants`."""
    if prepared.settings.compile == "off":
        return None  # the variants need not be counted
    return supply_variants(prepared.settings, prepared.checkpoint, variants_of(prepared))


def supply_variants(settings: Settings, checkpoint: Checkpoint, variants: Sequence[Variant]) -> Supply | None:
    """Fetch the graphs of some variants; None where nothing is compiled.

    Raises:
        UsageError: `--graphs` without `--graphs-digest`.
        ArtefactRefused: what the store holds is not what the digest says.
        EnvironmentFault: on Neuron, a shape without its artefact, unless `--allow-compile`; on a CPU, no compiler.
    """
    if settings.compile == "off" or checkpoint.folder is None:
        return None
    check_compiler(settings)
    if settings.graphs is None:
        supply = Supply(local_graphs(), missing=tuple(variants))
    else:
        supply = fetch(settings, checkpoint.digest, variants)
    if settings.device == "neuron" and supply.missing and not settings.allow_compile:
        raise EnvironmentFault(missing_message(supply, settings))
    return supply


def graphs_in(folder: Path) -> frozenset[str]:
    """The graphs in a compiler's cache folder: Neuron's executables, and inductor's entries, one folder for each."""
    found = [*folder.rglob("*.neff"), *folder.glob("fxgraph/*/*")]
    return frozenset(path.relative_to(folder).as_posix() for path in found)


def count_graphs(folder: Path, before: frozenset[str]) -> dict[str, int]:
    """Graphs that were there before the run (`hits`) and those that it added (`misses`).

    Counted once for all engines of this machine, which share the folder, however often one was started.
    """
    return {"hits": len(before), "misses": len(graphs_in(folder) - before)}


def check_compiler(settings: Settings) -> None:
    """Raise EnvironmentFault where graphs are to be compiled on a CPU that has no C++ compiler."""
    inductor = settings.device == "cpu" and settings.compile_backend != "eager"
    if inductor and host_compiler() is None:
        raise EnvironmentFault(
            f"--compile {settings.compile} on cpu needs a C++ compiler, and neither CXX nor g++ names one;"
            " install g++ or use --compile off"
        )


def fetch(settings: Settings, model_digest: str, variants: Sequence[Variant]) -> Supply:
    """Fetch the artefacts of these variants from the set that the user's digest names."""
    if settings.graphs_digest is None:
        raise UsageError(
            "--graphs needs --graphs-digest, the SHA-256 that batch-gen compile printed: compiled graphs are code,"
            " and a store is not trusted by its name"
        )
    assert settings.graphs is not None
    store = open_store(settings.graphs, store_options(settings))
    known = get_document(store, "sets", settings.graphs_digest, GraphSet).artefacts
    folder = cache_folder() / "graphs" / settings.graphs_digest[:32]
    found, missing, fetched = [], [], 0
    for variant in variants:
        facts = facts_of(settings, model_digest, variant)
        digest = known.get(key_of(facts))
        if digest is None:
            missing.append(variant)
            continue
        fetched += unpack(store, find_artefact(store, digest, facts), folder)
        found.append(variant)
    return Supply(folder, tuple(found), tuple(missing), fetched)


def missing_message(supply: Supply, settings: Settings) -> str:
    """What is missing, why that stops the run, and both ways on."""
    shapes = ", ".join(map(str, supply.missing[:5])) + (" ..." if len(supply.missing) > 5 else "")
    where = "no --graphs was given" if settings.graphs is None else f"{settings.graphs} (set {settings.graphs_digest})"
    return (
        f"compiled graphs are missing for {len(supply.missing)} shapes: {shapes}; {where}. Compiling takes"
        " up to an hour for each: run batch-gen compile first with the same settings, or give --allow-compile"
    )
