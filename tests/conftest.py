"""Settings for all tests: their tiers, and no test reads the developer's own configuration."""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.object_server import BUCKET, CREDENTIALS, Proxy, s3_server
from tests.tiers import is_long, is_second

# Property tests check results, not speed, because they run on shared machines.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

# Keep the bytecode of package and tests, whatever the machine's settings: otherwise every rank
# process compiles about 150 modules again, which takes 0.25 s of CPU.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

#: Packages that the environments of `scripts/test_pythons` do not have.
_NOT_INSTALLED = re.compile(r"No module named '(torch|megatron|setuptools)[.']")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run both tiers: see tests/tiers.py")
    parser.addoption("--without-torch", action="store_true", help="leave out what imports torch")


def pytest_configure(config: pytest.Config) -> None:
    """Run both tiers of what a path or -k names. Workers get this option from the main process."""
    is_named = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword
    config.option.all = config.option.all or bool(is_named)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the second tier, and begin with the files whose tests start long jobs."""
    files = {item: item.nodeid.partition("::")[0].removeprefix("tests/") for item in items}
    second = [
        item for item in items if is_second(files[item]) or item.get_closest_marker("second_tier")
    ]
    if not config.option.all:
        config.hook.pytest_deselected(items=second)
        items[:] = [item for item in items if item not in set(second)]
    items.sort(key=lambda item: not is_long(files[item]))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if collector.config.option.without_torch and _NOT_INSTALLED.search(report.longreprtext):
        report.outcome, report.result = "passed", []
    return report


def pytest_xdist_auto_num_workers() -> int:
    """Return the workers of `-n auto`: two per core, because tests wait half of the time."""
    return 2 * len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("FLASHCKPT_"):
            monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def s3_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a real S3 server, which one worker starts once."""
    with s3_server(tmp_path_factory.mktemp("s3")) as port:
        yield port


@pytest.fixture
def s3_proxy(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy of the server; the environment names it, and has the credentials."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    proxy = Proxy(s3_port)
    endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "AWS_ALLOW_HTTP": "true"}
    for name, value in {**CREDENTIALS, **endpoint}.items():
        monkeypatch.setenv(name, value)
    yield proxy
    proxy.close()


@pytest.fixture
def s3_url(s3_proxy: Proxy) -> str:
    """An empty prefix of the bucket, for one test."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/save"
