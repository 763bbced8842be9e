"""`batch-gen regress components|step|bisect|report`: accuracy by tier, the stage that moved, the page of a night."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from batch_gen.cli import S3, given, run_flags
from batch_gen.commands.regress import RENDER, render_flags, store_of
from batch_gen.drain import again_on_sigterm
from batch_gen.errors import EXIT_CHECK_FAILED, EXIT_OK, BaselineMissing, UsageError

if TYPE_CHECKING:
    from batch_gen.regress.locate import Location
    from batch_gen.regress.render import Bench
    from batch_gen.regress.replay import Frozen
    from batch_gen.regress.results import Approval
    from batch_gen.regress.suite import Setup
    from batch_gen.regress.tiers import Subject
    from batch_gen.request import RenderRequest

F = TypeVar("F", bound=Callable[..., Any])
_AS_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print as JSON.")


def tier_flags(command: F) -> F:
    """The flags of every tier."""
    command = click.option("--case", default=None, help="The case of the suite that is measured; default: its first.")(
        command
    )
    command = click.option(
        "--reference",
        type=click.Choice(["diffusers", "plain"]),
        default="diffusers",
        show_default=True,
        help="Who is right: diffusers' modules, or our pipeline on one CPU rank (images, LoRA).",
    )(command)
    command = click.option(
        "--keep", type=click.Path(file_okay=False), default=None, help="Folder where reference legs are kept."
    )(command)
    return run_flags(*RENDER)(_AS_JSON(command))


@click.command()
@click.argument("suite", nargs=-1, metavar="[MANIFEST]...")
@tier_flags
def components(suite: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Measure text encoder, experts and decoder, each alone, against float32; exit 5 when one is wrong.

    Without MANIFEST: a small clip of the checkpoint's preset.

    \b
    Example: batch-gen regress components --model tiny --dtype bfloat16
    """
    return _tier("components", suite, options, as_json)


@click.command()
@click.argument("suite", nargs=-1, metavar="[MANIFEST]...")
@tier_flags
def step(suite: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Measure the guided velocity of single steps, each from the reference's latents; exit 5 when one is wrong.

    Faults of long sequences and of late steps need a case of the real size, so give MANIFEST.

    \b
    Example: batch-gen regress step manifests/regression.parquet --case base --device neuron --keep references
    """
    return _tier("step", suite, options, as_json)


@click.command()
@click.argument("suite", nargs=-1, required=True, metavar="MANIFEST...")
@render_flags
@click.option("--case", "cases", multiple=True, help="Only this case; default: those of the last night that are red.")
@click.option("--first", is_flag=True, help="Stop at the first stage that moved.")
@click.option("--against", default=None, help="Baselines of this platform key; default: this machine's.")
@_AS_JSON
def bisect(
    suite: tuple[str, ...], cases: tuple[str, ...], first: bool, against: str | None, as_json: bool, **options: Any
) -> int:
    """Replay every stage of a case from what its baseline kept and name the first that moved; exit 5 when one did.

    \b
    Example: batch-gen regress bisect manifests/regression.parquet --out nightly --case base
    """
    from batch_gen.regress.render import open_bench
    from batch_gen.regress.suite import prepare_suite

    again_on_sigterm()
    setup = prepare_suite(suite, given(options))
    found = {}
    pairs = [(request, _baseline(setup, request, against)) for request in _cases(setup, cases)]
    with open_bench(setup) as bench:
        for request, approval in pairs:
            located = _located(setup, bench, _frozen(setup, approval), approval, first=first)
            found[request.clip_id] = located
            _keep(setup, request.clip_id, located)
            if not as_json:
                click.echo(f"{request.clip_id}: {located.words}")
    body = [{"case": case, **located.to_json()} for case, located in found.items()]
    if as_json:
        click.echo(json.dumps({"suite": setup.name, "cases": body}, indent=1))
    return EXIT_CHECK_FAILED if any(located.first for located in found.values()) else EXIT_OK


@click.command()
@click.argument("suite", metavar="NAME")
@run_flags("out", *S3)
@click.option("--night", default=None, help="Which night.  [default: the last one]")
@click.option("--to", default=None, help="A folder for the page; default: report/ beside the night's results.")
@_AS_JSON
def report(suite: str, night: str | None, to: str | None, as_json: bool, **options: Any) -> int:
    """Build the page of a night: frames side by side, curves, what changed, the trend of 30 nights.

    NAME is the suite's, or its manifest's path.

    \b
    Example: batch-gen regress report regression --out nightly
    """
    from batch_gen.regress.suite import suite_name
    from batch_gen.report.regress import build_page

    name = suite_name(suite)
    built = build_page(store_of(suite, options), name, night, Path(to) if to else None)
    closing = (
        f"{built.num_cases} cases, {built.num_pictures:,} pictures, {built.bytes / 1e6:.1f} MB\nopen       {built.page}"
    )
    click.echo(json.dumps(built.to_json(), indent=1) if as_json else closing)
    return EXIT_OK


def _tier(name: str, suite: tuple[str, ...], options: Mapping[str, Any], as_json: bool) -> int:
    from batch_gen.checkpoint import default_model
    from batch_gen.regress import tiers

    again_on_sigterm()
    chosen = given(dict(options))
    case, reference, keep = (chosen.pop(key, None) for key in ("case", "reference", "keep"))
    if suite:
        answer = tiers.measure(name, subject_of(suite, chosen, case, str(reference)), keep=keep)
    elif case is not None:
        raise UsageError("--case names a case of a suite; give the suite's MANIFEST, or leave --case out")
    else:
        model = str(chosen.pop("model", None) or default_model(""))
        answer = tiers.tier(name, model, reference=reference, keep=keep, **chosen)
    click.echo(json.dumps(answer, indent=1) if as_json else "\n".join(_lines(answer)))
    return EXIT_OK if answer["ok"] else EXIT_CHECK_FAILED


def subject_of(suite: tuple[str, ...], chosen: Mapping[str, Any], case: str | None, reference: str) -> Subject:
    """A case of a suite with its images, as the tiers measure it.

    Raises:
        BatchGenError: exit code 2.
    """
    from batch_gen.images import images_of
    from batch_gen.regress.render import image_reader
    from batch_gen.regress.suite import prepare_suite
    from batch_gen.regress.tiers import Subject

    setup = prepare_suite(suite, chosen)
    request = _cases(setup, (case,) if case else (setup.requests[0].clip_id,))[0]
    images = tuple(images_of(request, image_reader(setup), setup.settings.resize)[0])
    return Subject(setup.settings, setup.checkpoint, request, images, reference)  # type: ignore[arg-type]


def _lines(answer: Mapping[str, Any]) -> list[str]:
    """An answer for people."""
    lines = []
    for row in answer["rows"]:
        ours, their = row["ours"]["l2"], row["reference"]["l2"]
        lines.append(
            f"{row['verdict']:5} {row['name']}: ours {ours or 0:.1e}, reference {their or 0:.1e}; {row['why']}"
        )
    if answer["error"]:
        lines.append(f"fail  {answer['error']['kind']}: {answer['error']['message']}")
    if answer["trend"]:
        lines.append(f"over the steps: {answer['trend']['kind']}")
    return [*lines, f"{answer['tier']}: {answer['verdict']} ({answer['model']}, against {answer['reference']})"]


def _cases(setup: Setup, names: tuple[str, ...]) -> list[RenderRequest]:
    """The cases that were asked for, else the red ones of the last night, else all.

    Raises:
        UsageError: the suite has no such case.
    """
    from batch_gen.regress.results import last_nights

    known = {request.clip_id: request for request in setup.requests}
    if unknown := sorted(set(names) - set(known)):
        raise UsageError(f"suite {setup.name} has no case {', '.join(unknown)}; it has {', '.join(known)}")
    if names:
        return [known[name] for name in names]
    last = last_nights(setup.store, setup.name, 1)
    red = [case.case for night in last for case in night.cases if case.verdict == "fail"]
    return [known[name] for name in red if name in known] or list(setup.requests)


def _baseline(setup: Setup, request: RenderRequest, against: str | None) -> Approval:
    """The youngest approved variant of the same request.

    Raises:
        BaselineMissing: there is none, or it kept nothing that can be replayed.
    """
    from batch_gen.regress.baseline import find_baselines
    from batch_gen.regress.documents import checked_part

    platform = setup.platform.key if against is None else checked_part("--against", against)
    every = find_baselines(setup.store, setup.name, request.clip_id, platform)
    usable = [one for one in every if one.request_digest == request.digest and one.artifacts.arrays is not None]
    if not usable:
        raise BaselineMissing(
            f"case {request.clip_id} has no approved baseline with kept stages on {platform}; "
            "batch-gen regress run renders it, regress approve makes it one"
        )
    return usable[-1]


def _frozen(setup: Setup, approval: Approval) -> Frozen:
    from batch_gen.regress.artifacts import load_arrays, load_frames
    from batch_gen.regress.replay import frozen_of
    from batch_gen.request import RenderRequest

    kept = approval.artifacts
    assert kept.arrays is not None
    frames = None if kept.frames is None else load_frames(setup.store, kept.frames)
    return frozen_of(RenderRequest.from_json(approval.request), load_arrays(setup.store, kept.arrays), frames)


def _located(setup: Setup, bench: Bench, frozen: Frozen, approval: Approval, *, first: bool) -> Location:
    from batch_gen.regress.locate import has_moved, limits_between, locate
    from batch_gen.regress.replay import replay
    from batch_gen.worker import encode_settings

    limits = limits_between(approval.fingerprint, setup.fingerprint)
    images, found = tuple(bench.images(frozen.request)), []
    for difference in replay(bench.engine, frozen, images, encode_settings(setup.settings)):
        found.append(difference)
        if first and has_moved(difference, limits):
            break
    return locate(found, limits)


def _keep(setup: Setup, case: str, located: Location) -> None:
    """Beside the last night, whose page shows it; made again at will."""
    from batch_gen.regress.results import last_nights
    from batch_gen.report.regress import bisect_key

    for night in last_nights(setup.store, setup.name, 1):
        if night.platform.key == setup.platform.key:
            body = json.dumps(located.to_json(), indent=1).encode()
            setup.store.put(bisect_key(night, case), body, content_type="application/json")


COMMANDS: Final[dict[str, click.Command]] = {
    "components": components,
    "step": step,
    "bisect": bisect,
    "report": report,
}
