"""`batch-gen submit`: a checked manifest becomes an array job."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from batch_gen import clock
from batch_gen.commands.plan import describe, estimated
from batch_gen.config import profile_names
from batch_gen.errors import EXIT_OK, ConfigError, UsageError
from batch_gen.estimate.published import refuse_published
from batch_gen.flags import FLAGS
from batch_gen.prepare import Prepared, check_run_memory, layers_of, prepare, store_options
from batch_gen.stop import check_stop, retire_stop
from batch_gen.storage.base import Store, open_store
from batch_gen.submit import limits
from batch_gen.submit.definition import SCRATCH, Fleet, job_definition, submission, worker_command
from batch_gen.submit.local import exit_code_of, run_local
from batch_gen.submit.upload import Upload, json_upload, manifest_uploads, upload

# `out` and `model` are given as prepared, the job file is folded in, the others are this machine's or this moment's.
_NOT_FOR_WORKERS: Final = ("out", "model", "config", "shard", "scratch", "continue", "prometheus")
_LOCAL_FILES: Final = ("ids", "block_list")
_BUILT_IN: Final = ("pocket", "tiny", "fake")


@dataclass(frozen=True, slots=True)
class Order:
    """Everything that a submission is made of."""

    fleet: Fleet
    definition: dict[str, Any]
    body: dict[str, Any]
    config: dict[str, Any]
    plan: dict[str, Any]
    uploads: list[Upload]


def submit(sources: Sequence[str], given: Mapping[str, Any], fleet_options: Mapping[str, Any], *, dry_run: bool) -> int:
    """Check everything, then submit (or print, or run here)."""
    layers = layers_of(given)
    local = int(fleet_options.get("local") or 0)
    if not local:
        refuse_unreachable(layers)
        if not dry_run and not fleet_options.get("image"):
            raise UsageError("--image must be given: the container image by digest (repository@sha256:...)")
    prepared = prepare(sources, given, weights=False)
    refuse_published(prepared.checkpoint)
    check_run_memory(prepared)
    if not local and prepared.question is not None and not {"profile", "device"} & layers.keys():
        refuse_this_machines_profile(prepared)
    if local:
        return _run_here(sources, given, prepared, local)
    refuse_local_images(prepared)
    order = order_of(sources, layers, fleet_options, prepared)
    refuse(faults_of(order))
    if dry_run:
        click.echo(json.dumps(shown(order), indent=1))
        return EXIT_OK
    store = open_store(prepared.settings.out, store_options(prepared.settings))
    if prepared.settings.continue_:
        retire_stop(store)
    check_stop(store)
    return _submit(store, fleet_options, order, prepared)


def order_of(
    sources: Sequence[str], layers: Mapping[str, Any], options: Mapping[str, Any], prepared: Prepared
) -> Order:
    """What would be submitted."""
    settings = prepared.settings
    fleet = fleet_of(options, prepared)
    definition = job_definition(fleet)
    urls, uploads = manifest_uploads(sources, settings.out.rstrip("/"))
    config = _worker_settings(layers, prepared)
    plan = plan_of(prepared)
    files = [json_upload(config, "job.yaml"), json_upload(plan, "plan.json")]
    reach = {flag.key: layers[flag.key] for flag in FLAGS if flag.name.startswith("s3-") and flag.key in layers}
    places = {"out": settings.out, "config": f"{settings.out.rstrip('/')}/{files[0].key}"}
    command = worker_command(urls, {**places, **reach})
    body = submission(fleet, job_name(prepared), definition["jobDefinitionName"], command)
    return Order(fleet, definition, body, config, plan, [*uploads, *files])


def fleet_of(options: Mapping[str, Any], prepared: Prepared) -> Fleet:
    """The fleet from the command's options."""
    hours = prepared.settings.max_hours
    return Fleet(
        queue=options.get("queue") or "batch-gen",
        image=options.get("image") or "batch-gen@sha256:" + "0" * 64,
        job_role=options.get("job_role"),
        execution_role=options.get("execution_role"),
        num_nodes=int(options.get("nodes", 1)),
        attempts=int(options.get("attempts", 10)),
        deadline_s=None if hours is None else hours * 3600.0,
        tags={"batch-gen-run": job_name(prepared), **dict(pair_of("--tag", text) for text in options.get("tag") or ())},
        secrets=dict(pair_of("--secret", text) for text in options.get("secret") or ()),
    )


def pair_of(flag: str, text: str) -> tuple[str, str]:
    """Key and value of `--tag KEY=VALUE` and its like."""
    key, found, value = text.partition("=")
    if not found or not key:
        raise UsageError(f"{flag} {text}: expected KEY=VALUE")
    return key, value


def plan_of(prepared: Prepared) -> dict[str, Any]:
    """What the run will do and take, kept beside the manifest for whoever asks later."""
    body = describe(prepared)
    found = None if prepared.question is None else estimated(prepared.settings, prepared.question, body["chunks"])
    return body | {"estimate": None if found is None else found.to_json()}


def faults_of(order: Order) -> Iterable[str]:
    """Every limit of AWS that this submission would break."""
    fleet, definition, body = order.fleet, order.definition, order.body
    yield from limits.array_faults(fleet.num_nodes)
    yield from limits.definition_faults(definition)
    yield from limits.name_faults(body["jobName"], "job")
    yield from limits.size_faults(body)
    if fleet.deadline_s is not None:
        yield from limits.timeout_faults(definition["timeout"]["attemptDurationSeconds"], fleet.deadline_s)
    if "@sha256:" not in fleet.image:
        yield f"--image {fleet.image}: name the image by digest (repository@sha256:...), tags move"
    if fleet.secrets and not fleet.execution_role:
        yield "--secret needs --execution-role: it is that role that may read the secret"
    on_clip = str(order.config.get("on_clip", ""))
    if on_clip.startswith("env:") and on_clip.removeprefix("env:") not in fleet.secrets:
        name = on_clip.removeprefix("env:")
        yield f"--on-clip {on_clip}: workers have no variable {name}; add --secret {name}=ARN"


def refuse(faults: Iterable[str]) -> None:
    """Raise ConfigError with all faults at once."""
    found = list(faults)
    if found:
        raise ConfigError("AWS Batch would not take this; nothing was submitted:\n  " + "\n  ".join(found))


def refuse_unreachable(layers: Mapping[str, Any]) -> None:
    """A fleet reads from S3 alone; said before anything is fetched or read.

    Raises:
        UsageError: output, weights, adapters or lists of this machine, or an address that everybody could read.
    """
    for key in _LOCAL_FILES:
        if (path := layers.get(key)) is not None:
            raise UsageError(f"--{key.replace('_', '-')} {path}: a fleet cannot read files of this machine")
    for adapter in layers.get("lora", ()):
        if not str(adapter).startswith("s3://"):
            raise UsageError(f"--lora {adapter}: a fleet needs an s3:// file")
    graphs = layers.get("graphs")
    if graphs is not None and not str(graphs).startswith("s3://"):
        raise UsageError(f"--graphs {graphs}: a fleet needs an s3:// store of graphs")
    out, model = str(layers.get("out", "(not given)")), str(layers.get("model", ""))
    if not out.startswith("s3://"):
        raise UsageError(f"--out {out}: a fleet needs an s3:// output")
    if model and not model.startswith("s3://") and model.partition(":")[0] not in _BUILT_IN:
        raise UsageError(f"--model {model}: a fleet needs an s3:// prefix or a built-in name")
    if str(layers.get("on_clip", "-")).startswith("http"):
        raise UsageError(
            "--on-clip: a webhook's address may be a secret, and everybody who may look at jobs would read it;"
            " store it with Secrets Manager, then --on-clip env:BATCH_GEN_HOOK --secret BATCH_GEN_HOOK=ARN"
        )


def refuse_this_machines_profile(prepared: Prepared) -> None:
    """Raise UsageError where nobody said how the fleet renders: this machine's own profile is no answer for it."""
    trn2 = ", ".join(name for name in profile_names() if name.startswith("trn2"))
    raise UsageError(
        f"--profile must be given: the machines ordered are trn2, and this one's profile, {prepared.settings.profile}, "
        f"would leave their cores idle; name one of {trn2}, or say it if that is meant"
    )


def refuse_local_images(prepared: Prepared) -> None:
    """Raise UsageError for the first row with an image of this machine."""
    for row in prepared.rows():
        for column in ("image", "last_image"):
            value = getattr(row.request, column)
            if value is not None and not value.startswith(("s3://", "bytes:")):
                raise UsageError(f"{row.source}, row {row.row}, {column} = {value}: a fleet needs s3:// images")


def job_name(prepared: Prepared) -> str:
    """A name from the output root: letters, digits and dashes."""
    plain = "".join(char if char.isascii() and char.isalnum() else "-" for char in prepared.settings.out)
    return f"batch-gen-{plain.removeprefix('s3---')}"[:120].rstrip("-")


def shown(order: Order) -> dict[str, Any]:
    """The whole order as JSON values."""
    files = {"job.yaml": order.config, "plan.json": order.plan}
    uploads = [each.key for each in order.uploads]
    return {"jobDefinition": order.definition, "submitJob": order.body, "files": files, "uploads": uploads}


def _worker_settings(layers: Mapping[str, Any], prepared: Prepared) -> dict[str, Any]:
    """The settings of every worker, as the job file that they read."""
    told = {
        key: value
        for key, value in layers.items()
        if key not in _NOT_FOR_WORKERS and not key.startswith("s3_") and value is not None
    }
    return {"scratch": SCRATCH, "emf": True, **told, "model": prepared.settings.model}


def _submit(store: Store, options: Mapping[str, Any], order: Order, prepared: Prepared) -> int:
    from batch_gen.submit.batch import Batch
    from batch_gen.submit.jobs import Submission, note

    batch = Batch(options.get("region"), options.get("batch_endpoint"))
    upload(store, order.uploads)
    arn, is_new = batch.ensure_definition(order.definition)
    job_id = batch.submit({**order.body, "jobDefinition": arn})
    nodes = order.fleet.num_nodes
    click.echo(f"job        {job_id} ({nodes} nodes), definition {'registered' if is_new else 'reused'}: {arn}")
    note(
        store,
        Submission(
            job_id=job_id,
            job_name=order.body["jobName"],
            queue=order.fleet.queue,
            definition=arn,
            nodes=nodes,
            region=batch.region,
            endpoint=options.get("batch_endpoint"),
            submitted=clock.utc_now(),
        ),
    )
    spent = (order.plan["estimate"] or {}).get("totals") or {}
    money = "" if spent.get("cost_usd") is None else f", about {spent['cost_usd']:,.0f} USD"
    click.echo(f"plan       {order.plan['clips']:,} clips in {order.plan['chunks']:,} chunks{money}")
    endpoint = prepared.settings.s3_endpoint
    click.echo(f"next       batch-gen status {store.url}{f' --s3-endpoint {endpoint}' if endpoint else ''}")
    return EXIT_OK


def _run_here(sources: Sequence[str], given: Mapping[str, Any], prepared: Prepared, local: int) -> int:
    settings = prepared.settings
    store = open_store(settings.out, store_options(settings))
    if settings.continue_:
        retire_stop(store)
    check_stop(store)
    options = {key: value for key, value in given.items() if key not in ("out", "shard", "continue")}
    command = worker_command(sources, {**options, "model": settings.model, "out": settings.out})
    definition = job_definition(Fleet("local", "none"))
    children = run_local(command, local, definition["retryStrategy"])
    for child in children:
        click.echo(f"child {child.index}: exit codes {', '.join(map(str, child.exit_codes))}")
    return exit_code_of(children)
