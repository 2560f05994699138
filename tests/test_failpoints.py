"""Failpoints: the table lists all, they cost nothing when off, and they end the process when on."""

from __future__ import annotations

import ast
import dis
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_flashckpt import failpoints
from megatron_flashckpt.config import load_config
from megatron_flashckpt.errors import ConfigError
from tests.support.package_source import HOME, nodes

WALK = """
import os
from megatron_flashckpt.failpoints import hit, set_process_name
if "RANK" not in os.environ:
    set_process_name("agent")
for n in range(1, 6):
    print(n, flush=True)
    hit("persist.chunk")
"""


def reached() -> set[tuple[str, str]]:
    """Return `(point, module)` of every call of `hit` in the package."""
    calls = set()
    for module, node in nodes():
        match node:
            case ast.Call(func=ast.Name(id="hit"), args=[point, *_]):
                assert isinstance(point, ast.Constant), f"{module}:{node.lineno}"
                calls.add((point.value, module))
    return calls


def walk(fault: str | None, rank: str | None = None) -> subprocess.Popen[str]:
    """Start a process, an agent if it has no rank, that hits a failpoint five times."""
    environment = {"PYTHONPATH": str(HOME.parent)}
    if rank is not None:
        environment["RANK"] = rank
    if fault is not None:
        environment[failpoints.VARIABLE] = fault
    return subprocess.Popen(
        [sys.executable, "-c", WALK],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def counted(fault: str | None, rank: str | None = None) -> tuple[int, int]:
    """Return the exit status of the process, and how often it had hit the failpoint."""
    with walk(fault, rank) as process:
        output, errors = process.communicate(timeout=60)
    assert "Error" not in errors, errors
    return process.returncode, len(output.split())


def test_the_table_names_every_failpoint_and_its_module() -> None:
    assert reached() == {(point, module) for point, (module, _) in failpoints.POINTS.items()}


def test_a_failpoint_without_a_fault_does_nothing() -> None:
    assert failpoints.VARIABLE not in os.environ
    work = [step.opname for step in dis.get_instructions(failpoints.hit)]
    assert [name for name in work if name not in ("RESUME", "LOAD_CONST")] in (
        ["RETURN_VALUE"],
        ["RETURN_CONST"],
    )


@pytest.mark.parametrize(
    ("fault", "rank", "steps"),
    [
        ("agent:persist.chunk:1", None, 1),
        ("agent:persist.chunk:5", None, 5),
        ("rank11:persist.chunk:2", "11", 2),
        (None, None, None),
        ("agent:persist.chunk:6", None, None),
        ("agent:persist.created:1", None, None),
        ("rank0:persist.chunk:1", None, None),
        ("agent:persist.chunk:1", "0", None),
        ("rank1:persist.chunk:1", "11", None),
    ],
)
def test_a_process_ends_itself_at_the_configured_hit_and_no_other_does(
    fault: str | None, rank: str | None, steps: int | None
) -> None:
    assert counted(fault, rank) == ((0, 5) if steps is None else (-signal.SIGKILL, steps))


def test_a_fault_with_a_file_happens_only_once(tmp_path: Path) -> None:
    fault = f"agent:persist.chunk:2:KILL:{tmp_path / 'done'}"
    assert counted(fault) == (-signal.SIGKILL, 2)
    assert counted(fault) == (0, 5)


def test_a_stopped_process_stays_at_its_failpoint_until_it_continues() -> None:
    with walk("agent:persist.chunk:3:STOP") as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, len(output.split())) == (0, 5)


@pytest.mark.parametrize(
    "rest", ["", ":persist.chunk", ":persist.chnk:1", ":persist.chunk:0", ":persist.chunk:1:HUP"]
)
def test_an_impossible_fault_is_refused_at_once(rest: str) -> None:
    with walk(f"agent{rest}") as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"ConfigError: {failpoints.VARIABLE}=agent{rest}: must be WHO:POINT:COUNT" in errors


def test_the_fault_variable_is_not_a_setting() -> None:
    load_config(environ={failpoints.VARIABLE: "agent:persist.chunk:1"})
    with pytest.raises(ConfigError, match="FLASHCKPT_FAULTS"):
        load_config(environ={f"{failpoints.VARIABLE}S": "agent:persist.chunk:1"})
