"""`--on-clip`: a line of JSON for every finished clip, on stdout or to a webhook, so that the next tool can start."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import sys
import threading
import urllib.request
from http.client import HTTPException
from typing import Any, TextIO
from urllib.parse import urlsplit

from batch_gen.environment import secret
from batch_gen.errors import UsageError

log = logging.getLogger(__name__)
_VARIABLE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")
TIMEOUT_S = 10.0
MAX_WAITING = 1000


def check_target(target: str) -> None:
    """Raises UsageError for what is neither stdout, a URL nor the name of a variable that holds one."""
    if target != "-" and not target.startswith(("http://", "https://")) and not _VARIABLE.fullmatch(target):
        raise UsageError(
            f"--on-clip {target}: expected - for stdout, an http(s) URL, or env:NAME for one in a variable"
        )


def target_of(target: str) -> str:
    """Where lines go: `env:NAME` is read from the environment, so that a webhook's address stands in no command line.

    Raises:
        UsageError: the variable is not set, or holds no URL.
    """
    check_target(target)
    if not target.startswith("env:"):
        return target
    url = secret(target.removeprefix("env:")) or ""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--on-clip {target}: that variable holds no http(s) URL here")
    return url


class Notifier:
    """Tells about clips; never slows or stops a run: what cannot be delivered is logged.

    Args:
        target: `-` for stdout, an http(s) URL that gets a POST, or `env:NAME`.
        stream: where `-` writes.
    """

    def __init__(self, target: str, stream: TextIO | None = None) -> None:
        self._target = target_of(target)
        self._stream = stream or sys.stdout
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._deliver, name="on-clip", daemon=True)
        self._thread.start()

    def clip(self, body: dict[str, Any]) -> None:
        """One clip is committed or set aside."""
        try:
            self._waiting.put_nowait(body)
        except queue.Full:
            log.warning("on-clip: too many undelivered clips", extra={"fields": {"clip_id": body.get("clip_id")}})

    def close(self) -> None:
        """Deliver what waits, within some seconds."""
        with contextlib.suppress(queue.Full):  # the receiver is too slow: what waits is lost
            self._waiting.put(None, timeout=TIMEOUT_S)
        self._thread.join(TIMEOUT_S)

    def _deliver(self) -> None:
        while (body := self._waiting.get()) is not None:
            line = json.dumps(body, ensure_ascii=False, default=str)
            try:
                if self._target == "-":
                    print(line, file=self._stream, flush=True)
                else:
                    self._post(line)
            except (OSError, HTTPException, ValueError) as error:
                fields = {"to": urlsplit(self._target).hostname or "-", "error": str(error)}  # the path may be a secret
                log.warning("on-clip: not delivered", extra={"fields": fields})

    def _post(self, line: str) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._target, line.encode(), headers, method="POST")  # noqa: S310 - checked above
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):  # noqa: S310
            pass
