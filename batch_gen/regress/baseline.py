"""Baselines: what somebody approved, by suite, case and platform class; several variants may hold side by side.

An approval is written once and never changed. One that was a mistake is retired by a second document, so that the
history stays whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from typing import Final

from batch_gen import clock
from batch_gen.errors import UsageError
from batch_gen.regress.documents import load_document
from batch_gen.regress.results import (
    Approval,
    CaseResult,
    Night,
    Retirement,
    baseline_prefix,
)
from batch_gen.storage.base import AlreadyExists, Store

log = logging.getLogger(__name__)
RETIRED: Final = ".retired.json"
_OURS: Final = re.compile(r"([^/]+/)?[0-9a-f]+-[0-9a-f]+(\.retired)?\.json")


def find_baselines(store: Store, suite: str, case: str, platform_key: str) -> tuple[Approval, ...]:
    """The approved variants of a case on a platform that were not retired, oldest first."""
    every = [approval for approval, retired in history(store, suite, case, platform_key) if retired is None]
    return tuple(every)


def history(
    store: Store, suite: str, case: str, platform_key: str | None = None
) -> list[tuple[Approval, Retirement | None]]:
    """Every approval of a case with who retired it (None when it holds), oldest first.

    Files that are none of ours are left alone, and the log names them.

    Raises:
        CheckFailed: a document is damaged, or belongs to another case; names it.
    """
    prefix = baseline_prefix(suite, case, platform_key)
    keys = [listed.key for listed in store.list(prefix)]
    found: list[tuple[Approval, Retirement | None]] = []
    for key in keys:
        if not _OURS.fullmatch(key.removeprefix(prefix)):
            log.warning("foreign file among the baselines", extra={"fields": {"file": f"{store.url}/{key}"}})
            continue
        approval = None if key.endswith(RETIRED) else load_document(store, Approval, key)
        if approval is None:
            continue
        note_key = key.removesuffix(".json") + RETIRED
        found.append((approval, load_document(store, Retirement, note_key) if note_key in keys else None))
    return sorted(found, key=lambda pair: pair[0].when)


def variant_of(approval: Approval) -> str:
    """Name of a variant: the same pixels of the same request, checkpoint, settings and numerics are the same variant.

    All that decides whether a night may be compared with it counts: pixels alone would bar a case whose request or
    checkpoint changed without them from ever being approved again. Older approvals bear names of pixels and numerics
    alone; they are read by what they hold, so this is also what an older one would be called today.
    """
    made_by = approval.fingerprint
    identity = [approval.request_digest, made_by.checkpoint, made_by.settings, made_by.numerics_key]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return f"{approval.frames_hash[:16]}-{digest[:12]}"


def approve_case(store: Store, night: Night, case: CaseResult, who: str, why: str) -> Approval | None:
    """Make a night's case a baseline; None when that variant is approved already.

    Raises:
        UsageError: the case was not rendered that night, or its variant was retired.
    """
    if case.frames_hash is None:
        raise UsageError(f"case {case.case} of night {night.night} has no clip to approve: {_words(case)}")
    approval = Approval(
        variant="",
        suite=night.suite,
        case=case.case,
        platform=night.platform,
        request=case.request,
        request_digest=case.request_digest,
        fingerprint=night.fingerprint,
        frames_hash=case.frames_hash,
        num_frames=case.num_frames,
        artifacts=case.artifacts,
        night=night.night,
        who=who,
        why=why,
        when=clock.utc_now(),
    )
    approval = approval.model_copy(update={"variant": variant_of(approval)})
    for standing, retired in history(store, night.suite, case.case, night.platform.key):
        if variant_of(standing) != approval.variant:
            continue
        if retired is not None:
            raise UsageError(f"variant {standing.variant} of {case.case} was retired; see batch-gen regress log")
        return None
    if store.head(approval.key.removesuffix(".json") + RETIRED) is not None:  # outlives an approval that was removed
        raise UsageError(f"variant {approval.variant} of {case.case} was retired; see batch-gen regress log")
    try:
        store.create(approval.key, approval.to_bytes(), content_type="application/json")
    except AlreadyExists:
        return None
    return approval


def retire(store: Store, approval: Approval, who: str, why: str) -> None:
    """Take an approval back; what it was stays readable.

    Raises:
        UsageError: it was retired before.
    """
    note = Retirement(who=who, why=why, when=clock.utc_now())
    try:
        store.create(approval.key.removesuffix(".json") + RETIRED, note.to_bytes(), content_type="application/json")
    except AlreadyExists:
        raise UsageError(f"variant {approval.variant} of {approval.case} was retired before") from None


def _words(case: CaseResult) -> str:
    return "it was not rendered" if case.error is None else f"{case.error.kind}: {case.error.message}"
