"""Imports that every rank needs, made once in the process from which ranks are forked.

Modules that read the settings on import are left out; see `nursery.settle_in` for the failpoint.
"""

# ruff: noqa: E402, F401
import gc
import inspect
import sys
import weakref

import cpu_cuda

cpu_cuda.install()

import megatron.core.tokenizers.text.models
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

import megatron_flashckpt.load.resume
import megatron_flashckpt.megatron_lm.announcements
import megatron_flashckpt.save.open_checkpointer
import scripts.pretrain_gpt_tiny
from tests.support import cheap_stock

cheap_stock.keep_help()
cheap_stock.fork_queues()
# Python looks for the file of every module once; Megatron's loop asks for it.
inspect.getmodule(sys._getframe())
# A rank ends without taking down the libraries of operators, which takes a tenth of its time.
for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
    finalizer.atexit = False
# Collections in the ranks leave out what is imported, so that its pages stay shared.
gc.collect()
gc.freeze()
