"""Direction of imports: the tests read every import of the package with `ast`.

Imports inside functions count too. Imports under `TYPE_CHECKING` count for the layers, but they
load nothing.
"""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

import megatron_flashckpt
from tests.support.package_source import HOME, nodes, trees

PACKAGE = "megatron_flashckpt"

#: Layers, lowest first. A unit is a module or a subpackage; it imports itself and lower layers.
LAYERS = (
    {"error_classes"},
    {"errors", "metrics", "waits", "cpu_list", "agent_config", "config_values"},
    {""},
    {"failpoints", "forks", "exit_status"},
    {"config"},
    {"layout", "storage", "sizing"},
    {"file_format"},
    {"tracing"},
    {"memory"},
    {"catalog", "collectives"},
    {"agent", "megatron_lm"},
    {"save"},
    {"convert"},
    {"load"},
    {"cli"},
    {"arguments"},
    {"checkpointer", "checkpointing", "async_utils"},
    {"launch", "integrations"},
)
#: Modules that never import torch, neither directly nor indirectly, not even inside a function.
TORCH_FREE = (
    *("", "error_classes", "cpu_list", "agent_config", "config_values", "errors", "metrics"),
    *("waits", "failpoints", "forks", "config", "layout", "storage", "file_format", "tracing"),
    *("catalog", "agent", "sizing", "memory.slot", "memory.slab"),
)
#: Modules that start without torch; a command that needs torch may import it when it runs.
TORCH_FREE_AT_START = (
    *("cli.commands", "cli.console", "cli.convert", "cli.report"),
    *("cli.config_check", "cli.ls", "cli.prune"),
)
#: What only some units may import: all others get their facts about Megatron from these, and an
#: object store's client is an optional dependency.
RESTRICTED = {
    "megatron": (
        {"megatron"},
        {"megatron_lm", "save", "convert", "load", "cli", "arguments", "checkpointer"}
        | {"checkpointing", "async_utils", "launch", "integrations"},
    ),
    "object stores": (
        {"obstore", "boto3", "botocore", "fsspec", "s3fs", "google", "azure"},
        {"storage.object_store"},
    ),
    "kinds of storage": ({f"{PACKAGE}.storage.posix_store"}, {"storage.opening"}),
}
RESTRICTED["facts about Megatron"] = ({f"{PACKAGE}.megatron_lm"}, RESTRICTED["megatron"][1])
#: pyzmq is an extra (`redundancy`): only modules that connect nodes need it on import.
NEEDS_PYZMQ = (
    *("agent.peers.redundancy", "agent.peers.link", "agent.peers.transport"),
    "agent.peers.recovery",
)
#: Modules with I/O or a clock, which `layout` must not import.
IMPURE = {"io", "os", "pathlib", "shutil", "socket", "subprocess", "tempfile", "threading", "time"}
IMPURE |= {"asyncio", "datetime", "logging", "mmap", "multiprocessing", "random", "uuid"}


@dataclasses.dataclass(frozen=True)
class Import:
    target: str
    """Dotted name; own modules without the package's name, `""` for the package itself."""
    line: int
    own: bool
    loads: bool = True
    """False under `TYPE_CHECKING`."""
    at_start: bool = True
    """False inside a function."""


def imports_in(tree: ast.Module, module: str, own_modules: Iterable[str]) -> list[Import]:
    """Return every import of the package's `module` (dotted, `""`: root).

    The name of a package's own module ends with `.__init__`.
    """
    own_modules = set(own_modules)
    imports: list[Import] = []

    def note(name: str, node: ast.AST, loads: bool, at_start: bool) -> None:
        root, _, rest = name.partition(".")
        own = root == PACKAGE
        if own:
            while rest not in own_modules:  # the name of an object in a module
                rest = rest.rpartition(".")[0]
        imports.append(Import(rest if own else name, node.lineno, own, loads, at_start))

    def walk(node: ast.AST, loads: bool, at_start: bool) -> None:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    note(alias.name, node, loads, at_start)
            case ast.ImportFrom(module=base, names=names, level=level):
                if level:
                    parents = f"{PACKAGE}.{module}".split(".")[:-level]
                    base = ".".join([*parents, *filter(None, [base])])
                for alias in names:
                    note(f"{base}.{alias.name}", node, loads, at_start)
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[first, *_]):
                is_import = called in ("import_module", "__import__")
                if is_import and isinstance(first, ast.Constant) and isinstance(first.value, str):
                    note(first.value, node, loads, at_start)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                for child in node.body:
                    walk(child, False, at_start)
                for child in node.orelse:
                    walk(child, loads, at_start)
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                at_start = False
        for child in ast.iter_child_nodes(node):
            walk(child, loads, at_start)

    walk(tree, True, True)
    return imports


def read_package() -> dict[str, list[Import]]:
    """Return the imports of every module by its dotted name; a package has the package's name."""
    files = {path.removesuffix(".py").replace("/", "."): tree for path, tree in trees().items()}
    modules = {name.removesuffix("__init__").rstrip("."): name for name in files}
    read = {
        module: imports_in(files[name], name, modules) for module, name in sorted(modules.items())
    }
    # The package names what it loads on first use for type checkers only.
    read[""] = [imported for imported in read[""] if imported.loads]
    return read


MODULES = read_package()


def unit_of(module: str) -> str:
    return module.partition(".")[0]


def level_of(module: str) -> int:
    (level,) = [n for n, units in enumerate(LAYERS) if unit_of(module) in units]
    return level


def belongs(module: str, names: Iterable[str]) -> bool:
    return any(module == name or (name != "" and module.startswith(f"{name}.")) for name in names)


def where(module: str, imported: Import) -> str:
    return f"{module or '__init__'}:{imported.line} imports {imported.target or PACKAGE}"


def loaded_by(module: str, *, at_start: bool) -> dict[str, str]:
    """Return all modules that importing `module` can load, with the import that loads each."""
    reached: dict[str, str] = {module: module}
    waiting = [module]
    while waiting:
        current = waiting.pop()
        parents = [current.rpartition(".")[0]] if current else []
        loads = [(name, f"{current} lies in {name}") for name in parents]
        loads += [
            (imported.target, where(current, imported))
            for imported in MODULES.get(current, [])
            if imported.loads and (imported.at_start or not at_start)
        ]
        for target, how in loads:
            if target not in reached:
                reached[target] = how
                if target in MODULES:
                    waiting.append(target)
    return reached


def roots(names: Iterable[str], wanted: set[str]) -> set[str]:
    return {name for name in names if name.partition(".")[0] in wanted}


def test_every_module_is_in_exactly_one_layer():
    placed = [unit for units in LAYERS for unit in units]
    assert len(placed) == len(set(placed))
    homeless = sorted({unit_of(module) for module in MODULES} - set(placed))
    assert homeless == [], "add these units to LAYERS and to the design"


def test_imports_run_only_to_lower_layers():
    wrong = [
        where(module, imported)
        for module, imports in MODULES.items()
        for imported in imports
        if imported.own
        and unit_of(imported.target) != unit_of(module)
        and level_of(imported.target) >= level_of(module)
    ]
    assert wrong == []


def test_no_modules_import_each_other_in_a_cycle():
    graph = {
        module: {
            imported.target for imported in imports if imported.own and imported.target != module
        }
        for module, imports in MODULES.items()
    }
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(MODULES)


@pytest.mark.parametrize("module", [name for name in MODULES if belongs(name, TORCH_FREE)])
def test_the_agent_and_its_lower_layers_never_import_torch(module):
    reached = loaded_by(module, at_start=False)
    assert {name: reached[name] for name in roots(reached, {"torch", "megatron"})} == {}


@pytest.mark.parametrize(("targets", "allowed"), RESTRICTED.values(), ids=RESTRICTED)
def test_only_the_listed_units_import_this(targets, allowed):
    wrong = [
        where(module, imported)
        for module, imports in MODULES.items()
        for imported in imports
        if belongs(f"{PACKAGE}.{imported.target}" if imported.own else imported.target, targets)
        and not belongs(module, allowed)
    ]
    assert wrong == []


def test_only_modules_that_connect_nodes_need_pyzmq():
    for module in MODULES.keys() - set(NEEDS_PYZMQ):
        reached = loaded_by(module, at_start=True)
        assert {name: reached[name] for name in roots(reached, {"zmq"})} == {}, module


def test_layouts_use_neither_io_nor_clock():
    layout = {
        module: imported for module, imported in MODULES.items() if unit_of(module) == "layout"
    }
    wrong = [
        where(module, imported)
        for module, imports in layout.items()
        for imported in imports
        if not imported.own and belongs(imported.target, IMPURE)
    ]
    wrong += [
        f"{module}:{node.lineno} opens a file"
        for module, node in nodes()
        if module.startswith("layout.") and isinstance(node, ast.Call)
        if isinstance(node.func, ast.Name) and node.func.id == "open"
    ]
    assert len(layout) > 1
    assert wrong == []


def test_the_package_exports_these_names_and_loads_torch_only_for_its_checkpointer():
    pytest.importorskip("torch")
    names = ["FORMAT_VERSION", "Checkpointer", "__version__", "report_metric", "waiting"]
    assert sorted(megatron_flashckpt.__all__) == sorted(names)
    assert all(hasattr(megatron_flashckpt, name) for name in names)
    assert megatron_flashckpt.Checkpointer.__module__ == "megatron_flashckpt.checkpointer"
    assert not hasattr(megatron_flashckpt, "Checkpoint")


def test_modules_that_start_fast_load_neither_torch_nor_megatron():
    fast = [name for name in MODULES if belongs(name, (*TORCH_FREE, *TORCH_FREE_AT_START))]
    names = [f"{PACKAGE}.{name}".rstrip(".") for name in fast if not name.endswith("__main__")]
    script = f"import sys, {', '.join(names)}\nprint(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(HOME.parent)},  # no sitecustomize of other tests
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert set(names) <= loaded
    assert "megatron_flashckpt.agent.server" in loaded
    assert roots(loaded, {"torch", "megatron"}) == set()
