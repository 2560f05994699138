"""Simulated node of GPUs, for machines without a GPU. Start reading at `node.py`.

The simulation follows the documents of CUDA and torch; `test_conformance.py` pins the rules that
a kinder simulation would break unnoticed.
Devices and streams are current per thread, streams run their work later, copies read their source
when they run, and freed memory goes to the next tensor. If hardware may behave in several ways, the
simulation takes the worst one, and the class that does so documents that.
"""

from tests.simulated_gpu.installed import simulated_gpus
from tests.simulated_gpu.node import Node
from tests.simulated_gpu.tensor import DeviceTensor

__all__ = ["DeviceTensor", "Node", "simulated_gpus"]
