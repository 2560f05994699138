"""The launcher: scripts, modules, and its messages in an environment that cannot train."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_flashckpt import exit_status, launch

REPOSITORY = Path(__file__).parents[1]
#: Prints what a program can see of the way in which it was started.
PROGRAM = """
import json, sys
print(json.dumps({
    "name": __name__,
    "file": __file__,
    "argv": sys.argv,
    "package": __package__,
    "first on path": sys.path[0],
    "is main": sys.modules["__main__"].__dict__ is globals(),
}))
"""
#: Runs the launcher in a process that cannot import the module named first.
LAUNCH = """
import sys
sys.modules[sys.argv[1]] = None
from megatron_flashckpt.launch import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("torch", "install megatron_flashckpt into the environment that trains"),
        ("megatron", "run the script of a Megatron-LM checkout, or put a checkout on PYTHONPATH"),
    ],
)
def test_a_missing_module_is_one_line_with_its_remedy(
    tmp_path: Path, module: str, remedy: str
) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("raise AssertionError('the script must not run')")
    ran = subprocess.run(
        [sys.executable, "-c", LAUNCH, module, str(script)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert last.startswith(f"flashckpt-launch: {module} is not installed for {sys.executable}; ")
    assert remedy in last
    assert "Traceback" not in ran.stderr


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the working directory, which holds a package of programs; the launcher is inert."""
    package = tmp_path / "small_project"
    package.mkdir()
    for name in ("__init__", "__main__", "train"):
        (package / f"{name}.py").write_text("" if name == "__init__" else PROGRAM)
    (package / "needs_more.py").write_text("import a_module_that_nobody_has")
    (package / "ends.py").write_text("raise SystemExit(7)")
    (tmp_path / "no_main").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "install", lambda: None)
    monkeypatch.setattr(exit_status, "_chosen", None)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.syspath_prepend(tmp_path / "nothing")  # restores the path at the end
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "small_project"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("small_project.train", "train.py"),
        ("small_project", "__main__.py"),
        ("small_project.__main__", "__main__.py"),
    ],
)
def test_a_module_runs_as_python_runs_it(
    modules: Path, capsys: pytest.CaptureFixture[str], name: str, file: str
) -> None:
    arguments = ["--lr", "1e-3", "-m", "x"]
    launch.main(["-m", name, *arguments])
    command = [sys.executable, "-m", name, *arguments]
    by_python = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    printed = capsys.readouterr().out
    assert json.loads(printed) == json.loads(by_python)
    path = str(modules / "small_project" / file)
    assert json.loads(printed) == {
        "name": "__main__",
        "file": path,
        "argv": [path, *arguments],
        "package": "small_project",
        "first on path": str(modules),
        "is main": True,
    }


@pytest.mark.parametrize(
    "name", ["small_projekt", "small_project.tain", "json.tool.x", ".train", "", "no_main"]
)
def test_a_missing_module_is_named_with_the_remedy(modules: Path, name: str) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.main(["-m", name])
    shown = "no_main.__main__" if name == "no_main" else name
    assert ended.value.code == (
        f"flashckpt-launch: {shown}: no such module for {sys.executable}; start in the directory "
        "that holds it, or put that directory on PYTHONPATH"
    )


def test_an_import_error_or_exit_of_the_module_itself_is_raised(modules: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.main(["-m", "small_project.ends"])
    assert ended.value.code == 7
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        launch.main(["-m", "small_project.needs_more"])
    (modules / "small_project/__init__.py").write_text("import a_module_that_nobody_has")
    sys.modules.pop("small_project")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_nobody_has"):
        launch.main(["-m", "small_project.train"])


@pytest.mark.parametrize(
    ("arguments", "status"), [([], 2), (["-m"], 2), (["-h"], 0), (["--help"], 0)], ids=str
)
def test_a_call_without_program_shows_the_usage(
    arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        launch.main(arguments)
    assert ended.value.code == status
    printed = capsys.readouterr()
    # The help was asked for, so `--help | less` shows it; without arguments it is an error.
    usage, nothing = (printed.out, printed.err) if status == 0 else (printed.err, printed.out)
    assert nothing == ""
    assert "flashckpt-launch pretrain_gpt.py ARGS" in usage
    assert "-m MODULE" in usage
