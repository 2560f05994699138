"""Patches change imports only, and a patch for another release is refused with the right one named.

Edited imports are swapped in place, or refused with their line numbers. The tests use the wheel of
core 0.17.1; `scripts/compat` patches the trees of all tags.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import megatron.core
import pytest

from patches import patch
from tests.support.megatron_jobs import REPO

SCRIPT = REPO / "scripts/patches"

#: Files that the patch for core 0.17.1 changes.
PATCHED = ("megatron/training/training.py", "megatron/training/initialize.py")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copy the files of core 0.17.1 that the patch changes, and the version file."""
    installed = Path(megatron.core.__file__).parents[2]
    if not megatron.core.__version__.startswith("0.17.1"):
        (installed,) = Path(sys.prefix).glob("second/lib/python3*/site-packages")
    for path in (*PATCHED, "megatron/core/package_info.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / path, tmp_path / path)
    return tmp_path


def run(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([str(SCRIPT), *map(str, arguments)], capture_output=True, text=True)


def test_a_patch_changes_imports_to_ours_and_nothing_else() -> None:
    stock = re.compile(r"^( *)from (megatron(\.training)?|)\.(?=checkpointing|async_utils)")
    arguments = "checkpointing import load_args_from_checkpoint"
    patches = {path.stem: path.read_text() for path in patch.PATCHES.glob("*.patch")}
    assert patches.keys() == set(patch.TAGS)
    for name, text in patches.items():
        changes = [line for line in text.splitlines() if re.match(r"[-+](?![-+])", line)]
        removed = [line[1:] for line in changes if line[0] == "-"]
        added = [line[1:] for line in changes if line[0] == "+"]
        ours = [stock.sub(r"\1from megatron_flashckpt.", line) for line in removed]
        renamed = arguments.replace("checkpointing", "arguments")
        assert [line.replace(arguments, renamed) for line in ours] == added, name
        assert all(line.lstrip().startswith("from megatron_flashckpt.") for line in added)
        assert len(added) in (3, 4)


def test_the_right_patch_is_found_and_applied(tree: Path) -> None:
    stock = [(tree / path).read_text() for path in PATCHED]
    done = run("apply", tree)
    assert done.stdout == f"applied patches/core_v0.17.1.patch to {tree}\n", done.stderr
    patched = [(tree / path).read_text() for path in PATCHED]
    assert patched == [patch.swapped(text) for text in stock]
    assert all(one != other for one, other in zip(patched, stock, strict=True))
    again = run("apply", tree)
    assert again.returncode == 1
    assert "imports megatron_flashckpt already; nothing is left to do" in again.stderr
    assert patched == [(tree / path).read_text() for path in PATCHED]


def test_another_releases_patch_is_refused_and_the_right_one_named(tree: Path) -> None:
    stock = (tree / "megatron/training/training.py").read_text()
    done = run("apply", tree, REPO / "patches/core_v0.16.1.patch")
    assert done.returncode == 1
    assert "is Megatron-LM core 0.17.1: take patches/core_v0.17.1.patch, not core_v0.16.1" in (
        done.stderr
    )
    assert (tree / "megatron/training/training.py").read_text() == stock
    without = run("apply", tree / "megatron/core")
    assert without.returncode == 1
    assert "/megatron/core: has no megatron/training.py or " in without.stderr


#: The import lines of training.py as they stand in core 0.17.1.
LOAD = "from megatron.training.checkpointing import load_checkpoint\n"
SAVE = "from megatron.training.checkpointing import save_checkpoint, save_grads\n"
FINALIZE = "from .async_utils import maybe_finalize_async_save\n"


def edit(tree: Path, old: str, new: str) -> str:
    """Replace a part of training.py; return the new text."""
    training = tree / PATCHED[0]
    text = training.read_bytes().decode()
    assert text.count(old) == 1
    training.write_bytes(text.replace(old, new).encode())
    return text.replace(old, new)


def test_a_tree_inside_another_repository_is_really_patched(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside another repository, `git apply` skips all files and still exits with status 0."""
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    (tree / "temporary").mkdir()
    (tree / "vendored").mkdir()
    (tree / "megatron").rename(tree / "vendored/megatron")
    monkeypatch.setenv("GIT_DIR", str(tree / ".git"))
    monkeypatch.setenv("TMPDIR", str(tree / "temporary"))
    done = run("apply", tree / "vendored")
    assert done.stdout == f"applied patches/core_v0.17.1.patch to {tree / 'vendored'}\n", (
        done.stderr
    )
    for path in PATCHED:
        assert "from megatron_flashckpt." in (tree / "vendored" / path).read_text()


LOAD_OURS = LOAD.replace("megatron.training", "megatron_flashckpt")
SAVE_OURS = SAVE.replace("megatron.training", "megatron_flashckpt")
FINALIZE_OURS = FINALIZE.replace(".async", "megatron_flashckpt.async")


@pytest.mark.parametrize(
    ("old", "new", "after"),
    [
        (LOAD, f"{LOAD[:-1]}  # kept\n", f"{LOAD_OURS[:-1]}  # kept\n"),
        (
            LOAD + SAVE,
            "from megatron.training.checkpointing import (save_grads, load_checkpoint as load,\n"
            "    save_checkpoint)\n",
            "from megatron_flashckpt.checkpointing import (save_grads, load_checkpoint as load,\n"
            "    save_checkpoint)\n",
        ),
        (
            SAVE,
            f"try:\n    {SAVE}except OSError: pass\n",
            f"try:\n    {SAVE_OURS}except OSError: pass\n",
        ),
        (FINALIZE, FINALIZE.replace(".async", "megatron.training.async"), FINALIZE_OURS),
        (LOAD, LOAD_OURS, LOAD_OURS),
    ],
    ids=["comment", "alias", "indented", "absolute", "half swapped"],
)
def test_edited_imports_are_swapped_in_place(tree: Path, old: str, new: str, after: str) -> None:
    expected = edit(tree, old, new).replace(new, after)
    for stock, ours in ((LOAD, LOAD_OURS), (SAVE, SAVE_OURS), (FINALIZE, FINALIZE_OURS)):
        expected = expected.replace(stock, ours)
    messages = patch.apply(tree, None).splitlines()
    assert (tree / PATCHED[0]).read_text() == expected
    assert "from megatron_flashckpt.arguments import" in (tree / PATCHED[1]).read_text()
    if messages[0].startswith("swapped the imports of"):
        lines = expected.splitlines()
        for line in messages[1:-1]:
            path, number, text = line.strip().split(":", 2)
            assert (path, lines[int(number) - 1].strip()) == (PATCHED[0], text.strip())
        assert messages[-1].startswith(f"  {PATCHED[1]}:")
    else:
        assert messages == [f"applied patches/core_v0.17.1.patch to {tree}"]


def test_a_release_without_a_patch_has_its_imports_swapped(tree: Path) -> None:
    training = tree / PATCHED[0]
    training.write_text(training.read_text().replace("get_standard_config_overrides", "renamed"))
    before = training.read_text()
    messages = run("apply", tree).stdout.splitlines()
    assert messages[0] == (
        f"swapped the imports of {tree}, whose lines differ from those of every patch:"
    )
    number = before.splitlines().index(LOAD[:-1]) + 1
    assert messages[1] == f"  {PATCHED[0]}:{number}: {LOAD_OURS[:-1]}"
    assert training.read_text() == patch.swapped(before)


def test_line_endings_are_kept(tree: Path) -> None:
    training = tree / PATCHED[0]
    training.write_bytes(training.read_bytes().replace(b"\n", b"\r\n"))
    before = training.read_bytes()
    patch.apply(tree, None)
    after = training.read_bytes()
    assert after != before
    assert after.count(b"\r\n") == after.count(b"\n") == before.count(b"\n")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            SAVE,
            "from our_fork.checkpointing import save_checkpoint, save_grads\n",
            "149: `from our_fork.checkpointing import save_checkpoint, save_grads` imports what is "
            "not Megatron's own; write `from megatron_flashckpt.checkpointing import ",
        ),
        (
            LOAD + SAVE,
            "from megatron.training.checkpointing import *\n",
            "148: `from megatron.training.checkpointing import *` hides where names come from; ",
        ),
        (
            SAVE,
            f"{SAVE}from megatron.training import checkpointing as ours\n"
            "save = ours.save_checkpoint\n",
            "151: `save = ours.save_checkpoint` calls Megatron's own; write ",
        ),
        (LOAD, "", " does not import load_checkpoint; write `from megatron_flashckpt."),
        (
            LOAD,
            LOAD.replace("import ", "import load_args_from_checkpoint, "),
            "148: `from megatron.training.checkpointing import load_args_from_checkpoint, "
            "load_checkpoint` is to become imports from two modules; ",
        ),
        (
            LOAD,
            LOAD.replace(" import", " \\\n    import"),
            "148: `from megatron.training.checkpointing \\` goes on in the next line; write ",
        ),
        (LOAD, "from import\n", "148: is not Python that"),
    ],
    ids=["fork", "star", "module", "missing", "two homes", "continued", "not Python"],
)
def test_imports_that_cannot_be_swapped_are_refused_with_line_and_remedy(
    tree: Path, old: str, new: str, reason: str
) -> None:
    edit(tree, old, new)
    before = {path: (tree / path).read_bytes() for path in PATCHED}
    with pytest.raises(patch.PatchError) as caught:
        patch.apply(tree, None)
    message = str(caught.value)
    assert f"  {PATCHED[0]}:{reason}" in message
    assert message.endswith("or use the launcher, which needs no edit")
    assert before == {path: (tree / path).read_bytes() for path in PATCHED}
    assert not list(tree.rglob("*.flashckpt"))
