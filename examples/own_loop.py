"""Train a small GPT on megatron-core alone, with checkpoints, in a loop of its own.

    torchrun --nproc-per-node 2 examples/own_loop.py DIRECTORY

Kill it at any time and start it again, with another number of ranks, too: it resumes from the
newest checkpoint, and its losses stay the same bit for bit. It needs a GPU per rank.
"""

import os
import sys

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_flashckpt import Checkpointer

LAST, INTERVAL, SAMPLES, TOKENS, WORDS = 12, 4, 4, 16, 128

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(1)
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
config = TransformerConfig(
    **sizes, bf16=True, params_dtype=torch.bfloat16, hidden_dropout=0.0, attention_dropout=0.0
)
gpt = GPTModel(config, get_gpt_layer_local_spec(), WORDS, TOKENS).cuda()
sharded = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
model = DistributedDataParallel(config, sharded, Float16Module(config, gpt))
optimizer = get_megatron_optimizer(
    OptimizerConfig(bf16=True, lr=1e-2, min_lr=1e-3, use_distributed_optimizer=True, clip_grad=0.0),
    [model],
)
scheduler = OptimizerParamScheduler(
    optimizer, 0.0, 1e-2, 1e-3, 2, LAST, "cosine", 0.0, 0.0, 1, "constant"
)


def train(iteration: int) -> float:
    """Train one step on this rank's share of `SAMPLES` sequences; return the loss of all ranks."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = torch.zeros(SAMPLES, device="cuda")
    for sample in range(rank, SAMPLES, ranks):
        generator = torch.Generator().manual_seed(iteration * SAMPLES + sample)
        text = torch.randint(WORDS, (1, TOKENS + 1), generator=generator).cuda()
        positions = torch.arange(TOKENS, device="cuda")[None]
        loss = model(text[:, :-1], positions, None, labels=text[:, 1:]).float().mean()
        (loss * ranks / SAMPLES).backward()
        losses[sample] = loss.detach()
    finalize_model_grads([model])
    optimizer.step()
    scheduler.step(1)
    torch.distributed.all_reduce(losses)
    return losses.mean().item()


with Checkpointer(sys.argv[1], [model], optimizer, scheduler) as checkpointer:
    resumed = checkpointer.load()
    tokens = resumed.side["tokens"] if resumed else 0
    for iteration in range(resumed.iteration + 1 if resumed else 1, LAST + 1):
        loss = train(iteration)
        tokens += SAMPLES * TOKENS
        if checkpointer.save_requested(iteration) or iteration % INTERVAL == 0:
            checkpointer.save(iteration, {"tokens": tokens})
        checkpointer.poll()
        if rank == 0:
            print(f"iteration {iteration} loss {loss.hex()} tokens {tokens}", flush=True)
