"""`batch-gen compile`: build the graphs of a manifest's shapes ahead of time and pack them for other machines."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from batch_gen.commands.run import flags_again
from batch_gen.engine import Engine
from batch_gen.environment import worker_name
from batch_gen.errors import UsageError
from batch_gen.graphs.artefact import GraphSet, get_document
from batch_gen.graphs.build import Built, Wanted, Yard, build_all
from batch_gen.graphs.keys import Variant, facts_of, variant_of, variants_of
from batch_gen.graphs.supply import check_compiler
from batch_gen.images import COLUMNS, ImageReader
from batch_gen.launch import RemoteEngine
from batch_gen.lease import Owner
from batch_gen.placement import for_rehearsal, spec_of
from batch_gen.preflight import check_start
from batch_gen.prepare import Prepared, prepare, store_options
from batch_gen.request import RenderRequest
from batch_gen.scratch import open_scratch
from batch_gen.storage.base import open_store
from batch_gen.versions import versions


def compile_graphs(sources: Sequence[str], given: Mapping[str, Any], as_json: bool) -> int:
    """Build what the manifest needs, or find it, and print the digest that `run` is told; returns the exit code.

    Raises:
        UsageError: nothing to compile, or nowhere to put it.
        ArtefactRefused: the store holds something torn or foreign under a key of ours.
    """
    prepared = prepare(sources, given)
    check_compiles(prepared)
    check_start(prepared.settings, prepared.checkpoint, prepared.manifest.survey.work)
    done: list[Built] = []

    def tell(built: Built) -> None:
        done.append(built)
        if not as_json:
            size = f"{built.num_files} files, {built.num_bytes / 1e6:.1f} MB"
            click.echo(f"{built.status}  {built.variant:<28} {size:<24} {built.seconds:7.1f} s  {built.key}")

    wanted = wanted_of(prepared)
    with open_scratch(prepared.settings.scratch) as folder:
        digest = build_all(yard_of(prepared, wanted, folder), wanted, tell)
    if as_json:
        click.echo(json.dumps({"graphs_digest": digest, "artefacts": [asdict(built) for built in done]}, indent=1))
        return 0
    if any(built.status == "found" for built in done):
        click.echo("found: built by whoever could write to this store before; your digest now vouches for it")
    again = {**given, "graphs_digest": digest}
    click.echo(f"graphs digest  {digest}")
    click.echo(f"next           {shlex.join(['batch-gen', 'run', *sources, *flags_again(again)])}")
    return 0


def check_compiles(prepared: Prepared) -> None:
    """Raise UsageError where there is nothing to compile, or no store for it."""
    settings = prepared.settings
    if prepared.checkpoint.folder is None:
        raise UsageError("--model fake compiles nothing")
    if settings.compile == "off" or settings.compile_backend == "eager":
        raise UsageError("nothing to compile with these settings: give --compile block or --compile model, not eager")
    check_compiler(settings)
    if settings.graphs is None:
        raise UsageError("--graphs must say where the compiled graphs go: a folder or s3://bucket/prefix")
    if settings.graphs_digest is not None:  # a wrong digest is a mistake that is cheap to see now
        get_document(open_store(settings.graphs, store_options(settings)), "sets", settings.graphs_digest, GraphSet)


def wanted_of(prepared: Prepared) -> list[Wanted]:
    """A key for each variant, with one request for each kind of guidance that its clips have."""
    requests: dict[Variant, dict[bool, RenderRequest]] = {}
    for row in prepared.rows():
        request = row.request
        both_stages = request.guidance_high > 1
        requests.setdefault(variant_of(request), {}).setdefault(both_stages, request)
    digest = prepared.checkpoint.digest
    return [
        Wanted(variant, facts_of(prepared.settings, digest, variant), tuple(requests[variant].values()))
        for variant in variants_of(prepared)
    ]


def yard_of(prepared: Prepared, wanted: Sequence[Wanted], folder: Path) -> Yard:
    """The store, this worker and its engines."""
    settings = prepared.settings
    assert settings.graphs is not None
    name = worker_name()
    owner = Owner(name, name, settings.lease_ttl, min(30.0, settings.lease_ttl / 4))
    options = store_options(settings)
    return Yard(
        store=open_store(settings.graphs, options),
        owner=owner,
        start=_starter(prepared, folder),
        reader=reader_of(prepared, wanted),
        resize=settings.resize,
        scratch=folder,
        versions=versions(),
    )


def reader_of(prepared: Prepared, wanted: Sequence[Wanted]) -> ImageReader:
    """Reads the images of these requests: there is no output root, so bytes come from the manifest itself."""
    requests = [request for one in wanted for request in one.requests]
    named = {getattr(request, column) for request in requests for column in COLUMNS}
    cells = {source: body for source, body in prepared.manifest.iter_image_bytes() if source in named}
    return ImageReader(None, store_options(prepared.settings), cells)


def _starter(prepared: Prepared, folder: Path) -> Callable[[Path], Engine]:
    def start(cache: Path) -> Engine:
        return RemoteEngine(for_rehearsal(spec_of(prepared.settings, prepared.checkpoint, folder / "ranks", 0, cache)))

    return start
