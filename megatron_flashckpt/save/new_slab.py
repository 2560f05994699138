"""Size and creation of a slab, and the log of what it got."""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path

import torch

from megatron_flashckpt.config import Config
from megatron_flashckpt.errors import StorageError
from megatron_flashckpt.memory.pinned_slab import unlock_closed
from megatron_flashckpt.memory.slab import Slab
from megatron_flashckpt.memory.slot import SlabGeometry, align
from megatron_flashckpt.save.agent_connection import AgentConnection

logger = logging.getLogger(__name__)

#: Bytes reserved for the descriptions of later saves, which may be slightly longer.
_META_RESERVE = 64 * 1024
#: Bytes reserved for a save's description (Megatron's arguments etc.) before the first save.
FIRST_META = 8 * _META_RESERVE


def slab_nbytes(slots: int, data_nbytes: int, plan_nbytes: int) -> int:
    """Return the size of the slab that `NodeLink.prepare` reserves for saves of these sizes."""
    meta_nbytes = plan_nbytes + FIRST_META + _META_RESERVE
    return SlabGeometry(slots, align(meta_nbytes), align(data_nbytes)).nbytes


def new_slab(
    connection: AgentConnection,
    config: Config,
    rank: int,
    device: int | None,
    data_nbytes: int,
    meta_nbytes: int,
) -> Slab:
    """Create a slab for saves of these sizes, and map all of its pages.

    Args:
        device: CUDA device that the memory should be near; None: near the calling thread.

    Raises:
        StorageError: the node lacks the memory; says how much the agent holds, and for which ranks.
    """
    unlock_closed()
    started = time.monotonic()
    try:
        slab = Slab.create(
            config.slots,
            meta_nbytes + _META_RESERVE,
            data_nbytes,
            str(rank),
            huge_pages=config.huge_pages,
            numa_node=None if device is None else node_of_gpu(device),
            held_share=config.held_share,
        )
    except StorageError as error:
        held = connection.held_memory(0.0) if error.errno == errno.ENOMEM else ""
        raise StorageError(error.errno, "; ".join(filter(None, (error.strerror, held)))) from error
    try:
        map_pages(slab, config, rank, started)
    except BaseException:  # an interrupt: the descriptor would keep the memory
        slab.close()
        raise
    return slab


def map_pages(slab: Slab, config: Config, rank: int, started: float) -> None:
    """Map all pages of a slab into this process, and log its size and the size of its pages.

    Args:
        started: `time.monotonic()` when the slab was begun.
    """
    slab.populate(huge_pages=config.huge_pages)
    gib = 2**30
    logger.debug(
        "rank %d: %.2f GiB of checkpoint slots, of which %.2f GiB are in pages of 2 MiB, were made "
        "ready in %.2f s",
        *(rank, slab.geometry.nbytes / gib, slab.huge_nbytes / gib, time.monotonic() - started),
    )


def node_of_gpu(device: int, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node of CUDA device `device`; None if the node is unknown.

    Copies into memory of another node are about a third slower. The kernel reports -1 on machines
    with one node. Old releases of torch lack the PCI address.
    """
    try:
        properties = torch.cuda.get_device_properties(device)
        domain, bus = properties.pci_domain_id, properties.pci_bus_id  # type: ignore[attr-defined]
        number = properties.pci_device_id  # type: ignore[attr-defined]
        address = f"{domain:04x}:{bus:02x}:{number:02x}.0"
        node = int((devices / address / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None
