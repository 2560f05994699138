"""A small GPT, trained by Megatron-Bridge's own `pretrain`; prints the exact state of every step.

    python bridge_gpt.py SAVE [SECTION.FIELD=VALUE ...]

Values are Python literals. With `refusals` for SAVE it prints why each change alone is refused.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import sys
from typing import Any

import torch

from tests.support import bridge

bridge.enter()

from megatron.bridge.data.base import DatasetBuildContext, DatasetProvider  # noqa: E402
from megatron.bridge.models.gpt_provider import GPTModelProvider  # noqa: E402
from megatron.bridge.training import config as settings  # noqa: E402
from megatron.bridge.training.callbacks import Callback, CallbackContext  # noqa: E402
from megatron.bridge.training.pretrain import pretrain  # noqa: E402
from megatron.bridge.training.tokenizers.config import TokenizerConfig  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402

from megatron_flashckpt.integrations.bridge import unsupported  # noqa: E402

TOKENS, WORDS = 16, 128


class Text(torch.utils.data.Dataset[Any]):
    """Sequences of random tokens, each made from its number."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, sample: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int(sample))
        return torch.randint(WORDS, (TOKENS + 1,), generator=generator)


@dataclasses.dataclass(kw_only=True)
class RandomText(DatasetProvider):  # type: ignore[misc]
    seq_length: int = TOKENS

    def build_datasets(self, context: DatasetBuildContext) -> tuple[Any, None, None]:
        return Text(context.train_samples), None, None


class Report(Callback):  # type: ignore[misc]
    def on_train_step_start(self, context: CallbackContext) -> None:
        print(f"before {context.state.train_state}", flush=True)

    def on_train_step_end(self, context: CallbackContext) -> None:
        loss = context.loss_dict["loss"].item()
        weights = hashlib.sha256()
        for weight in context.model[0].parameters():
            weights.update(weight.detach().contiguous().view(torch.uint8).numpy())
        print(f"after loss {loss.hex()} weights {weights.hexdigest()}", flush=True)

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        print("on_checkpoint_save", flush=True)


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    text = next(data_iterator)
    positions = torch.arange(TOKENS)[None]
    loss = model(text[:, :-1], positions, None, labels=text[:, 1:]).float().mean()
    return loss, lambda output: (output, {"loss": output.detach()})


def config(save: str) -> settings.ConfigContainer:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    return settings.ConfigContainer(
        model=GPTModelProvider(
            **sizes,
            seq_length=TOKENS,
            vocab_size=WORDS,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            gradient_accumulation_fusion=False,
        ),
        train=settings.TrainingConfig(micro_batch_size=1, global_batch_size=4, train_iters=12),
        validation=settings.ValidationConfig(eval_interval=None, eval_iters=0),
        optimizer=settings.OptimizerConfig(
            optimizer="adam", lr=1e-2, min_lr=1e-3, bf16=True, use_distributed_optimizer=True
        ),
        scheduler=settings.SchedulerConfig(
            lr_decay_iters=12, lr_warmup_iters=2, start_weight_decay=0.01, end_weight_decay=0.01
        ),
        ddp=settings.DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True
        ),
        dataset=RandomText(dataloader_type="single", num_workers=0),
        logger=settings.LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=WORDS - 1),
        checkpoint=settings.CheckpointConfig(
            save=save,
            load=save,
            save_interval=4,
            custom_manager_class="megatron_flashckpt.integrations.bridge.FlashCheckpointManager",
        ),
    )


def change(cfg: settings.ConfigContainer, setting: str) -> None:
    path, _, value = setting.partition("=")
    *sections, field = path.split(".")
    owner = functools.reduce(getattr, sections, cfg)
    setattr(owner, field, ast.literal_eval(value))


def main() -> None:
    save, *changes = sys.argv[1:]
    if save == "refusals":
        for setting in changes:
            cfg = config("/save")
            change(cfg, setting)
            print(f"refused {setting}: {'; '.join(unsupported(cfg))}")
        return
    cfg = config(save)
    for setting in changes:
        change(cfg, setting)
    pretrain(cfg, forward_step, callbacks=[Report()])


main()
