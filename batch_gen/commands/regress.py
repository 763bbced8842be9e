"""`batch-gen regress`: nightly renders held against approved ones, and everything around them.

The group itself is in cli.py; its commands are here, and load what they need when they run.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from batch_gen.cli import S3, given, run_flags
from batch_gen.commands.kinds import Name
from batch_gen.drain import again_on_sigterm
from batch_gen.errors import EXIT_CHECK_FAILED, EXIT_OK, UsageError
from batch_gen.reach import reach
from batch_gen.storage.base import AlreadyExists, Store, open_store

F = TypeVar("F", bound=Callable[..., Any])
RENDER: Final = (
    *("model", "preset", "dtype", "vae-dtype", "solver", "quantization", "modules-to-not-convert", "lora"),
    *("step-cache", "step-cache-warm-up", "step-cache-max-run", "decode", "long-prompt", "resize", "run-seed"),
    *("out", "profile", "config", "device", "mesh", "attention", "kernels", "experts", "tp-sequence-parallel"),
    *("compile", "compile-backend", "graphs", "graphs-digest", "allow-compile", "threads", "scratch", "limit", "ids"),
    *("where", "override", "stall-timeout", "no-token-check", "ignore-memory", "quiet"),
)
"""Flags of `run` that say how a clip is rendered and which rows are meant."""
_AS_JSON: Final = click.option("--json", "as_json", is_flag=True, help="Print as JSON.")


def render_flags(command: F) -> F:
    """The flags of every command that renders a suite."""
    limits = click.option("--limits", help="YAML of limits, path or s3:// URL; default: the manifest's name, .yaml.")
    return run_flags(*RENDER)(limits(command))


def decision_flags(command: F) -> F:
    """Who takes the blame."""
    who = click.option("--who", required=True, help="Who decides; kept with the approval.")
    return who(click.option("--why", required=True, help="Why; kept with the approval.")(command))


@click.command()
@click.argument("suite", nargs=-1, required=True, metavar="MANIFEST...")
@render_flags
@click.option(
    "--night",
    type=Name("night"),
    default=None,
    help="Name of the night; names sort by time.  [default: the moment, in UTC]",
)
@click.option("--notify", default=None, help="A line of JSON when a state changed: - for stdout, or a webhook URL.")
@click.option("--emf", is_flag=True, help="A line of CloudWatch metrics (EMF) on stderr at the end.")
@_AS_JSON
def run(suite: tuple[str, ...], night: str | None, notify: str | None, emf: bool, as_json: bool, **options: Any) -> int:
    """Render MANIFEST's cases and hold every case against its baselines; exit 5 red, 6 new, 75 not rendered.

    \b
    Example: batch-gen regress run manifests/regression.parquet --out s3://bucket/nightly --model pocket
    """
    from batch_gen.notify import Notifier
    from batch_gen.regress.night import check_name, night_name, run_night, tell
    from batch_gen.regress.render import open_bench
    from batch_gen.regress.suite import prepare_suite
    from batch_gen.regress.summary import closing, metric_line

    again_on_sigterm()
    if notify is not None:
        check_notify(notify)
    setup = prepare_suite(suite, given(options))
    name = (night or night_name()).replace(":", "")  # a schedule hands over its moment as 2026-11-29T02:00:00Z
    check_name(setup, name)
    with open_bench(setup) as bench:
        found = run_night(setup, bench, name, _sayer(options, as_json))
    tell(found, None if notify is None else Notifier(notify, sys.stderr if as_json else None))
    click.echo(found.to_bytes().decode() if as_json else closing(found, setup.settings.out))
    if emf:
        click.echo(metric_line(found), err=True)
    return found.exit_code


@click.command()
@click.argument("suite", metavar="NAME")
@run_flags("out", *S3)
@click.option("--night", type=Name("night"), default=None, help="The night that is approved.  [default: the last one]")
@click.option("--case", "cases", type=Name("case"), multiple=True, help="Only this case; default: all new or red.")
@click.option(
    "--retire", type=Name("variant"), default=None, help="Take back this approved variant of the one --case instead."
)
@decision_flags
@_AS_JSON
def approve(
    suite: str, night: str | None, cases: tuple[str, ...], retire: str | None, as_json: bool, **options: Any
) -> int:
    """Make clips of a night the baselines that later nights are held against; written once, never changed.

    NAME is the suite's, or its manifest's path.

    \b
    Example: batch-gen regress approve regression --out nightly --case base --who Kim --why "new VAE, looked at it"
    """
    from batch_gen.regress.approve import Decision, approve, retire_variant, the_night, unapproved
    from batch_gen.regress.suite import suite_name

    decision, name = Decision(options["who"], options["why"]), suite_name(suite)
    store = store_of(suite, options)
    chosen = the_night(store, name, night)
    if retire is not None:
        if len(cases) != 1:
            raise UsageError("--retire needs the one --case that the variant belongs to")
        made = [retire_variant(store, chosen, cases[0], retire, decision)]
    else:
        made = approve(store, chosen, cases, decision)
    if as_json:
        click.echo(json.dumps([{"case": one.case, "variant": one.variant} for one in made], indent=1))
        return EXIT_OK
    verb = "retired" if retire is not None else "approved"
    for one in made:
        click.echo(f"{verb}   {one.case}: variant {one.variant} on {one.platform.key}, night {one.night}")
    for line in unapproved(chosen, cases, made):
        click.echo(line)
    return EXIT_OK


@click.command()
@click.argument("suite", metavar="NAME")
@click.argument("case", type=Name("case"))
@run_flags("out", *S3)
@_AS_JSON
def log(suite: str, case: str, as_json: bool, **options: Any) -> int:
    """Tell the story of CASE: who approved what and why, and how its nights went.

    NAME is the suite's, or its manifest's path.

    \b
    Example: batch-gen regress log regression base --out nightly
    """
    from batch_gen.regress.log import lines, story
    from batch_gen.regress.suite import suite_name

    name = suite_name(suite)
    told = story(store_of(suite, options), name, case)
    click.echo(json.dumps(told, indent=1) if as_json else "\n".join(lines(told)))
    return EXIT_OK


@click.command()
@click.argument("suite", nargs=-1, required=True, metavar="MANIFEST...")
@render_flags
@click.option("--repeats", type=click.IntRange(2, 20), default=3, show_default=True, help="Renders of each case.")
@click.option("--bf16", is_flag=True, help="Also render in bfloat16, the yardstick of latents_ratio.")
@click.option(
    "--write", "target", type=click.Path(dir_okay=False), default=None, help="Write the proposed limits here."
)
@_AS_JSON
def calibrate(
    suite: tuple[str, ...], repeats: int, bf16: bool, target: str | None, as_json: bool, **options: Any
) -> int:
    """Render a suite several times, learn its noise and propose limits; exit 5 when a limit lies inside the noise.

    \b
    Example: batch-gen regress calibrate manifests/regression.parquet --repeats 3 --write manifests/regression.yaml
    """
    import yaml

    from batch_gen.regress.calibrate import calibrate as measure
    from batch_gen.regress.calibrate import with_proposals
    from batch_gen.regress.night import night_name
    from batch_gen.regress.render import open_bench
    from batch_gen.regress.suite import prepare_suite

    again_on_sigterm()
    place = None if target is None else check_target(target)
    setup = prepare_suite(suite, given(options))
    found = measure(setup, repeats, open_bench, bf16=bf16, said=_sayer(options, as_json))
    _keep(setup.store, f"regress/{setup.name}/calibration/{night_name()}.json", found.to_json())
    proposed = yaml.safe_dump(with_proposals(setup.file, found), sort_keys=False)
    click.echo(json.dumps(found.to_json(), indent=1) if as_json else _calibrated(found.to_json(), proposed))
    if place is not None:
        write_whole(place, proposed)
    return EXIT_CHECK_FAILED if found.refused else EXIT_OK


@click.command()
@click.argument("suite", nargs=-1, required=True, metavar="MANIFEST...")
@render_flags
@click.option("--case", default=None, help="The case that is mutated; default: the first that can be.")
@_AS_JSON
def mutate(suite: tuple[str, ...], case: str | None, as_json: bool, **options: Any) -> int:
    """Prove that the gates bite: plant faults into a real clip of a suite; exit 5 when one goes unseen.

    \b
    Example: batch-gen regress mutate manifests/regression.parquet --out nightly --json
    """
    from batch_gen.regress.mutate import run_mutations
    from batch_gen.regress.night import night_name
    from batch_gen.regress.render import open_bench
    from batch_gen.regress.suite import prepare_suite
    from batch_gen.scratch import open_scratch

    again_on_sigterm()
    setup = prepare_suite(suite, given(options))
    with open_scratch(setup.settings.scratch) as folder:
        found, unchanged = run_mutations(setup, case, open_bench, folder, _sayer(options, as_json))
    body = {"mutations": [one.to_json() for one in found], "unchanged": "pass" if unchanged else "fail"}
    _keep(setup.store, f"regress/{setup.name}/mutations/{night_name()}.json", body)
    if as_json:
        click.echo(json.dumps(body, indent=1))
    return EXIT_OK if unchanged and all(one.caught for one in found) else EXIT_CHECK_FAILED


def check_target(target: str) -> Path:
    """The file that `--write` names, its links followed; looked at before hours of rendering.

    Raises:
        UsageError: it cannot be written.
    """
    path = Path(target).resolve()
    try:
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise UsageError(f"--write {target}: there is something that is no file of yours; name another")
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name[:100]}."):
            return path
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"--write {target}: {path.parent}: {reason}; name a folder that you can write") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old limits or the new ones.

    Raises:
        UsageError: the folder cannot be written any more.
    """
    partial = path.with_name(f".{path.name[:100]}.{os.getpid()}")
    try:
        partial.write_text(text, "utf-8")
        if path.exists():
            shutil.copymode(path, partial)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"--write {path}: {error.strerror or error}; what was proposed is printed above") from error


def check_notify(target: str) -> None:
    """Raises UsageError for what cannot be told anything."""
    from batch_gen.notify import check_target

    try:
        check_target(target)
    except UsageError as error:
        raise UsageError(error.message.replace("--on-clip", "--notify")) from None


def store_of(suite: str, options: Mapping[str, Any]) -> Store:
    """The regress root: `--out`, by default what `regress run` takes for a manifest of that name."""
    from batch_gen.prepare import default_out

    source = suite if "/" in suite or suite.endswith(".parquet") else f"{suite}.parquet"  # a name may have dots
    return open_store(str(options.get("out") or default_out([source])), reach(options))


def _keep(store: Store, key: str, body: Mapping[str, Any]) -> None:
    try:
        store.create(key, json.dumps(body, indent=1).encode() + b"\n", content_type="application/json")
    except AlreadyExists:
        raise UsageError(f"{store.url}/{key} exists: another process wrote it in the same second") from None


def _sayer(options: Mapping[str, Any], as_json: bool) -> Callable[[str], None]:
    """Says one line as a case ends; on stderr, where it is in nobody's way."""
    if options.get("quiet"):
        return lambda _: None
    return lambda line: click.echo(line, err=as_json)


def _calibrated(body: Mapping[str, Any], proposed: str) -> str:
    """What the repeats showed, for people."""
    same = "equal bits" if body["identical"] else "different bits"
    lines = [f"{body['repeats']} repeats: {same}"]
    lines += [f"noise      {name} {value:.6g}" for name, value in body["noise"].items()]
    lines += [f"speed      {name} varies by {value:.1%}" for name, value in body["speed"].items()]
    lines += [f"too tight  {line}" for line in body["refused"]]
    return "\n".join([*lines, "proposed limits:", proposed.rstrip() or "{}"])


COMMANDS: Final[dict[str, click.Command]] = {
    "run": run,
    "approve": approve,
    "log": log,
    "calibrate": calibrate,
    "mutate": mutate,
}
