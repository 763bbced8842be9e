"""What a user asks of a fleet on the command line, held against the rules of AWS before anything else is looked at."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from batch_gen.errors import UsageError
from batch_gen.storage.address import check_address, check_endpoint
from batch_gen.submit import limits

MAX_LOCAL: Final = 64
_FOR_A_FLEET: Final = (
    *("nodes", "queue", "image", "job_role", "execution_role", "tag", "secret", "region", "batch_endpoint"),
)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_STORES: Final = ("out", "model", "graphs")


def check_options(options: Mapping[str, Any], *, dry_run: bool) -> None:
    """Refuse options that contradict each other or that AWS would not take.

    Args:
        options: those of `submit` that are no settings of a run, by key; only what somebody set.
        dry_run: whether the order is only printed.

    Raises:
        UsageError: with every fault; the value of `--secret` is never repeated.
    """
    local = options.get("local")
    if local is not None:
        check_local(int(local), options, dry_run=dry_run)
        return
    if options.get("batch_endpoint") is not None:
        check_endpoint("--batch-endpoint", str(options["batch_endpoint"]))
    faults = [*_fleet_faults(options), *secret_faults(options.get("secret") or ())]
    if faults:
        raise UsageError("AWS would not take this; nothing was submitted:\n  " + "\n  ".join(faults))


def check_local(local: int, options: Mapping[str, Any], *, dry_run: bool) -> None:
    """Raise UsageError unless `--local K` is a number of processes, and all that is said goes with it."""
    if not 1 <= local <= MAX_LOCAL:
        raise UsageError(f"--local {local}: must be 1 to {MAX_LOCAL} processes of this machine")
    if dry_run:
        raise UsageError("--local renders here and --dry-run writes nothing: leave one of them out")
    unused = [f"--{key.replace('_', '-')}" for key in _FOR_A_FLEET if options.get(key) is not None]
    if unused:
        raise UsageError(f"{', '.join(unused)}: for a fleet, which --local does not order; leave out one or the other")


def check_buckets(layers: Mapping[str, Any], sources: Sequence[str]) -> None:
    """Raise UsageError for the first address whose bucket S3 cannot have."""
    places = [(f"--{key}", str(layers[key])) for key in _STORES if layers.get(key) is not None]
    places += [("--lora", str(text)) for text in layers.get("lora", ())]
    places += [("manifest", source) for source in sources]
    for what, text in places:
        check_address(what, text)
        if text.startswith("s3://"):
            for fault in limits.bucket_faults(text.removeprefix("s3://").partition("/")[0]):
                raise UsageError(f"{what} {text}: {fault}")


def tags_of(texts: Sequence[str]) -> dict[str, str]:
    """The tags of `--tag KEY=VALUE`.

    Raises:
        UsageError: one of another form, or a key that is given twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise UsageError(f"--tag {text}: expected KEY=VALUE")
        if key in found:
            raise UsageError(f"--tag {key}: given twice")
        found[key] = value
    return found


def secrets_of(texts: Sequence[str]) -> dict[str, str]:
    """The variables of `--secret NAME=ARN`, after `secret_faults` found nothing."""
    return {name: arn for name, _, arn in (text.partition("=") for text in texts)}


def secret_faults(texts: Sequence[str]) -> Iterator[str]:
    """What is wrong with `--secret`; what stands where the ARN belongs may be the secret itself, so it is not shown."""
    seen: set[str] = set()
    for number, text in enumerate(texts, 1):
        name, separator, arn = text.partition("=")
        place = f"--secret {name}" if separator and _VARIABLE.fullmatch(name) else f"--secret number {number}"
        if not separator or not _VARIABLE.fullmatch(name) or name.startswith("AWS_BATCH"):
            yield f"{place}: expected NAME=ARN, NAME a variable's name that does not begin with AWS_BATCH"
        elif not limits.is_secret_arn(arn):
            yield (
                f"{place}: expected the ARN of a Secrets Manager secret or an SSM parameter, never the secret itself:"
                " everybody who may look at jobs reads it (arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME)"
            )
        if name in seen:
            yield f"{place}: given twice"
        seen.add(name)


def _fleet_faults(options: Mapping[str, Any]) -> Iterator[str]:
    if options.get("queue") is not None:
        yield from limits.queue_faults(options["queue"])
    if options.get("image") is not None:
        yield from limits.image_faults(options["image"])
    for key in ("job_role", "execution_role"):
        if options.get(key) is not None:
            yield from limits.role_faults(f"--{key.replace('_', '-')}", options[key])
    yield from limits.tag_faults(tags_of(options.get("tag") or ()))
