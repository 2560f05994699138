"""Only the store, the agent's clean-up and the makers of a file remove or truncate files."""

from __future__ import annotations

import ast
from pathlib import Path

import megatron_flashckpt

HOME = Path(megatron_flashckpt.__file__).parent

#: Names of functions and of methods of paths and of a `Storage`. `os.remove` and `os.replace` are
#: found by their module, because lists and strings have methods of these names.
REMOVING = {"unlink", "rmdir", "rmtree", "removedirs", "rename", "renames", "truncate", "ftruncate"}
REMOVING |= {"delete", "delete_directory", "move"}
#: Modules that may do so, and to which files.
MAY_REMOVE = {
    "storage.posix": "names below its root, through no link",
    "storage.patient": "as `storage.posix`, which it repeats",
    "agent.fence": "as `storage.posix`, while this agent is the writer",
    "agent.cleanup": "files of saves that were not committed",
    "agent.failed_save": "files of a save that failed",
    "agent.log": "its own log, which is full",
    "agent.markers": "markers of older saves",
    "catalog.retention": "checkpoints that no rule keeps",
    "save.probe": "its own file, under a random name",
    "agent.place": "its own log",
    "agent.trace_files": "its own traces",
    "convert.common.former_export": "files that an export listed as its own",
    "convert.common.output_dir": "directories that a conversion made under a random name",
    "memory.slab": "its own memory",
}


def removes(node: ast.AST) -> bool:
    """Return whether `node` is a call that may remove, rename or truncate a file."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="remove" | "replace")):
            return True
        case ast.Call(func=ast.Attribute(attr="replace"), args=[_], keywords=[]):
            return True  # of a path; that of a string has two arguments
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name in REMOVING
    return False


def test_only_the_listed_modules_remove_rename_or_truncate_files() -> None:
    removing = {
        ".".join(path.relative_to(HOME).with_suffix("").parts)
        for path in HOME.rglob("*.py")
        if any(removes(node) for node in ast.walk(ast.parse(path.read_text())))
    }
    assert removing == MAY_REMOVE.keys()
