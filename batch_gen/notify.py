"""`--on-clip`: a line of JSON for every finished clip, on stdout or to a webhook, so that the next tool can start."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
import urllib.request
from http.client import HTTPException
from typing import Any, TextIO
from urllib.parse import urlsplit

from batch_gen.errors import UsageError

log = logging.getLogger(__name__)
TIMEOUT_S = 10.0
MAX_WAITING = 1000


def check_target(target: str) -> None:
    """Raises UsageError for what is neither stdout nor a URL."""
    if target != "-" and not target.startswith(("http://", "https://")):
        raise UsageError(f"--on-clip {target}: expected - for stdout, or an http(s) URL")


class Notifier:
    """Tells about clips; never slows or stops a run: what cannot be delivered is logged.

    Args:
        target: `-` for stdout, or an http(s) URL that gets a POST.
        stream: where `-` writes.
    """

    def __init__(self, target: str, stream: TextIO | None = None) -> None:
        check_target(target)
        self._target = target
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
