"""Patches that swap Megatron's checkpointing imports: apply the right one, check or make all.

    scripts/patches apply TREE [PATCH]   patch a Megatron-LM checkout, or a directory with megatron/
    scripts/patches check CHECKOUT       check every patch against its tag, with git apply and patch
    scripts/patches make CHECKOUT        write patches/ from the tags of a Megatron-LM clone

The commands need only git and Python. A patch holds as few lines of context as `git apply` needs.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from patches.imports import TRAINING, lines_of, obstacles, swapped

PATCHES = Path(__file__).resolve().parent
#: Revisions by the name of their patch. Later releases with the same minor number use the same
#: patch.
TAGS = {
    "cb995d5": "cb995d5",
    **{
        f"core_v0.{release}": f"core_v0.{release}"
        for release in ("8.0", "10.0", "12.3", "14.0", "16.1", "17.1", "18.2", "19.0")
    },
    "main": "HEAD",
}
#: Files in which releases read arguments from checkpoints.
ARGUMENTS = (
    "megatron/initialize.py",
    "megatron/training/initialize.py",
    "megatron/training/arguments.py",
)
_VERSION = re.compile(r"^(MAJOR|MINOR|PATCH) = (\d+)", re.MULTILINE)


class PatchError(Exception):
    """A patch cannot be applied, checked or made; the message names the reason and the remedy."""


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
    """Return the texts of the files of a revision whose imports must be swapped, by path."""
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
    """Raise PatchError if a patch differs from that of `make`, or a command cannot apply it."""
    patch, revision = PATCHES / f"{name}.patch", TAGS[name]
    texts = _patched(checkout, revision)
    if patch.read_text() != make(checkout, revision):
        raise PatchError(f"{patch.name} is not what 'scripts/patches make' writes: write it anew")
    for command in (["git", "apply", str(patch)], ["patch", "-s", "-p1", "-i", str(patch)]):
        if (failure := _tried(command, texts)) is not None:
            raise PatchError(f"{' '.join(command)} fails on {revision}: {failure}")


def _tried(command: list[str], texts: dict[str, str]) -> str | None:
    """Apply a patch to copies of files; return the failure, or None if all imports are swapped."""
    with tempfile.TemporaryDirectory() as scratch:
        for path, text in texts.items():
            file = Path(scratch, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode())
        done = subprocess.run(
            command, cwd=scratch, env=_outside(scratch), capture_output=True, text=True
        )
        if done.returncode:
            return done.stderr
        wrong = [p for p, text in texts.items() if _read(Path(scratch, p)) != swapped(text)]
        return f"{', '.join(wrong)} are not as they should be" if wrong else None


def _outside(directory: str | Path) -> dict[str, str]:
    """Return an environment in which git ignores a repository around `directory`.

    Inside another repository `git apply` silently skips files.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return {**kept, "GIT_CEILING_DIRECTORIES": str(Path(directory).resolve().parent)}


def _read(file: Path) -> str:
    """Return a file's text with unchanged line ends."""
    return file.read_bytes().decode()


def apply(tree: Path, asked: str | None) -> str:
    """Swap the imports of `tree`; return a message with the changes.

    Args:
        asked: refuse any other patch than this one; None: choose the patch.

    Raises:
        PatchError: `tree` is no Megatron-LM or is patched already, another patch is the right one,
            or edited imports cannot be swapped.
    """
    texts = {p: _read(tree / p) for p in (*TRAINING, *ARGUMENTS) if (tree / p).is_file()}
    training = [path for path in TRAINING if path in texts]
    if not training:
        raise PatchError(
            f"{tree}: has no {' or '.join(TRAINING)}; name the root of a Megatron-LM checkout, or "
            "the site-packages that has megatron-core >= 0.17"
        )
    version = _version(tree)
    reasons = [reason for path, text in texts.items() for reason in obstacles(path, text)]
    if reasons:
        listed = "\n  ".join(reasons)
        raise PatchError(
            f"{tree}: imports of this Megatron-LM core {version} were edited, so that they cannot "
            f"be swapped:\n  {listed}\nNothing was changed. Edit these lines, or use the launcher, "
            "which needs no edit"
        )
    changed = {path: swapped(text) for path, text in texts.items() if swapped(text) != text}
    if not changed:
        raise PatchError(
            f"{tree / training[0]}: imports megatron_flashckpt already; nothing is left to do"
        )
    nearest = _nearest_first(version)
    fitting = [name for name in nearest if _fits(texts, name)]
    right = [*fitting, *nearest][0]
    if asked not in (None, right):
        raise PatchError(
            f"{tree}: is Megatron-LM core {version}: take patches/{right}.patch, not "
            f"{asked}.patch; nothing was changed"
        )
    _write(tree, changed)
    if fitting:
        return f"applied patches/{right}.patch to {tree}"
    lines = [
        f"  {path}:{number}: {new.strip()}"
        for path, text in changed.items()
        for number, (old, new) in enumerate(
            zip(lines_of(texts[path]), lines_of(text), strict=True), start=1
        )
        if old != new
    ]
    return "\n".join(
        [f"swapped the imports of {tree}, whose lines differ from those of every patch:", *lines]
    )


def _write(tree: Path, texts: dict[str, str]) -> None:
    """Replace files of `tree` atomically, after all new files are written."""
    written: dict[Path, Path] = {}
    replaced: list[str] = []
    try:
        for path, text in texts.items():
            file = (tree / path).resolve()
            written[file] = file.with_name(f"{file.name}.flashckpt")
            written[file].write_bytes(text.encode())
            shutil.copymode(file, written[file])
        for file, replacement in written.items():
            replacement.replace(file)
            replaced.append(file.name)
    except OSError as error:
        raise PatchError(
            f"{error.filename}: cannot be written ({error.strerror}); "
            + (f"{', '.join(replaced)} was changed" if replaced else "nothing was changed")
        ) from error
    finally:
        for replacement in written.values():
            replacement.unlink(missing_ok=True)
    wrong = [path for path, text in texts.items() if _read(tree / path) != text]
    if wrong:
        raise PatchError(f"{tree}: {', '.join(wrong)} do not hold what was written into them")


def _fits(texts: dict[str, str], name: str) -> bool:
    """Return whether a patch applies to these texts and swaps all their imports."""
    return _tried(["git", "apply", str(PATCHES / f"{name}.patch")], texts) is None


def _nearest_first(version: str) -> list[str]:
    """Return all patches, those with the nearest minor number first."""
    minor = int(version.split(".")[1])
    minors = {name: int(name.split(".")[1]) for name in TAGS if "." in name}
    minors |= {"cb995d5": 5, "main": max(minors.values()) + 1}
    return sorted(TAGS, key=lambda name: abs(minors[name] - minor))


def _version(tree: Path) -> str:
    info = tree / "megatron/core/package_info.py"
    if not info.is_file():
        raise PatchError(f"{info}: is missing; name the root of a Megatron-LM checkout")
    numbers = dict(_VERSION.findall(info.read_text()))
    return ".".join(numbers[part] for part in ("MAJOR", "MINOR", "PATCH"))


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments],
        cwd=directory,
        env=_outside(directory),
        capture_output=True,
        text=True,
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
    applied.add_argument("patch", nargs="?", help="patch to expect; any other one is refused")
    args = parser.parse_args()
    try:
        if args.command == "apply":
            asked = Path(args.patch).name.removesuffix(".patch") if args.patch else None
            print(apply(args.tree, asked))
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
