"""Patches that swap Megatron's checkpointing imports: apply the right one, check or make all.

    scripts/patches apply TREE [PATCH]   TREE: a Megatron-LM checkout or a directory with megatron/
    scripts/patches check CHECKOUT       every patch against its tag, with git apply and patch -p1
    scripts/patches make CHECKOUT        write patches/ from the tags of a Megatron-LM clone

Needs git and Python alone. A patch holds as few lines of context as `git apply` needs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PATCHES = Path(__file__).resolve().parents[1] / "patches"
#: Name of the patch -> revision it is made from. Later releases with the same minor number take it.
TAGS = {
    "cb995d5": "cb995d5",
    **{
        f"core_v0.{release}": f"core_v0.{release}"
        for release in ("8.0", "10.0", "12.3", "14.0", "16.1", "17.1", "18.2", "19.0")
    },
    "main": "HEAD",
}
#: Where releases keep their training loop; the first of early 2024.
TRAINING = ("megatron/training.py", "megatron/training/training.py")
#: And where they read arguments from checkpoints.
ARGUMENTS = (
    "megatron/initialize.py",
    "megatron/training/initialize.py",
    "megatron/training/arguments.py",
)
#: Stock modules (the old home, the new one, relative), and which names are taken from ours.
_IMPORT = re.compile(
    r"^(?P<indent> *)from (?:megatron(?:\.training)?|)\.(?P<module>checkpointing|async_utils) "
    r"import (?P<names>.*)$"
)
_SWAPPED = ("load_checkpoint", "save_checkpoint", "maybe_finalize_async_save")
_ARGUMENTS = "load_args_from_checkpoint"
_VERSION = re.compile(r"^(MAJOR|MINOR|PATCH) = (\d+)", re.MULTILINE)


class PatchError(Exception):
    """Says what is wrong and what to do; nothing was changed."""


def swapped(text: str) -> str:
    """Return a module's text with our imports in the place of Megatron's."""
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        match = _IMPORT.match(line.rstrip("\n"))
        if match is None:
            continue
        # What else stands in the same statement is passed through by our modules.
        names = match["names"]
        if names == "(":
            end = next(n for n in range(number, len(lines)) if lines[n].startswith(")"))
            names = "".join(lines[number + 1 : end])
        module = "arguments" if names == _ARGUMENTS else match["module"]
        if any(name in re.findall(r"\w+", names) for name in (*_SWAPPED, _ARGUMENTS)):
            ours = f"from megatron_flashckpt.{module} import {match['names']}"
            lines[number] = f"{match['indent']}{ours}\n"
    return "".join(lines)


def make(checkout: Path, revision: str) -> str:
    """Return the patch for a revision of a Megatron-LM clone."""
    with tempfile.TemporaryDirectory() as scratch:
        for path, text in _patched(checkout, revision).items():
            for side, content in (("a", text), ("b", swapped(text))):
                file = Path(scratch, side, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content)
        done = subprocess.run(
            ["git", "diff", "--no-index", "--no-prefix", "--unified=1", "a", "b"],
            cwd=scratch,
            capture_output=True,
            text=True,
        )
    if done.returncode != 1:
        raise PatchError(f"{revision} has no imports to swap {done.stderr}")
    return done.stdout


def _patched(checkout: Path, revision: str) -> dict[str, str]:
    """Return the files of a revision whose imports are swapped: path and text."""
    listed = _git(checkout, "ls-tree", "-r", "--name-only", revision, "megatron").split()
    if not set(TRAINING) & set(listed):
        raise PatchError(f"{checkout}: {revision} has no {' or '.join(TRAINING)}")
    texts = {
        path: _git(checkout, "show", f"{revision}:{path}")
        for path in (*TRAINING, *ARGUMENTS)
        if path in listed
    }
    return {path: text for path, text in texts.items() if swapped(text) != text}


def check(checkout: Path, name: str) -> None:
    """Raise PatchError unless a patch is what `make` makes, and applies in both ways."""
    patch, revision = PATCHES / f"{name}.patch", TAGS[name]
    texts = _patched(checkout, revision)
    if patch.read_text() != make(checkout, revision):
        raise PatchError(f"{patch.name} is not what 'scripts/patches make' writes: write it anew")
    for command in (["git", "apply", str(patch)], ["patch", "-s", "-p1", "-i", str(patch)]):
        if (said := _tried(command, texts)) is not None:
            raise PatchError(f"{' '.join(command)} fails on {revision}: {said}")


def _tried(command: list[str], texts: dict[str, str]) -> str | None:
    """Run a command that applies a patch on copies of files; return why they are not as wanted."""
    with tempfile.TemporaryDirectory() as scratch:
        for path, text in texts.items():
            file = Path(scratch, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True)
        if done.returncode:
            return done.stderr
        wrong = [p for p, text in texts.items() if Path(scratch, p).read_text() != swapped(text)]
        return f"{', '.join(wrong)} are not as they should be" if wrong else None


def apply(tree: Path, asked: str | None) -> str:
    """Patch `tree`; return the name of the patch.

    Args:
        asked: only this one is wanted.

    Raises:
        PatchError: no Megatron-LM, patched already, or another patch is the right one.
    """
    files = [tree / path for path in TRAINING if (tree / path).is_file()]
    if not files:
        raise PatchError(
            f"{tree}: has no {' or '.join(TRAINING)}; name the root of a Megatron-LM checkout, or "
            "the site-packages that has megatron-core >= 0.17"
        )
    if "megatron_flashckpt" in files[0].read_text():
        raise PatchError(f"{files[0]}: imports megatron_flashckpt already; nothing is left to do")
    version = _version(tree)
    fitting = [name for name in _nearest_first(version) if _fits(tree, name)]
    if not fitting:
        raise PatchError(
            f"{tree}: Megatron-LM core {version} is none that there is a patch for; swap the "
            "imports by hand as patches/README.md shows, or use the launcher, which needs no edit"
        )
    right = fitting[0]
    if asked not in (None, right):
        raise PatchError(
            f"{tree}: is Megatron-LM core {version}: take patches/{right}.patch, not "
            f"{asked}.patch; nothing was changed"
        )
    _git(tree, "apply", "--unsafe-paths", f"--directory={tree}", str(PATCHES / f"{right}.patch"))
    return right


def _fits(tree: Path, name: str) -> bool:
    """Return whether a patch applies where its lines stand, and swaps all imports there are."""
    texts = {
        path: (tree / path).read_text()
        for path in (*TRAINING, *ARGUMENTS)
        if (tree / path).is_file()
    }
    return _tried(["git", "apply", str(PATCHES / f"{name}.patch")], texts) is None


def _nearest_first(version: str) -> list[str]:
    """Return all patches by the distance of their minor number."""
    minor = int(version.split(".")[1])
    minors = {name: int(name.split(".")[1]) for name in TAGS if "." in name}
    minors |= {"cb995d5": 5, "main": max(minors.values()) + 1}
    return sorted(TAGS, key=lambda name: abs(minors[name] - minor))


def _version(tree: Path) -> str:
    info = tree / "megatron/core/package_info.py"
    if not info.is_file():
        raise PatchError(f"{info}: is missing; name the root of a Megatron-LM checkout")
    found = dict(_VERSION.findall(info.read_text()))
    return ".".join(found[part] for part in ("MAJOR", "MINOR", "PATCH"))


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=directory, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise PatchError(f"git {' '.join(arguments)} in {directory}: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/patches", formatter_class=argparse.RawTextHelpFormatter, description=__doc__
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make").add_argument("checkout", type=Path)
    commands.add_parser("check").add_argument("checkout", type=Path)
    applied = commands.add_parser("apply")
    applied.add_argument("tree", type=Path)
    applied.add_argument("patch", nargs="?", help="refuse any other than this one")
    args = parser.parse_args()
    try:
        if args.command == "apply":
            asked = Path(args.patch).name.removesuffix(".patch") if args.patch else None
            print(f"applied patches/{apply(args.tree.resolve(), asked)}.patch to {args.tree}")
            return
        for name, revision in TAGS.items():
            if args.command == "make":
                (PATCHES / f"{name}.patch").write_text(make(args.checkout, revision))
            check(args.checkout, name)
            print(f"{name}: applies to {revision}")
    except PatchError as error:
        sys.exit(f"scripts/patches: {error}")


if __name__ == "__main__":
    main()
