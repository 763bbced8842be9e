"""stop.json: one object that stops every worker of a run, and says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from pydantic import ValidationError

from batch_gen.clock import utc_now
from batch_gen.errors import RunStopped
from batch_gen.layout import STOP_KEY
from batch_gen.records import Strict
from batch_gen.storage.base import AlreadyExists

if TYPE_CHECKING:
    from batch_gen.storage.base import Store

STOP_FORMAT: Final = 1
Reason = Literal["error_budget", "cost", "time", "cancel"]


class StopFile(Strict):
    """Why a run stopped; `created` is UTC, for people."""

    format: int = STOP_FORMAT
    reason: Reason
    message: str
    worker: str = ""
    created: str = ""


def stop_run(store: Store, reason: Reason, message: str, worker: str = "") -> StopFile:
    """Stop the run; the first reason stands. Returns what stands."""
    mine = StopFile(reason=reason, message=message, worker=worker, created=utc_now())
    try:
        store.create(STOP_KEY, mine.to_bytes(), content_type="application/json")
    except AlreadyExists:
        return load_stop(store) or mine
    return mine


def load_stop(store: Store) -> StopFile | None:
    """The stop of a run, None while it may go on. A damaged file stops too: somebody meant something by it."""
    blob = store.get(STOP_KEY)
    if blob is None:
        return None
    try:
        return StopFile.model_validate_json(blob.body)
    except ValidationError:
        return StopFile(reason="cancel", message=f"{store.url}/{STOP_KEY} is there, but cannot be read")


def check_stop(store: Store) -> None:
    """Raise `RunStopped` (exit code 4) when the run was stopped."""
    stop = load_stop(store)
    if stop is not None:
        where = f"{store.url}/{STOP_KEY}"
        raise RunStopped(f"the run was stopped ({stop.reason}): {stop.message}; {where}; go on with run --continue")


def retire_stop(store: Store) -> StopFile | None:
    """Let the run go on (`run --continue`, `retry`); returns what was retired."""
    stop = load_stop(store)
    if stop is not None:
        store.delete(STOP_KEY)
    return stop
