"""Further object stores on loopback, for the contract suite: moto (S3) and Azurite (Azure).

`scripts/install` installs both; Azurite, which is Microsoft's and needs node, only where npm is.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import hashlib
import hmac
import importlib.util
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.object_server import BUCKET, CREDENTIALS, free_ports, skip_without_obstore

#: Account and key that every Azurite has.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
AZURITE = Path(sys.prefix) / "azurite/node_modules/azurite/dist/src/blob/main.js"
_START_S = 60.0
#: One request at a time: moto's own server has threads, but closes the former bytes of an object
#: while another request reads them, and then answers 500.
_MOTO = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
run_simple("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app))
"""


@contextlib.contextmanager
def moto_server(directory: Path) -> Iterator[dict[str, str]]:
    """Run moto with an empty bucket `BUCKET`; yield the environment that reaches it."""
    skip_without_obstore()
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed: run scripts/install")
    (port,) = free_ports(1)
    command = [sys.executable, "-c", _MOTO, str(port)]
    url = f"http://127.0.0.1:{port}"
    # moto checks no signature.
    make = urllib.request.Request(f"{url}/{BUCKET}", method="PUT")
    with _running(command, directory, lambda: urllib.request.urlopen(make).close()):
        yield {**CREDENTIALS, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}


@contextlib.contextmanager
def azure_server(directory: Path) -> Iterator[dict[str, str]]:
    """Run Azurite with an empty container `BUCKET`; yield the environment that reaches it."""
    skip_without_obstore()
    node = shutil.which("node")
    if node is None or not AZURITE.exists():
        pytest.skip("Azurite is not installed: install npm, and run `python tools/environment.py`")
    (port,) = free_ports(1)
    command = [
        *(node, str(AZURITE), "--silent", "--disableTelemetry", "--skipApiVersionCheck"),
        *("--location", str(directory), "--blobPort", str(port)),
    ]
    url = f"http://127.0.0.1:{port}"
    with _running(command, directory, lambda: _make_container(url)):
        yield {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": url}


@contextlib.contextmanager
def _running(command: list[str], directory: Path, make: Callable[[], None]) -> Iterator[None]:
    """Run a server until the block ends; `make` succeeds once the server answers."""
    log = directory / "log"
    with open(log, "wb") as out:
        process = subprocess.Popen(command, cwd=directory, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + _START_S
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(OSError):
                make()
                break
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def _make_container(url: str) -> None:
    """Make the container with a signed request, because obstore knows objects only."""
    headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
    named = "".join(f"{name}:{value}\n" for name, value in headers.items())
    text = "PUT" + 12 * "\n" + named + f"/{ACCOUNT}/{ACCOUNT}/{BUCKET}\nrestype:container"
    digest = hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(
        f"{url}/{ACCOUNT}/{BUCKET}?restype=container", headers=headers, method="PUT"
    )
    urllib.request.urlopen(request).close()
