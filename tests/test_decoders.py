"""msgspec inspects types while their module is imported, and never in a thread that decodes.

msgspec inspects the fields of a class at the first decoding. A second thread that decodes meanwhile
reads an incomplete description and ends the process with SIGSEGV (msgspec 0.22, observed in an
agent whose four ranks staged their first save together). Imports hold a lock.
"""

from __future__ import annotations

import ast
import subprocess
import sys

import msgspec

from benchmarks.synthetic import LLAMA_405B, World
from megatron_flashckpt.layout.template import PlanCache
from megatron_flashckpt.memory.slot import SlotMeta
from tests.support.package_source import nodes

#: Types without fields, for which msgspec caches nothing.
PLAIN = {"dict", "list", "tuple", "str", "bytes", "int", "float", "bool", "msgspec"}
#: Only the main thread reads configurations, before other threads exist.
MAIN_THREAD_ONLY = {"config"}
THREADS = """
import sys, threading
from megatron_flashckpt.memory.slot import decoded_meta
encoded, meet = sys.stdin.buffer.read(), threading.Barrier(8)
sys.setswitchinterval(1e-6)
def decode():
    meet.wait()
    decoded_meta(encoded, 0)
threads = [threading.Thread(target=decode) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def looks_at_types(call: ast.AST) -> bool:
    """Return whether a node is a call that may be the first to inspect the fields of a type."""
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return False
    types: list[ast.expr] = []
    if call.func.attr == "decode":
        types = [keyword.value for keyword in call.keywords if keyword.arg == "type"]
    elif "msgspec" in ast.unparse(call.func) and call.func.attr in ("convert", "Decoder"):
        types = call.args[-1:]
    names = {node.id for kind in types for node in ast.walk(kind) if isinstance(node, ast.Name)}
    return bool(names - PLAIN)


def test_no_thread_is_the_first_to_inspect_a_type() -> None:
    calls = {
        (module, ast.unparse(call))
        for module, function in nodes()
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for call in ast.walk(function)
        if looks_at_types(call)
    }
    assert {module for module, _ in calls} == MAIN_THREAD_ONLY, calls


def test_ranks_of_a_node_may_stage_their_first_save_at_once() -> None:
    coordinates, pieces = next(iter(World(LLAMA_405B, tp=8, pp=8, dp=8).ranks()))
    layout = PlanCache().layout(pieces)
    meta = SlotMeta(
        root="/save",
        rank=0,
        world_size=512,
        coordinates=coordinates,
        template_fingerprint=layout.template_fingerprint,
        template=layout.template,
        placement=layout.placement,
        common=b"none",
        description={},
    )
    encoded = msgspec.msgpack.encode(meta)
    for _ in range(6):  # without the fix about half of the processes died
        subprocess.run([sys.executable, "-c", THREADS], input=encoded, check=True)


def test_damaged_bytes_are_caught_by_the_one_list_of_errors() -> None:
    """msgspec raises three unrelated classes; a handler of one of them overlooks the others."""
    handlers = [
        f"{module}:{node.lineno}"
        for module, node in nodes()
        if isinstance(node, ast.ExceptHandler) and node.type is not None
        for caught in [ast.unparse(node.type)]
        if "DecodeError" in caught and "RecursionError" not in caught
    ]
    assert handlers == []
