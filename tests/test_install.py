"""An editable install of a clone works from every directory, the clone's parent included.

In the parent, the clone's folder has the package's name. Python takes a folder without
`__init__.py` for a namespace package, except if a later entry of `sys.path` holds a real package.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import setuptools

from tests.support.forked.nursery import REPO

WHERE = "import megatron_flashckpt as m; print(m.__file__)"


class InstalledClone:
    """A clone named like the package, and a virtual environment with an editable install of it."""

    def __init__(self, parent: Path) -> None:
        self.parent = parent
        self.clone = parent / "megatron_flashckpt"
        self.bin = parent / "environment/bin"
        self.package = self.clone / "megatron_flashckpt/__init__.py"

    def run(self, *command: object, cwd: Path, **variables: str) -> str:
        """Run a program of the virtual environment; return its output."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        program, *arguments = map(str, command)
        ran = subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=cwd,
            env={**kept, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> InstalledClone:
    made = InstalledClone(tmp_path_factory.mktemp("installed"))
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPO / "megatron_flashckpt", made.package.parent, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(REPO / name, made.clone)
    venv.create(made.bin.parent, symlinks=True)
    (packages,) = made.bin.parent.glob("lib/python3*/site-packages")
    # Other packages come from the tests' environment, whose `.pth` files are not read here.
    shared = [entry for entry in sys.path if entry.endswith("-packages")]
    (packages / "shared.pth").write_text("\n".join(shared))
    made.run(
        *("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"),
        *("--editable", made.clone),
        cwd=made.clone,
    )
    return made


@pytest.mark.parametrize("address", ["https://forge.example/team/project/", None])
def test_no_link_of_the_long_description_is_relative(
    monkeypatch: pytest.MonkeyPatch, address: str | None
) -> None:
    """With an address, the links of a release lead to its tag."""
    passed: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: passed.update(arguments))
    monkeypatch.delenv("REPOSITORY_URL", raising=False)
    if address:
        monkeypatch.setenv("REPOSITORY_URL", address)
    runpy.run_path(str(REPO / "setup.py"))
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", passed["long_description"])
    assert all(target.startswith("https://") for _, target in links)
    if address is None:
        assert passed["project_urls"] == {}
        return
    base = f"{address}%s/v{passed['version']}/"
    assert ("", base % "blob" + "docs/quickstart.md") in links
    assert {target.startswith(base % "raw") for image, target in links if image} == {True}
    assert passed["project_urls"]["Source"] == address.rstrip("/")


def test_the_source_distribution_has_the_files_that_scripts_run() -> None:
    lines = (REPO / "MANIFEST.in").read_text().splitlines()
    folders = {line.split()[1] for line in lines if line.startswith("graft ")}
    scripts = "".join(path.read_text() for path in REPO.glob("scripts/*") if path.is_file())
    run = {name for name in folders if re.search(rf"\b{name}\b", scripts)}
    assert run >= {"benchmarks", "examples", "patches", "tools"}
    assert folders >= {"configs", "docs", "scripts", "tests"}
    assert [name for name in folders if not (REPO / name).is_dir()] == []


def test_a_wheel_holds_the_package_and_files_to_copy(
    installed: InstalledClone, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(installed.clone, clone)
    for module in REPO.glob("*/*.py"):
        if module.parent.name != "megatron_flashckpt":
            (clone / module.parent.name).mkdir(exist_ok=True)
            shutil.copy(module, clone / module.parent.name)
    to_copy = {
        path.relative_to(REPO)
        for pattern in ("configs/*.yaml", "patches/*.patch", "scripts/*.sh", "scripts/*.sbatch")
        for path in REPO.glob(pattern)
    }
    for folder in ("configs", "patches", "scripts"):
        shutil.copytree(REPO / folder, clone / folder, dirs_exist_ok=True)
    installed.run(
        *("python", "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", tmp_path, clone),
        cwd=tmp_path,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [Path(name) for name in archive.namelist()]
    data = "megatron_flashckpt-*.data/data/share/megatron_flashckpt/*/*"
    shared = {Path(*name.parts[-2:]) for name in names if name.match(data)}
    assert shared == to_copy
    assert len(shared) > 18
    modules = {path.relative_to(clone) for path in (clone / "megatron_flashckpt").rglob("*.py")}
    assert {*modules, Path("megatron_flashckpt/py.typed")} <= set(names)
    assert {name.parts[0].partition("-")[0] for name in names} == {"megatron_flashckpt"}


@pytest.mark.parametrize("python_path", [None, "parent", "clone"])
def test_the_package_is_found_from_every_directory(
    installed: InstalledClone, python_path: str | None
) -> None:
    variables = {} if python_path is None else {"PYTHONPATH": str(getattr(installed, python_path))}
    for cwd in (installed.parent, installed.clone, Path("/")):
        printed = installed.run("python", "-c", WHERE, cwd=cwd, **variables)
        assert printed == f"{installed.package}\n", cwd
    version = installed.run("flashckpt", "--version", cwd=installed.parent, **variables)
    as_module = ("python", "-m", "megatron_flashckpt.cli", "--version")
    assert installed.run(*as_module, cwd=installed.parent, **variables) == version


def test_a_clone_on_the_path_hides_no_folder_of_the_user(tmp_path: Path) -> None:
    """An editable install puts the clone on `sys.path`, where a package wins over a namespace.

    Megatron imported `tools.retro` until core 0.6, and its `tools` is a namespace.
    """
    folders = {module.parent.name for module in REPO.glob("*/*.py")}
    folders -= {"megatron_flashckpt", "tests"}  # Megatron's `tests` is a package
    assert {"benchmarks", "scripts", "tools"} <= folders
    for folder in folders:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "of_the_user.py").touch()
    imports = "; ".join(f"import {folder}.of_the_user" for folder in sorted(folders))
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(REPO)!r}); {imports}"],
        cwd=tmp_path,
        check=True,
    )
