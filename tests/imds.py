"""A stub of the EC2 instance metadata service (v2) on the loopback interface."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class StubImds:
    """Serves tokens, and a Spot notice once `interrupt` was called."""

    def __init__(self):
        stub = self
        self.notice = None
        self.tokens = 0

        class Handler(BaseHTTPRequestHandler):
            """Two paths."""

            def do_PUT(self):
                stub.tokens += 1
                self.answer(200, "token")

            def do_GET(self):
                if self.headers.get("X-aws-ec2-metadata-token") != "token":
                    self.answer(401, "")
                elif stub.notice is None:
                    self.answer(404, "")
                else:
                    self.answer(200, json.dumps(stub.notice))

            def answer(self, code, text):
                body = text.encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                """Silence."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def interrupt(self, moment="2026-01-01T00:02:00Z"):
        """From now on the notice is there."""
        self.notice = {"action": "terminate", "time": moment}

    def close(self):
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
