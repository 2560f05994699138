"""Failpoints: the table lists all, they cost nothing when off, and they end the process when on."""

from __future__ import annotations

import ast
import dis
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import megatron_flashckpt
from megatron_flashckpt import failpoints
from megatron_flashckpt.config import load_config
from megatron_flashckpt.errors import ConfigError

HOME = Path(megatron_flashckpt.__file__).parent
WALK = """
import sys
from megatron_flashckpt.failpoints import hit, set_process_name
set_process_name("agent")
for n in range(1, 6):
    print(n, flush=True)
    hit("persist.chunk")
"""


def reached() -> set[tuple[str, str]]:
    """Return `(point, module)` of every call of `hit` in the package."""
    calls = set()
    for path in HOME.rglob("*.py"):
        module = ".".join(path.relative_to(HOME).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "hit"
            ):
                assert isinstance(node.args[0], ast.Constant), f"{module}:{node.lineno}"
                calls.add((node.args[0].value, module))
    return calls


def walk(fault: str | None, **environment: str) -> subprocess.Popen[str]:
    """Start a process, by default as an agent, that hits a failpoint five times."""
    environment["PYTHONPATH"] = str(HOME.parent)
    if fault is not None:
        environment[failpoints.VARIABLE] = fault
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            WALK.replace('set_process_name("agent")', "") if "RANK" in environment else WALK,
        ],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def counted(fault: str | None, **environment: str) -> tuple[int, int]:
    """Return the exit status of the process, and how often it had hit the failpoint."""
    with walk(fault, **environment) as process:
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
    started = time.perf_counter()
    for _ in range(100_000):
        failpoints.hit("persist.chunk")
    print(f"a point costs {(time.perf_counter() - started) * 1e4:.0f} ns when no fault is set")
    assert counted(None) == (0, 5)


@pytest.mark.parametrize(("count", "steps"), [(1, 1), (3, 3), (5, 5)])
def test_a_process_ends_itself_at_the_configured_hit(count: int, steps: int) -> None:
    assert counted(f"agent:persist.chunk:{count}") == (-signal.SIGKILL, steps)


@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        ("agent:persist.chunk:6", None),
        ("agent:persist.created:1", None),
        ("rank0:persist.chunk:1", None),
        ("agent:persist.chunk:1", "0"),
        ("rank1:persist.chunk:1", "11"),
    ],
)
def test_a_fault_affects_no_other_failpoint_or_process(fault: str, rank: str | None) -> None:
    assert counted(fault, **({} if rank is None else {"RANK": rank})) == (0, 5)


def test_a_fault_selects_a_rank_by_its_number() -> None:
    assert counted("rank11:persist.chunk:2", RANK="11") == (-signal.SIGKILL, 2)


def test_a_fault_with_a_file_happens_only_once(tmp_path: Path) -> None:
    done = tmp_path / "done"
    fault = f"agent:persist.chunk:2:KILL:{done}"
    assert counted(fault) == (-signal.SIGKILL, 2)
    assert done.exists()
    assert counted(fault) == (0, 5)


def test_a_stopped_process_stays_at_its_failpoint_until_it_continues() -> None:
    with walk("agent:persist.chunk:3:STOP") as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, len(output.split())) == (0, 5)


@pytest.mark.parametrize(
    "fault",
    [
        "agent",
        "agent:persist.chunk",
        "agent:persist.chnk:1",
        "agent:persist.chunk:0",
        "agent:persist.chunk:1:HUP",
    ],
)
def test_an_impossible_fault_is_refused_at_once(fault: str) -> None:
    with walk(fault) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"ConfigError: {failpoints.VARIABLE}={fault}: must be WHO:POINT:COUNT" in errors


def test_the_fault_variable_is_not_a_setting() -> None:
    load_config(environ={failpoints.VARIABLE: "agent:persist.chunk:1"})
    with pytest.raises(ConfigError, match="FLASHCKPT_FAULTS"):
        load_config(environ={f"{failpoints.VARIABLE}S": "agent:persist.chunk:1"})
