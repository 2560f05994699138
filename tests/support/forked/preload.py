"""Imports that every rank needs, made once in the process from which ranks are forked.

megatron_flashckpt is left out, because it reads its settings and its failpoint on import.
"""

# ruff: noqa: E402, F401
import inspect
import sys

import cpu_cuda

cpu_cuda.install()

import megatron.core.tokenizers.text.models  # imports transformers, if that is installed
import megatron.training.checkpointing
import megatron.training.initialize
import megatron.training.training
import msgspec
import numpy.ma
import psutil
import safetensors.torch
import torch
import xxhash
import yaml

import scripts.pretrain_gpt_tiny
from tests.support import cheap_stock

cheap_stock.keep_help()
cheap_stock.fork_queues()
# Python looks for the file of every module once; Megatron's loop asks for it.
inspect.getmodule(sys._getframe())
