"""News that this machine will be taken away: the EC2 Spot notice by IMDSv2 and a planned end (`--drain-at`).

On ECS and EC2 a container gets no signal at the Spot notice unless the host's agent was told to pass it on, so the
worker asks the instance metadata service itself, every five seconds, as AWS advises.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from http.client import HTTPException

from batch_gen.drain import Drain
from batch_gen.errors import UsageError

log = logging.getLogger(__name__)
POLL_S = 5.0
TIMEOUT_S = 2.0
TOKEN_TTL_S = 21600
SAFETY_S = 15.0
DEFAULT_NOTICE_S = 120.0


class Metadata:
    """The instance metadata service, version 2: every question carries a token.

    Args:
        endpoint: base URL of the service.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint.rstrip("/")
        self._token = ""

    def read(self, name: str) -> str | None:
        """One entry, such as `instance-id`; None when there is none.

        Raises:
            OSError: the service does not answer.
        """
        if not self._token:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
            self._token = self._request("PUT", "/latest/api/token", headers) or ""
        return self._request("GET", f"/latest/meta-data/{name}", {"X-aws-ec2-metadata-token": self._token})

    def _request(self, method: str, path: str, headers: dict[str, str]) -> str | None:
        request = urllib.request.Request(self.endpoint + path, method=method, headers=headers)  # noqa: S310 - http only
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
                return str(answer.read(65536).decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 401:
                self._token = ""
            return None


class SpotWatch:
    """Asks the metadata service for a Spot interruption and turns it into a drain.

    Args:
        endpoint: base URL of the service.
        drain: the flag.
        poll_s: pause between two questions.
        wall: Unix time, to read the notice's moment.
    """

    def __init__(
        self, endpoint: str, drain: Drain, poll_s: float = POLL_S, wall: Callable[[], float] = time.time
    ) -> None:
        self._metadata = Metadata(endpoint)
        self._drain = drain
        self._poll_s = poll_s
        self._wall = wall
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="spot-watch", daemon=True)

    def start(self) -> None:
        """Ask in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more."""
        self._stop.set()

    def ask(self) -> float | None:
        """Seconds until the interruption, None while there is none.

        Raises:
            OSError: the service does not answer.
        """
        body = self._metadata.read("spot/instance-action")
        return None if body is None else self._seconds_left(body)

    def _seconds_left(self, body: str) -> float:
        try:
            moment = datetime.fromisoformat(json.loads(body)["time"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return DEFAULT_NOTICE_S
        return max(0.0, moment.timestamp() - self._wall())

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                left_s = self.ask()
            except (OSError, HTTPException) as error:  # whatever it answers, the watch goes on
                log.info(
                    "no metadata service", extra={"fields": {"endpoint": self._metadata.endpoint, "error": str(error)}}
                )
                left_s = None
            if left_s is not None:
                self._drain.request("spot interruption", max(0.0, left_s - SAFETY_S))
                return
            self._stop.wait(self._poll_s)


def drain_at(text: str, drain: Drain, wall: Callable[[], float] = time.time) -> threading.Timer:
    """Ask for a drain at a moment.

    Args:
        text: ISO 8601 with a zone, e.g. 2026-12-01T11:00:00Z.
        drain: the flag.
        wall: Unix time.

    Raises:
        UsageError: no such moment, or without a zone.
    """
    moment = parse_moment(text)
    shown = moment.astimezone(UTC).isoformat(timespec="seconds")
    left_s = min(max(0.0, moment.timestamp() - wall()), threading.TIMEOUT_MAX)  # beyond it a thread cannot wait
    timer = threading.Timer(left_s, drain.request, args=(f"--drain-at {shown}",))
    timer.daemon = True
    timer.start()
    return timer


def parse_moment(text: str) -> datetime:
    """A moment in ISO 8601 with a zone; raises UsageError for anything else."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"--drain-at {text}: expected ISO 8601 with a zone, e.g. 2026-12-01T11:00:00Z") from error
    if moment.tzinfo is None:
        raise UsageError(f"--drain-at {text}: has no zone; write {text}Z for UTC")
    try:
        return moment.astimezone(UTC)
    except OverflowError as error:
        raise UsageError(f"--drain-at {text}: lies outside the years 1 to 9999 in UTC") from error
