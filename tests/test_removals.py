"""Only the store, the janitor and the makers of a file remove or truncate files."""

from __future__ import annotations

import ast

from tests.support.package_source import nodes

#: Names of functions and of methods of paths. `os.remove` and `os.replace` are
#: found by their module, because lists and strings have methods of these names.
REMOVING = {"unlink", "rmdir", "rmtree", "removedirs", "rename", "renames", "truncate", "ftruncate"}
#: Modules that may do so, and to which files.
MAY_REMOVE = {
    "storage.posix_store": "names below its root, through no link",
    "storage.posix_files": "its own temporary file",
    "storage.posix_writer": "the file that it writes",
    "agent.log": "its own log, which is full",
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
    assert {module for module, node in nodes() if removes(node)} == MAY_REMOVE.keys()


#: Modules that delete objects of a store, besides the store itself, and which.
MAY_DELETE = {
    "agent.janitor": "all that no run needs",
    "agent.alive": "the sign of life of its own run",
    "agent.copy_files": "its own directory on a local disk",
    "agent.durable_commands": "the mark of a save whose command has ended",
    "catalog.history": "the oldest events, which no load reads",
    "convert.writers.flashckpt": "the run that it has opened in vain",
    "cli.config_check": "its own file, under a random name",
    "save.probe": "its own file, under a random name",
}


def test_only_the_store_and_the_janitor_delete_what_others_may_need() -> None:
    deleting = {
        module
        for module, node in nodes()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "delete"
        and not module.startswith("storage.")
    }
    assert deleting == MAY_DELETE.keys()
