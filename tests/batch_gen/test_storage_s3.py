"""What the S3 store makes of answers that a real server gives rarely: a server with a script."""

from __future__ import annotations

import base64
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from batch_gen.errors import EnvironmentFault, StoreError
from batch_gen.storage.base import AlreadyExists, ChecksumMismatch, Conflict, StoreOptions
from batch_gen.storage.s3 import S3Store


class Script:
    """A server that gives these answers in turn: (status, error code), and remembers the requests."""

    def __init__(self, *answers):
        self.answers, self.requests = list(answers), []
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_PUT(self):
                script.requests.append((self.command, dict(self.headers.items())))
                self.rfile.read(int(self.headers.get("content-length", 0)))
                status, code, *headers = script.answers.pop(0) if script.answers else (500, "ScriptEnded")
                body = (
                    b"" if status == 200 or self.command == "HEAD" else f"<Error><Code>{code}</Code></Error>".encode()
                )
                self.send_response_only(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("ETag", '"etag"')
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_HEAD = do_DELETE = do_PUT

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def store(self, sleeps=None, **options):
        endpoint = f"http://127.0.0.1:{self.server.server_port}"
        options = StoreOptions(endpoint_url=endpoint, region="us-east-1", max_attempts=2, **options)
        return S3Store("bucket", "run", options, sleep=(sleeps if sleeps is not None else []).append)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    scripts = []

    def make(*answers):
        scripts.append(Script(*answers))
        return scripts[-1]

    yield make
    for each in scripts:
        each.server.shutdown()
        each.server.server_close()


def test_create_sends_condition_and_checksum(script):
    """A create carries If-None-Match and the SHA-256 of its body as a header, in one request without a trailer."""
    server = script((200, ""))
    server.store().create("run.json", b"body", metadata={"a": "b"})
    ((command, headers),) = server.requests
    headers = {name.lower(): value for name, value in headers.items()}
    assert (command, headers["if-none-match"]) == ("PUT", "*")
    assert headers["x-amz-checksum-sha256"] == base64.b64encode(hashlib.sha256(b"body").digest()).decode()
    assert headers["x-amz-meta-a"] == "b"
    assert "x-amz-trailer" not in headers


def test_plain_412_costs_one_request(script):
    """A refusal of a first try is final: nobody looks what stands there."""
    server = script((412, "PreconditionFailed"))
    with pytest.raises(AlreadyExists):
        server.store().create("run.json", b"body")
    assert len(server.requests) == 1


@pytest.mark.parametrize("answer", [(412, "PreconditionFailed"), (404, "NoSuchKey")])
def test_replace_of_a_missing_key_is_a_conflict(script, answer):
    """AWS says 404, others say 412: both mean that the version is gone."""
    with pytest.raises(Conflict):
        script(answer).store().replace("lease/0-00000.json", b"body", '"old"')


def test_409_is_sent_again(script):
    """A conflict in time is no verdict: the same request goes again after growing pauses."""
    server, sleeps = script(*[(409, "ConditionalRequestConflict")] * 3, (200, "")), []
    server.store(sleeps).create("lease/0-00000.json", b"body")
    assert len(server.requests) == 4
    assert len(sleeps) == 3
    assert sleeps[2] > sleeps[0]


def test_409_forever_is_a_store_error(script):
    """A store that never decides is an error after eight tries, not a lost claim."""
    server = script(*[(409, "ConditionalRequestConflict")] * 20)
    with pytest.raises(StoreError, match="409"):
        server.store().create("lease/0-00000.json", b"body")
    assert len(server.requests) == 8


def sha_header(body: bytes):
    return ("x-amz-checksum-sha256", base64.b64encode(hashlib.sha256(body).digest()).decode())


def test_412_after_an_own_retry_is_looked_at(script):
    """After a 500 the first write may have arrived: equal content is our success, other content somebody else's."""
    head = (200, "", sha_header(b"body"))
    server = script((500, "InternalError"), (412, "PreconditionFailed"), head, head)
    assert server.store().create("lease/0-00000.json", b"body") == '"etag"'
    other = (200, "", sha_header(b"another"))
    server = script((500, "InternalError"), (412, "PreconditionFailed"), other, other)
    with pytest.raises(AlreadyExists):
        server.store().create("lease/0-00000.json", b"body")


def test_forbidden_names_the_permissions(script):
    """403 for a missing key means that listing is not allowed; it is no transient failure and exits 2."""
    with pytest.raises(EnvironmentFault, match="s3:ListBucket") as caught:
        script((403, "AccessDenied")).store().head("clips/ab/x.json")
    assert caught.value.exit_code == 2
    assert "s3://bucket/run/clips/ab/x.json" in caught.value.message


@pytest.mark.parametrize("code", ["NoSuchBucket", "InvalidAccessKeyId", "RequestTimeTooSkewed"])
def test_what_waiting_cannot_cure_is_no_store_error(script, code):
    """A missing bucket, wrong keys and a wrong clock exit 2 at once instead of being tried again."""
    status = 404 if code == "NoSuchBucket" else 403
    with pytest.raises(EnvironmentFault, match=code):
        script((status, code)).store().create("run.json", b"body")


def test_refused_checksum_is_named(script):
    """A body that the server found damaged on the way is an error of its own."""
    with pytest.raises(ChecksumMismatch):
        script((400, "BadDigest")).store().create("run.json", b"body")


def test_store_that_is_down_is_a_store_error(script):
    """A server that is gone gives a store error with the address, after the retries."""
    server = script()
    server.server.shutdown()
    server.server.server_close()
    with pytest.raises(StoreError, match=r"s3://bucket/run/run\.json"):
        server.store(connect_timeout_s=0.2).create("run.json", b"body")


def test_server_without_conditions_is_asked_first(script):
    """Where conditions do not work the store looks before it writes, and sends none."""
    server = script((404, "NotFound"), (200, ""))
    server.store(conditional=False).create("run.json", b"body")
    assert [command for command, _ in server.requests] == ["HEAD", "PUT"]
    assert "If-None-Match" not in server.requests[1][1]
    with pytest.raises(AlreadyExists):
        script((200, "")).store(conditional=False).create("run.json", b"body")
    with pytest.raises(Conflict):
        script((200, "")).store(conditional=False).replace("lease/0-00000.json", b"body", '"another"')


def test_upload_is_read_back_where_checksums_do_not_count(script, tmp_path):
    """For a server that does not check SHA-256 a file is read back; a wrong one is removed and refused."""
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"frames")
    server = script((200, ""), (200, ""), (200, ""), (204, ""))
    with pytest.raises(ChecksumMismatch, match="what was sent"):
        server.store(read_back=True).create("clips/ab/x.mp4", path)
    assert server.requests[-1][0] == "DELETE"


def test_no_credentials_are_explained(script, monkeypatch, tmp_path):
    """Without credentials the message says where they may come from."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(EnvironmentFault, match="AWS_PROFILE"):
        script().store().get("run.json")
