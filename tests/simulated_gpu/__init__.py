"""A simulated node of GPUs, for machines that have none. Start reading at `node.py`.

It follows what CUDA and torch document, and `test_conformance.py` pins every rule: devices and
streams are current per thread, streams run their work later, copies read their source when they
run, freed memory goes to the next tensor. Where hardware may behave in several ways the
simulation takes the one that hurts most, and the class that does so says it.
"""

from tests.simulated_gpu.installed import simulated_gpus
from tests.simulated_gpu.node import Node
from tests.simulated_gpu.tensor import DeviceTensor

__all__ = ["DeviceTensor", "Node", "simulated_gpus"]
