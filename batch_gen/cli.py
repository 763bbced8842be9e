"""Command line -> frozen settings -> one command function -> exit code.

Commands are imported when they run, so that `--help` is quick and `validate`, `plan` and `status` never load torch.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from batch_gen import __version__
from batch_gen.commands.lazy import RegressGroup
from batch_gen.errors import BatchGenError
from batch_gen.flags import FLAGS, Flag

F = TypeVar("F", bound=Callable[..., Any])
S3 = tuple(flag.name for flag in FLAGS if flag.name.startswith("s3-"))
_TYPES: dict[str, Any] = {"str": str, "int": int, "float": float, "path": click.Path()}


def run_flags(*names: str) -> Callable[[F], F]:
    """Add the settings of `flags.py` as options; all of them, or those named. Unset ones arrive as None."""

    def decorate(command: F) -> F:
        for flag in reversed([flag for flag in FLAGS if not names or flag.name in names]):
            command = _option(flag)(command)
        return command

    return decorate


def _option(flag: Flag) -> Callable[[F], F]:
    default = "" if flag.default is None or flag.default == () else f"  [default: {_shown(flag.default)}]"
    help_text = flag.help + default
    if flag.kind == "bool":
        return click.option(f"--{flag.name}/--{flag.opposite}", flag.key, default=None, help=help_text)
    kind = click.Choice(flag.kind) if isinstance(flag.kind, tuple) else _TYPES[flag.kind]
    return click.option(f"--{flag.name}", flag.key, type=kind, default=None, multiple=flag.multiple, help=help_text)


def _shown(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options that somebody set."""
    return {key: value for key, value in options.items() if value is not None and value != ()}


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="batch-gen")
@click.option("--verbose", "-v", is_flag=True, help="Log what happens, as JSON lines on stderr.")
def app(verbose: bool) -> None:
    """Render thousands of videos offline with Wan2.2: a Parquet manifest in, verified MP4s and metrics out.

    \b
    batch-gen run manifest.parquet            render everything, resume what was begun
    batch-gen validate manifest.parquet       check every row, render nothing
    batch-gen status OUT                      how a run stands
    """
    from batch_gen.logs import configure

    configure(logging.INFO if verbose else logging.WARNING)


@app.command()
@click.argument("manifest", nargs=-1, required=True)
@run_flags()
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def run(manifest: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Render every clip of MANIFEST that is not committed yet.

    \b
    Example: batch-gen run manifests/demo.parquet --out demo-out --limit 4
    """
    from batch_gen.commands.run import run as command

    return command(manifest, given(options), as_json)


@app.command()
@click.argument("manifest", nargs=-1, required=True)
@run_flags()
@click.option("--json", "as_json", is_flag=True, help="Print faults and warnings as JSON.")
def validate(manifest: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Check every row of MANIFEST and print all faults at once; nothing is rendered.

    \b
    Example: batch-gen validate shots/ --model tiny
    """
    from batch_gen.commands.validate import validate as command

    return command(manifest, given(options), as_json)


@app.command()
@click.argument("manifest", nargs=-1)
@run_flags()
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(manifest: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Show what `run` would do and take: memory, seconds, money, meshes; nothing is rendered or written.

    Without MANIFEST: one clip of the preset. A published model name needs no weights. Exit 2 when it does not fit.

    \b
    Example: batch-gen plan manifests/demo.parquet --json
    Example: batch-gen plan --model wan2.2-t2v-a14b --preset t2v-a14b-720p --profile trn2-720p
    """
    from batch_gen.commands.plan import plan as command

    return command(manifest, given(options), as_json)


@app.command("compile")
@click.argument("manifest", nargs=-1, required=True)
@run_flags()
@click.option("--json", "as_json", is_flag=True, help="Print the artefacts as JSON.")
def compile_(manifest: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Compile the graphs of MANIFEST ahead of time and pack them for other machines; prints the SHA-256 to trust.

    \b
    Example: batch-gen compile m.parquet --profile trn2-480p --model s3://b/wan --graphs s3://b/graphs
    """
    from batch_gen.commands.compile_ import compile_graphs as command

    return command(manifest, given(options), as_json)


@app.command()
@click.argument("out")
@click.argument("clip_id", required=False)
@run_flags(*S3, "price-per-hour")
@click.option("--watch", is_flag=True, help="Repeat every 10 seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def status(out: str, clip_id: str | None, watch: bool, as_json: bool, **options: Any) -> int:
    """Say how the run under OUT stands, or tell the whole story of one clip.

    \b
    Example: batch-gen status demo-out --json
    """
    from batch_gen.commands.status import status as command

    return command(out, clip_id, given(options), watch=watch, as_json=as_json)


@app.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def models(as_json: bool) -> int:
    """List the architectures, built-in checkpoints, presets and profiles.

    \b
    Example: batch-gen models
    """
    from batch_gen.commands.models import models as command

    return command(as_json)


@app.command()
@click.argument("out")
@run_flags(*S3, "price-per-hour")
@click.option("--to", default=None, help="A folder for the report; default: report/ below OUT.")
@click.option("--with-clips", is_flag=True, help="Copy the clips into that folder too.")
@click.option("--clips-url", default=None, help="https address of OUT for browsers, for a report elsewhere.")
@click.option("--max-posters", type=click.IntRange(0), default=600, show_default=True, help="New posters a build.")
@click.option("--json", "as_json", is_flag=True, help="Print what was built as JSON.")
def report(out: str, as_json: bool, **options: Any) -> int:
    """Build a gallery, clip pages and a run page as static HTML; also while the run goes on.

    \b
    Example: batch-gen report demo-out --price-per-hour 35.76
    """
    from batch_gen.commands.report import report as command

    return command(out, given(options), as_json)


@app.command("import")
@click.argument("source", nargs=-1, required=True)
@click.argument("destination")
@click.option("--from", "engine", default=None, help="The engine whose names the files use, where names are ambiguous.")
@click.option("--dedupe", is_flag=True, help="Drop rows that are equal to an earlier one.")
@click.option("--grid", multiple=True, help="Sweep a column, e.g. --grid seed=1..4 --grid guidance_high=3,4,5.")
@click.option("--json", "as_json", is_flag=True, help="Print what was mapped as JSON.")
def import_(
    source: tuple[str, ...], destination: str, engine: str | None, dedupe: bool, grid: tuple[str, ...], as_json: bool
) -> int:
    """Turn text, CSV, JSONL or foreign Parquet files into a canonical manifest.

    \b
    Example: batch-gen import prompts.txt manifest.parquet
    """
    from batch_gen.commands.import_ import import_ as command

    return command(source, destination, engine=engine, dedupe=dedupe, grid=grid, as_json=as_json)


@app.command()
@click.argument("out")
@run_flags(*S3)
@click.option("--deep", is_flag=True, help="Also decode every file.")
@click.option("--fix", is_flag=True, help="Mend what can be mended; damaged things go below aside/.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def verify(out: str, deep: bool, fix: bool, as_json: bool, **options: Any) -> int:
    """Hold records, files, plan and done log of OUT against each other; exit 5 when something is wrong.

    \b
    Example: batch-gen verify demo-out --deep
    """
    from batch_gen.commands.care import verify_out as command

    return command(out, given(options), deep=deep, fix=fix, as_json=as_json)


@app.command()
@click.argument("out")
@run_flags("ids", *S3)
@click.option("--errors", multiple=True, help="Only these retry classes or kinds, e.g. transient, hang.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def retry(out: str, errors: tuple[str, ...], as_json: bool, **options: Any) -> int:
    """Give quarantined clips of OUT another chance: a new round that the next `run` makes.

    \b
    Example: batch-gen retry demo-out --errors nonfinite
    """
    from batch_gen.commands.care import retry_clips as command

    return command(out, given(options), errors, as_json)


@app.command()
@click.argument("out")
@run_flags(*S3)
@click.option("--yes", "really", is_flag=True, help="Remove; without it only say what would go.")
@click.option("--aside", is_flag=True, help="Also what `verify --fix` set aside.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def clean(out: str, really: bool, aside: bool, as_json: bool, **options: Any) -> int:
    """Remove what OUT does not need any more: kept latents, leases of finished chunks, probe leftovers.

    \b
    Example: batch-gen clean demo-out --yes
    """
    from batch_gen.commands.care import clean_out as command

    return command(out, given(options), really=really, aside=aside, as_json=as_json)


@app.command()
@click.argument("out")
@click.argument("folder")
@run_flags("ids", *S3)
@click.option("--template", default="{clip_id}", help="File name, e.g. {shot}_{take}: fields and columns.")
@click.option(
    "--kind",
    type=click.Choice(["copy", "link", "prores422", "prores4444", "png", "exr", "poster"]),
    default="copy",
    help="What is written.  [default: copy]",
)
@click.option("--skip-existing", is_flag=True, help="Leave files that are there already.")
@click.option("--json", "as_json", is_flag=True, help="Print names as JSON.")
def export(out: str, folder: str, as_json: bool, **options: Any) -> int:
    """Write committed clips of OUT to FOLDER: copies, hard links, ProRes, image sequences or posters.

    \b
    Example: batch-gen export demo-out delivery --kind prores422 --template "{row_id}"
    """
    from batch_gen.commands.export import export_clips as command

    return command(out, folder, given(options), as_json)


@app.command()
@click.argument("out")
@click.option("--message", default="by hand", help="Why, for those who look.")
@click.option("--now", is_flag=True, help="End running jobs of AWS Batch too (SIGTERM), not only those that wait.")
@run_flags(*S3)
def cancel(out: str, message: str, now: bool, **options: Any) -> int:
    """Stop every worker of the run under OUT: each drains and exits 4; `run --continue` goes on.

    Jobs that `submit` started and that have no machine yet are ended.

    \b
    Example: batch-gen cancel s3://bucket/run --message "wrong seed"
    """
    from batch_gen.commands.cancel import cancel as command

    return command(out, given(options), message, now=now)


@app.command()
@click.argument("record")
@run_flags("model", "threads", "mesh", "scratch", *S3)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def reproduce(record: str, as_json: bool, **options: Any) -> int:
    """Render one clip again from its record and compare frames; exit 5 when they differ.

    \b
    Example: batch-gen reproduce demo-out/clips/4f/red-circle-right.json
    """
    from batch_gen.commands.reproduce import reproduce as command

    return command(record, given(options), as_json)


@app.command()
@click.option("--out", default=None, help="Also probe this output root.")
@run_flags("model", "profile", "scratch", *S3)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def doctor(out: str | None, as_json: bool, **options: Any) -> int:
    """Check this machine, one line each, with the fix beside what is wrong; exit 5 on a red line.

    \b
    Example: batch-gen doctor --out s3://bucket/run
    """
    from batch_gen.commands.doctor import doctor as command

    return command(out, given(options), as_json)


@app.command()
@click.argument("manifest", nargs=-1, required=True)
@run_flags()
@click.option("--nodes", type=int, default=1, help="Machines: 1 is a plain job, more are an array.  [default: 1]")
@click.option("--queue", default=None, help="Batch job queue, name or ARN.  [default: batch-gen]")
@click.option("--image", default=None, help="Container image by digest.")
@click.option("--job-role", default=None, help="ARN of the role that workers act as.")
@click.option("--execution-role", default=None, help="ARN of the role that pulls the image and writes logs.")
@click.option("--attempts", type=int, default=10, help="Starts of one child at most.  [default: 10]")
@click.option("--tag", multiple=True, help="Cost allocation tag KEY=VALUE.")
@click.option("--secret", multiple=True, help="Variable of the workers from Secrets Manager, NAME=ARN.")
@click.option("--region", default=None, help="AWS region.")
@click.option("--batch-endpoint", default=None, help="URL of another Batch endpoint.")
@click.option("--local", type=int, default=0, help="Run as so many local processes instead, by Batch's own rules.")
@click.option("--dry-run", is_flag=True, help="Print the exact JSON; reads what the checks need, writes nothing.")
def submit(manifest: tuple[str, ...], dry_run: bool, **options: Any) -> int:
    """Check MANIFEST and every limit of AWS Batch, upload what is needed, and submit an array job.

    \b
    Example: batch-gen submit m.parquet --out s3://b/run --model s3://b/wan --nodes 8 --image REPO@sha256:...
    """
    from batch_gen.commands.submit import submit as command
    from batch_gen.flags import BY_KEY

    chosen = given(options)
    flags = {key: value for key, value in chosen.items() if key in BY_KEY}
    return command(manifest, flags, {key: value for key, value in chosen.items() if key not in BY_KEY}, dry_run=dry_run)


@app.group(cls=RegressGroup)
def regress() -> None:
    """Nightly renders of a suite, held against approved ones: what changed, in which stage, since when.

    \b
    Example: batch-gen regress run manifests/regression.parquet --out nightly
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: run one command and exit with its code."""
    sys.exit(invoke(argv))


def invoke(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; errors become one clear message on stderr."""
    try:
        from batch_gen.environment import guard_names

        guard_names()
        code = app.main(args=None if argv is None else list(argv), prog_name="batch-gen", standalone_mode=False)
        return int(code or 0)
    except click.ClickException as error:
        error.show()
        return 2
    except click.Abort:
        return 130
    except BatchGenError as error:
        click.echo(f"error: {error.message}\n{error.hint}", err=True)
        return error.exit_code
    except BrokenPipeError:
        return 0
    except Exception:  # a bug: the traceback is what its report needs
        traceback.print_exc()
        return 1
