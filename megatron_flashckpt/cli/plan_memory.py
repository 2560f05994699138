"""The table of `flashckpt plan` with the host memory of several settings and numbers of GPUs."""

from __future__ import annotations

import typing
from collections.abc import Iterator

from rich.console import Console

from megatron_flashckpt.cli.console import Columns, counted, human_size, print_table, say
from megatron_flashckpt.config import Redundancy
from megatron_flashckpt.sizing.cluster_model import Cluster, HostMemory


def print_host_memory(choices: list[HostMemory], cluster: Cluster, out: Console) -> None:
    """Print a table: a row per number of GPUs, a column per choice of settings."""
    say(
        out,
        "host memory per node, by slots and redundancy; !: more than the node's "
        f"{cluster.host_memory_gb:g} GB",
    )
    print_table(out, _tables_of_memory(choices))


def _tables_of_memory(choices: list[HostMemory]) -> Iterator[Columns]:
    """Yield the table with whole titles, then the one for narrow terminals."""
    settings = [(slots, kind) for slots in (1, 2) for kind in typing.get_args(Redundancy)]
    gpus = sorted({choice.gpus for choice in choices})
    known = {(choice.gpus, choice.slots, choice.redundancy): choice for choice in choices}
    for title in ("{slots}, {kind}", "{number} {kind}"):
        columns = {"GPUs": [f"{number:,}" for number in gpus]}
        for slots, kind in settings:
            name = title.format(slots=counted(slots, "slot"), number=slots, kind=kind)
            columns[name] = [_cell(known.get((number, slots, kind))) for number in gpus]
        yield columns


def _cell(choice: HostMemory | None) -> str:
    if choice is None:  # redundancy needs a second node
        return "-"
    return human_size(int(choice.nbytes)) + ("" if choice.fits else "!")
