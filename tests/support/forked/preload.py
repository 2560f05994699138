"""What every rank needs, imported once: ranks are forked from the process that has done so.

Nothing of megatron_flashckpt, which reads its settings, and the fault that is set, when imported.
"""

# ruff: noqa: E402, F401
import cpu_cuda

cpu_cuda.install()

import megatron.training.checkpointing
import megatron.training.initialize
import megatron.training.training
import msgspec
import numpy
import psutil
import safetensors.torch
import torch
import xxhash
import yaml

import scripts.pretrain_gpt_tiny
