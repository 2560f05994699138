"""One Megatron job that saves, or loads, one small model of each kind that Megatron has.

Run by `tests/integration/test_megatron_models.py` and `tests/convert/test_kinds_of_models.py`.
`CASES` is a JSON list of kinds, see `KINDS`. `MODE` is `save`, `load`, `stock`, `converted` or
`own loop`. As in `generated_models.py`, Megatron's own classes wrap and step each model, and
gradients are set, not computed: so kinds whose kernels need a GPU run, too.

A saving job saves each kind to `ROOT/LAYOUT/save`. A loading job loads the save of each layout in
`SAVED_BY` into a new model, and saves it unchanged to `ROOT/LAYOUT/from-SAVED_BY`.

With `stock`, Megatron's own functions save each kind in `torch_dist` to `ROOT/LAYOUT/stock`. With
`converted`, they load `ROOT/LAYOUT/to-torch_dist`, and ours `ROOT/LAYOUT/to-flashckpt`. With `own
loop`, functions that were imported by name from Megatron are ours after `install()`.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class GatedNorm(torch.nn.Module):
    """Has the parameter of the norm of mamba_ssm."""

    def __init__(self, hidden_size: int, *, device: Any, dtype: Any, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))


def be_mamba_ssm() -> None:
    """Let Megatron import what Mamba layers need to be made; their kernels need a GPU."""
    contents = {
        "mamba_ssm": {"__version__": "2.2.0"},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_chunk_scan_combined": None,
            "mamba_split_conv1d_scan_combined": None,
        },
    }
    for name, members in contents.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        sys.modules[name] = module


be_mamba_ssm()

import generated_models as generated  # noqa: E402
from megatron.core import mpu  # noqa: E402
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add  # noqa: E402
from megatron.core.fusions.fused_layer_norm import FusedLayerNorm  # noqa: E402
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec  # noqa: E402
from megatron.core.models.bert.bert_model import BertModel  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.models.mamba import MambaModel  # noqa: E402
from megatron.core.models.multimodal.llava_model import LLaVAModel  # noqa: E402
from megatron.core.models.T5 import T5Model  # noqa: E402
from megatron.core.models.T5.t5_spec import (  # noqa: E402
    get_t5_decoder_with_local_block_spec,
    get_t5_encoder_with_local_block_spec,
)
from megatron.core.models.vision.vit_layer_specs import (  # noqa: E402
    get_vit_layer_with_local_spec,
)
from megatron.core.ssm import mamba_block  # noqa: E402
from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules  # noqa: E402
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules  # noqa: E402
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    ColumnParallelLinear,
    RowParallelLinear,
)
from megatron.core.transformer import MLATransformerConfig, TransformerConfig  # noqa: E402
from megatron.core.transformer.dot_product_attention import (  # noqa: E402
    DotProductAttention,
)
from megatron.core.transformer.mlp import MLPSubmodules  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron.training import async_utils, get_args  # noqa: E402
from megatron.training import checkpointing as stock  # noqa: E402

from megatron_flashckpt import launch  # noqa: E402
from megatron_flashckpt.checkpointing import load_checkpoint, save_checkpoint  # noqa: E402
from megatron_flashckpt.megatron_lm.megatron_job import job_of  # noqa: E402
from megatron_flashckpt.save.session import session  # noqa: E402
from scripts import pretrain_gpt_tiny as tiny  # noqa: E402

ROOT, LAYOUT = generated.ROOT, generated.LAYOUT
WORDS = 256


def settings(**more: Any) -> dict[str, Any]:
    args = get_args()
    return {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        **more,
    }


def gpt(config: TransformerConfig, spec: Any) -> GPTModel:
    return GPTModel(config, spec, WORDS, 16, position_embedding_type="rope")


def bert() -> BertModel:
    config = TransformerConfig(**settings())
    return BertModel(
        config,
        *(2, bert_layer_local_spec, WORDS, 16),
        share_embeddings_and_output_weights=True,
    )


def t5() -> T5Model:
    config = TransformerConfig(**settings())
    return T5Model(
        *(config, config),
        get_t5_encoder_with_local_block_spec(2),
        get_t5_decoder_with_local_block_spec(2),
        *(WORDS, 16),
        share_embeddings_and_output_weights=True,
    )


class CoreAttention(DotProductAttention):
    """Local attention, made as latent attention makes that of TransformerEngine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kept = {name: value for name, value in kwargs.items() if not name.endswith("_channels")}
        super().__init__(*args, **kept)


def mla() -> GPTModel:
    more: dict[str, Any] = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 16}
    more |= {"qk_pos_emb_head_dim": 8, "v_head_dim": 16, "rope_type": "rope"}
    config = MLATransformerConfig(**settings(normalization="LayerNorm", **more))
    spec = get_gpt_layer_local_spec(None, False, True, True)
    spec.submodules.self_attention.submodules.core_attention = CoreAttention
    return gpt(config, spec)


def experts() -> GPTModel:
    config = TransformerConfig(
        **settings(
            num_moe_experts=4,
            expert_model_parallel_size=get_args().expert_model_parallel_size,
            moe_router_topk=2,
            moe_ffn_hidden_size=64,
            moe_shared_expert_intermediate_size=64,
            moe_layer_freq=[0, 1],
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_token_dispatcher_type="alltoall",
            moe_router_load_balancing_type="global_aux_loss",
            moe_aux_loss_coeff=0.01,
            expert_tensor_parallel_size=1,
            add_bias_linear=False,
            gated_linear_unit=True,
            sequence_parallel=get_args().tensor_model_parallel_size > 1,
            activation_func=torch.nn.functional.silu,
            softmax_type="learnable",
            qk_layernorm=True,
            num_query_groups=2,
        )
    )
    return gpt(config, get_gpt_decoder_block_spec(config, use_transformer_engine=False))


def mamba() -> MambaModel:
    mamba_block.TENorm = FusedLayerNorm
    config = TransformerConfig(
        **settings(num_layers=3, mamba_num_heads=4, mamba_head_dim=16, mamba_num_groups=2)
    )
    attention = get_gpt_layer_local_spec()
    attention.submodules.mlp = attention.submodules.pre_mlp_layernorm = None
    layers = MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                mixer=ModuleSpec(
                    module=MambaMixer,
                    submodules=MambaMixerSubmodules(
                        in_proj=ColumnParallelLinear, out_proj=RowParallelLinear
                    ),
                ),
                mamba_bda=get_bias_dropout_add,
            ),
        ),
        attention_layer=get_gpt_layer_local_spec(),
        mlp_layer=get_gpt_layer_local_spec(),
    )
    return MambaModel(
        config,
        ModuleSpec(module=MambaStack, submodules=layers),
        *(WORDS, 16),
        hybrid_layer_pattern="M*M",
        share_embeddings_and_output_weights=True,
    )


def llava() -> LLaVAModel:
    """Return a model whose vision tower is frozen, as with --freeze-ViT."""
    language = TransformerConfig(**settings())
    vision = TransformerConfig(**settings())
    projection = TransformerConfig(**settings(ffn_hidden_size=32))
    language.language_model_type, vision.vision_model_type = "", "radio"
    model = LLaVAModel(
        language_transformer_config=language,
        language_transformer_layer_spec=get_gpt_layer_local_spec(),
        language_vocab_size=WORDS,
        language_max_sequence_length=16,
        vision_transformer_config=vision,
        vision_transformer_layer_spec=get_vit_layer_with_local_spec(),
        drop_vision_class_token=False,
        vision_projection_config=projection,
        vision_projection_layer_spec=MLPSubmodules(ColumnParallelLinear, RowParallelLinear),
        img_h=28,
        img_w=28,
    )
    model.freeze(
        freeze_language_model=False, freeze_vision_model=True, freeze_vision_projection=False
    )
    return model


KINDS: dict[str, Callable[[], Any]] = {
    "bert": bert,
    "t5": t5,
    "mla": mla,
    "experts": experts,
    "mamba": mamba,
    "llava": llava,
}


class Job(generated.Job):
    """A model of one of the kinds, whose parameters differ between ranks that share a tensor."""

    def make_model(self, config: Any, seed: Any) -> Any:
        model = KINDS[self.case["kind"]]()
        # Megatron's wrapper for 16-bit models does the same.
        model = model.bfloat16()
        for module in model.modules():
            if hasattr(module, "_maintain_float32_expert_bias"):
                module._maintain_float32_expert_bias()
        with torch.no_grad():
            for name, tensor in self.tensors_of(model):
                names = (seed, *self.place(name, tensor), name)
                tensor.copy_(generated.values(list(tensor.shape), tensor.dtype, *names))
        return model

    @staticmethod
    def tensors_of(model: Any) -> list[tuple[str, torch.Tensor]]:
        kept = model.state_dict(keep_vars=True)
        return [(name, value) for name, value in kept.items() if isinstance(value, torch.Tensor)]

    @staticmethod
    def place(name: str, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the ranks among those whose parts of a tensor differ."""
        is_expert = ".local_experts." in name
        tensor_rank = mpu.get_tensor_model_parallel_rank()
        if is_expert:
            tensor_rank = mpu.get_expert_tensor_parallel_rank()
        is_shared = not getattr(tensor, "tensor_model_parallel", False)
        return (
            0 if is_shared else tensor_rank,
            mpu.get_expert_model_parallel_rank() if is_expert else 0,
        )

    def step(self, number: int) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                names = ("gradient", number, *self.place(name, parameter), name)
                gradient = generated.values(list(parameter.shape), torch.float32, *names)
                parameter.main_grad.copy_(gradient)
        self.optimizer.step()
        self.scheduler.step(increment=8)


def saved(job: Job, number: int) -> list[str]:
    """Save; return the errors."""
    save_checkpoint(number, job.chunks, job.optimizer, job.scheduler, 0)
    outcomes = session.checkpointer(get_args().save).wait()
    torch.distributed.barrier()
    return [outcome.error for outcome in outcomes if outcome.error]


def save(case: dict[str, Any]) -> None:
    get_args().save = str(ROOT / LAYOUT / "save")
    job = Job(case, "saved")
    session.startup(get_args().save).prepare(job_of(get_args(), job.chunks, job.optimizer))
    for step in range(2):
        job.step(step)
    torch.save(job.held(), ROOT / LAYOUT / f"held-{case['number']}-{generated.RANK}")
    generated.trace(event="saved", case=case["kind"], wrong=saved(job, case["number"]))


def load(case: dict[str, Any], saved_by: str) -> None:
    """Load into a model with other contents, which a save of the new model then shows."""
    args, number = get_args(), case["number"]
    args.save = str(ROOT / LAYOUT / f"from-{saved_by}")
    args.load, args.ckpt_step = str(ROOT / saved_by / "save"), number
    job = Job(case, "fresh")
    load_checkpoint(job.chunks, job.optimizer, job.scheduler)
    wrong = []
    if saved_by == LAYOUT:
        files = sorted((ROOT / saved_by).glob(f"held-{number}-*"))
        own = [torch.load(file, weights_only=False) for file in files][generated.RANK]
        wrong = list(generated.differing(job.held(), [own]))
    wrong += saved(job, number)
    generated.trace(event=f"from {saved_by}", case=case["kind"], wrong=wrong)


def save_by_stock(case: dict[str, Any]) -> None:
    """Save the same state as `save`, with Megatron's own function."""
    use_stock_format()
    get_args().save = str(ROOT / LAYOUT / "stock")
    job = Job(case, "saved")
    for step in range(2):
        job.step(step)
    stock.save_checkpoint(case["number"], job.chunks, job.optimizer, job.scheduler, 0)
    generated.trace(event="saved by stock", case=case["kind"], wrong=[])


def load_converted(case: dict[str, Any]) -> None:
    """Load the conversions of stock's checkpoint and of ours; trace what differs from the saves."""
    use_stock_format()
    functions = {"flashckpt": load_checkpoint, "torch_dist": stock.load_checkpoint}
    for to, function in functions.items():
        args, number = get_args(), case["number"]
        args.save, args.load, args.ckpt_step = None, str(ROOT / LAYOUT / f"to-{to}"), number
        job = Job(case, "fresh")
        saved_state = ROOT / LAYOUT / f"held-{number}-{generated.RANK}"
        try:
            function(job.chunks, job.optimizer, job.scheduler)
            own = [torch.load(saved_state, weights_only=False)]
            wrong = list(generated.differing(job.held(), own))
        except (Exception, SystemExit) as error:
            wrong = [repr(error)]
        generated.trace(event=f"from {to}", case=case["kind"], wrong=wrong)
        session.close(leave=True)


def use_stock_format() -> None:
    args = get_args()
    args.ckpt_format, args.dist_ckpt_optim_fully_reshardable = "torch_dist", True


def own_loop(case: dict[str, Any]) -> None:
    """Train in a loop of this program, which imported Megatron's functions by name."""
    program: Any = types.ModuleType("program")
    program.save_checkpoint, program.load_checkpoint = stock.save_checkpoint, stock.load_checkpoint
    program.maybe_finalize_async_save = async_utils.maybe_finalize_async_save
    sys.modules["program"] = program
    launch.install()
    get_args().save = get_args().load = str(ROOT / LAYOUT / "own")
    job = Job(case, "saved")
    wrong = []
    for iteration in (1, 2):
        job.step(iteration)
        program.save_checkpoint(iteration, job.chunks, job.optimizer, job.scheduler, 0)
        program.maybe_finalize_async_save()
    program.maybe_finalize_async_save(blocking=True, terminate=True)
    fresh = Job(case, "fresh")
    if program.load_checkpoint(fresh.chunks, fresh.optimizer, fresh.scheduler) != (2, 0):
        wrong.append("another iteration")
    wrong += generated.differing(fresh.held(), [job.held()])
    generated.trace(event="own loop", case=case["kind"], wrong=wrong)


MODES: dict[str, Callable[[dict[str, Any]], None]] = {
    "save": save,
    "stock": save_by_stock,
    "converted": load_converted,
    "own loop": own_loop,
}


def main() -> None:
    tiny.initialize()
    (ROOT / LAYOUT).mkdir(exist_ok=True)
    for case in json.loads(Path(os.environ["CASES"]).read_text()):
        if os.environ["MODE"] == "load":
            for saved_by in os.environ["SAVED_BY"].split():
                load(case, saved_by)
                session.close(leave=True)
        else:
            MODES[os.environ["MODE"]](case)
        session.close(leave=True)


if __name__ == "__main__":
    main()
