"""`submit/jobs/`: which jobs were submitted for a run, so that `status` and `cancel` find them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from pydantic import Field, ValidationError

from batch_gen.errors import BatchGenError
from batch_gen.layout import SUBMIT_PREFIX
from batch_gen.ledger import read_start, start_key
from batch_gen.records import Strict
from batch_gen.submit.batch import Batch
from batch_gen.submit.view import JobView

if TYPE_CHECKING:
    from batch_gen.storage.base import Store

JOBS_PREFIX: Final = f"{SUBMIT_PREFIX}jobs/"
SUBMISSION_FORMAT: Final = 1
MAX_SHOWN: Final = 5


class Submission(Strict):
    """`submit/jobs/<job id>.json`.

    Attributes:
        job_id, job_name, queue, definition: as Batch knows them.
        nodes: children; 1 is a plain job.
        region, endpoint: where Batch was asked.
        submitted: UTC, for people.
    """

    format: int = SUBMISSION_FORMAT
    job_id: str
    job_name: str
    queue: str
    definition: str
    nodes: int = Field(1, ge=1)
    region: str | None = None
    endpoint: str | None = None
    submitted: str = ""

    @property
    def key(self) -> str:
        """Its place in the output root."""
        return f"{JOBS_PREFIX}{self.job_id}.json"


def note(store: Store, submission: Submission) -> None:
    """Write down that a job was submitted."""
    store.create(submission.key, submission.to_bytes(), content_type="application/json")


def submissions(store: Store) -> list[Submission]:
    """What was submitted for this run, the newest first; what cannot be read is left out."""
    blobs = (store.get(listed.key) for listed in store.list(JOBS_PREFIX))
    found = []
    for blob in blobs:
        try:
            found.append(Submission.model_validate_json(b"" if blob is None else blob.body))
        except ValidationError:
            continue
    return sorted(found, key=lambda each: each.submitted, reverse=True)


def looks(store: Store, wanted: Iterable[Submission]) -> Iterator[tuple[Submission, JobView | str]]:
    """Each submission with how it stands, or why that cannot be told; a run is looked at even where Batch is away."""
    for submission in wanted:
        try:
            view = Batch(submission.region, submission.endpoint).look(submission.job_id)
        except BatchGenError as error:
            yield submission, f"Batch cannot be asked: {error.message}"
            continue
        if view is None:
            yield submission, "no longer known to Batch, which forgets jobs some days after their end"
        else:
            yield submission, view.with_last_words(_last_words(store, view))


def lines(store: Store, now_s: float) -> Iterator[str]:
    """What Batch says of the run's jobs, for people; nothing for a run that was never submitted."""
    found = submissions(store)
    for submission, seen in looks(store, found[:MAX_SHOWN]):
        if isinstance(seen, str):
            yield f"job {submission.job_name} ({submission.job_id}): {seen}"
        else:
            yield from seen.lines(now_s)
    if len(found) > MAX_SHOWN:
        yield f"... and {len(found) - MAX_SHOWN} earlier submissions"


def as_json(store: Store) -> list[dict[str, Any]]:
    """The same for `--json`."""
    return [
        {"submission": submission.model_dump(), "job": seen.to_json() if isinstance(seen, JobView) else None}
        | ({"problem": seen} if isinstance(seen, str) else {})
        for submission, seen in looks(store, submissions(store))
    ]


def cancel_jobs(store: Store, reason: str, *, now: bool) -> Iterator[str]:
    """End what waits for a machine, or with `now` everything; tells what was done."""
    for submission in submissions(store):
        name = f"job {submission.job_name} ({submission.job_id})"
        try:
            batch = Batch(submission.region, submission.endpoint)
            if now:
                batch.terminate(submission.job_id, reason)
                yield f"{name}: ended; running children get SIGTERM and drain"
            elif count := batch.end_waiting(submission.job_id, reason):
                yield f"{name}: {count} without a machine ended; running ones drain by stop.json"
        except BatchGenError as error:
            yield f"{name}: not ended: {error.message}"


def _last_words(store: Store, view: JobView) -> dict[str, str]:
    """What failed children wrote down as the end of their last start."""
    found = {}
    for child in view.children:
        if child.state == "FAILED" and child.starts:
            start = read_start(store, start_key(child.job_id, child.starts))
            found[child.job_id] = "" if start is None else start.ended
    return found
