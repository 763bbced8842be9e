"""A proxy between an S3 client and its server that makes trouble on purpose.

Every request draws its fate from a seeded generator:

    lost     the server does it, the answer never arrives
    error    the server does it, the answer is a 500
    busy     503 SlowDown; the server never hears of it
    conflict 409 for a conditional write; the server never hears of it
    slow     some time passes first
    cut      the connection ends in the middle of the body, of the request or of the answer

`requests` counts what came by its kind: PUT, GET, HEAD, DELETE, LIST, POST.

A write to a key that ends with one of `refused` never arrives: the answer is a 400, which no client tries again.
"""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import urlsplit

FATES = ("lost", "error", "busy", "conflict", "slow", "cut")
_ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>planted</Message></Error>'


class FaultProxy:
    """Listens on a local port and forwards to `endpoint`; a context manager.

    Args:
        rates: Fate -> share of requests; the rest passes untouched.
        seed: Of the generator.
        refused: Ends of keys that cannot be written.
    """

    def __init__(self, endpoint: str, rates: dict[str, float], seed: int = 0, refused: tuple[str, ...] = ()) -> None:
        self.target = urlsplit(endpoint).netloc
        self.rates = rates
        self.refused = refused
        self.counts: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fate(self, *, conditional: bool) -> str:
        """What happens to the next request."""
        with self._lock:
            draw = self._random.random()
            for fate, rate in self.rates.items():
                draw -= rate
                if draw < 0 and (fate != "conflict" or conditional):
                    self.counts[fate] += 1
                    return fate
            self.counts["pass"] += 1
            return "pass"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Connections that end early are what this proxy is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: FaultProxy

    def _handle(self) -> None:
        self.owner.requests["LIST" if "list-type=" in self.path else self.command] += 1
        conditional = "if-match" in self.headers or "if-none-match" in self.headers
        fate = self.owner.fate(conditional=conditional)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.command == "PUT" and urlsplit(self.path).path.endswith(self.owner.refused):
            self.owner.counts["refused"] += 1
            self._answer(400, {}, _ERROR.format(code="InvalidRequest").encode())
            return
        if fate in {"busy", "conflict"}:
            code, status = ("SlowDown", 503) if fate == "busy" else ("ConditionalRequestConflict", 409)
            self._answer(status, {}, _ERROR.format(code=code).encode())
            return
        if fate == "slow":
            time.sleep(0.2)
        if fate == "cut" and body:
            self._send_half(body)
            self.close_connection = True
            return
        status, headers, answer = self._forward(body)
        if fate == "lost":
            self.close_connection = True
        elif fate == "error":
            self._answer(500, {}, _ERROR.format(code="InternalError").encode())
        else:
            self._answer(status, headers, answer, cut=fate == "cut")

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _handle

    def _forward(self, body: bytes):
        connection = http.client.HTTPConnection(self.owner.target, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        try:
            connection.request(self.command, self.path, body=body, headers=headers)
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def _send_half(self, body: bytes) -> None:
        """The server gets a request whose body ends too early."""
        connection = http.client.HTTPConnection(self.owner.target, timeout=30)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() != "expect":
                connection.putheader(name, value)
        connection.endheaders(body[: len(body) // 2])
        connection.close()

    def _answer(self, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in {"transfer-encoding", "connection", "content-length"}:
                self.send_header(name, value)
        length = headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = self.close_connection or cut

    def log_message(self, *_):
        """Quiet."""
