"""A line of JSON per finished clip."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from batch_gen.errors import UsageError
from batch_gen.notify import Notifier, check_target, target_of


def test_lines_on_a_stream():
    """Each clip is one line of JSON, in order, unicode kept."""
    stream = io.StringIO()
    notifier = Notifier("-", stream)
    notifier.clip({"clip_id": "a", "prompt": "\u00e9\n"})
    notifier.clip({"clip_id": "b"})
    notifier.close()
    assert [json.loads(line)["clip_id"] for line in stream.getvalue().splitlines()] == ["a", "b"]


def test_webhook():
    """A URL gets one POST per clip."""
    bodies = []

    class Handler(BaseHTTPRequestHandler):
        """Keeps what it gets."""

        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            """Silence."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    notifier = Notifier(f"http://127.0.0.1:{server.server_port}/hook")
    notifier.clip({"clip_id": "a", "status": "committed"})
    notifier.close()
    server.shutdown()
    server.server_close()
    assert bodies == [{"clip_id": "a", "status": "committed"}]


def test_a_webhook_that_is_away_stops_nothing():
    """What cannot be delivered is dropped, and close returns."""
    notifier = Notifier("http://127.0.0.1:9/hook")
    notifier.clip({"clip_id": "a"})
    notifier.close()
    assert not notifier._thread.is_alive()


def test_a_reader_that_went_away_stops_nothing(monkeypatch):
    """A closed pipe on stdout neither ends the delivery nor keeps close() waiting on a full queue."""
    monkeypatch.setattr("batch_gen.notify.MAX_WAITING", 2)

    class Gone(io.StringIO):
        """A pipe whose reader left."""

        def write(self, _text):
            raise BrokenPipeError

    notifier = Notifier("-", Gone())
    for number in range(10):
        notifier.clip({"clip_id": str(number)})
    notifier.close()
    assert not notifier._thread.is_alive()


def test_the_log_keeps_the_webhooks_secret(caplog):
    """Webhook addresses carry tokens; what is logged names the host alone."""
    notifier = Notifier("http://127.0.0.1:9/hook/s3cret")
    notifier.clip({"clip_id": "a"})
    notifier.close()
    assert caplog.records[-1].fields["to"] == "127.0.0.1"
    assert "s3cret" not in str(caplog.records[-1].fields)


@pytest.mark.parametrize("target", ["ftp://x", "out.json", ""])
def test_wrong_targets(target):
    """What is neither stdout nor a URL is refused before the run."""
    with pytest.raises(UsageError, match="--on-clip"):
        Notifier(target)


def test_an_address_may_stand_in_a_variable(monkeypatch):
    """`env:NAME` keeps a webhook's address out of command lines and job definitions; a variable without URL is exit 2."""
    monkeypatch.setenv("HOOK", "https://example.org/secret")
    assert target_of("env:HOOK") == "https://example.org/secret"
    assert target_of("-") == "-"
    monkeypatch.delenv("HOOK")
    with pytest.raises(UsageError, match="holds no http") as error:
        target_of("env:HOOK")
    assert error.value.exit_code == 2
    check_target("env:HOOK")
    with pytest.raises(UsageError, match="env:NAME"):
        check_target("env:not a name")
