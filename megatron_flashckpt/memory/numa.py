"""Finds the NUMA node of a GPU. Copies into memory of another node are about a third slower."""

from __future__ import annotations

from pathlib import Path

import torch


def node_of_gpu(device: int, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node of CUDA device `device`; None if the node is unknown.

    The kernel reports -1 on machines with one node. Old releases of torch lack the PCI address.
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
