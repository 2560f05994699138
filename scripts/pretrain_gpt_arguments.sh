# shellcheck shell=bash disable=SC2034
# Arguments of the pretrain_gpt_* scripts, which source this file. A variable overrides each default:
# NUM_LAYERS=24 scripts/pretrain_gpt_single_node.sh
#
# The defaults are the experiment of DLRover's blog on flash checkpoints of Megatron-LM: GPT-1.5B on
# two nodes of 8 GPUs, TP8, distributed optimizer, a save every 50 iterations. As in the blog, --bf16 is
# missing; PRECISION=bf16 adds it.
#
# Sets the arrays TRAIN (what torchrun runs) and GPT_ARGUMENTS. With --help as the first argument it prints the
# header of the script that sources it, and ends.

if [[ "${1:-}" == --help || "${1:-}" == -h ]]; then
  sed -n '2,${/^#SBATCH/q;/^#/!q;s/^# \{0,1\}//p}' "$0"
  exit
fi

# A directory that all nodes see. --load names it as well: only then can a restart use host memory.
: "${CHECKPOINT_PATH:?set CHECKPOINT_PATH to the directory for checkpoints}"

# The launcher runs an unedited script. With a checkout that is patched (patches/) or whose imports are
# swapped, leave the launcher out: TRAIN=("$TRAIN_SCRIPT")
TRAIN_SCRIPT=${TRAIN_SCRIPT:-${MEGATRON_LM:?set MEGATRON_LM to your Megatron-LM checkout}/pretrain_gpt.py}
if [ ! -f "$TRAIN_SCRIPT" ]; then
  echo "$TRAIN_SCRIPT: no such file on ${HOSTNAME:-this node}: set MEGATRON_LM to your Megatron-LM checkout" >&2
  exit 1
fi
TRAIN=(-m megatron_flashckpt.launch "$TRAIN_SCRIPT")

GPUS_PER_NODE=${GPUS_PER_NODE:-8}
# If a rank dies, torchrun starts all ranks again, and they resume from memory.
MAX_RESTARTS=${MAX_RESTARTS:-3}

export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Without this variable torch 2.13 gives restarted ranks a store with the gloo addresses of dead ranks.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=${TORCH_DISABLE_SHARE_RDZV_TCP_STORE:-1}
# Settings of megatron_flashckpt, if any: FLASHCKPT_CONFIG=configs/memory_every_10.yaml

MODEL_ARGUMENTS=(
  --num-layers "${NUM_LAYERS:-48}"
  --hidden-size "${HIDDEN_SIZE:-1600}"
  --num-attention-heads "${NUM_ATTENTION_HEADS:-16}"
  --seq-length "${SEQ_LENGTH:-1024}"
  --max-position-embeddings "${SEQ_LENGTH:-1024}"
)
PARALLEL_ARGUMENTS=(
  --tensor-model-parallel-size "${TENSOR_PARALLEL:-8}"
  --pipeline-model-parallel-size "${PIPELINE_PARALLEL:-1}"
  --use-distributed-optimizer
)
TRAINING_ARGUMENTS=(
  --micro-batch-size "${MICRO_BATCH_SIZE:-4}"
  --global-batch-size "${GLOBAL_BATCH_SIZE:-8}"
  --train-iters "${TRAIN_ITERS:-5000}"
  --lr 0.00015
  --min-lr 1.0e-5
  --lr-decay-style cosine
  --lr-decay-iters 320000
  --lr-warmup-fraction .01
  --weight-decay 1e-2
  --clip-grad 1.0
)
if [ -n "${PRECISION:-}" ]; then
  TRAINING_ARGUMENTS+=("--$PRECISION")
fi
# Without DATA_PATH the job trains on mock tokens, as a test of the setup.
if [ -n "${DATA_PATH:-}" ]; then
  DATA_ARGUMENTS=(
    --data-path "$DATA_PATH"
    --tokenizer-type GPT2BPETokenizer
    --vocab-file "${VOCAB_FILE:?set VOCAB_FILE to gpt2-vocab.json}"
    --merge-file "${MERGE_FILE:?set MERGE_FILE to gpt2-merges.txt}"
    --split "900,50,50"
  )
else
  DATA_ARGUMENTS=(
    --mock-data
    --tokenizer-type NullTokenizer
    --vocab-size "${VOCAB_SIZE:-50257}"
    --split "900,50,50"
  )
fi
CHECKPOINT_ARGUMENTS=(
  --save "$CHECKPOINT_PATH"
  --load "$CHECKPOINT_PATH"
  --save-interval "${SAVE_INTERVAL:-50}"
)
LOGGING_ARGUMENTS=(
  --log-interval "${LOG_INTERVAL:-10}"
  --eval-interval 1000
  --eval-iters "${EVAL_ITERS:-10}"
)
GPT_ARGUMENTS=(
  "${MODEL_ARGUMENTS[@]}" "${PARALLEL_ARGUMENTS[@]}" "${TRAINING_ARGUMENTS[@]}"
  "${DATA_ARGUMENTS[@]}" "${CHECKPOINT_ARGUMENTS[@]}" "${LOGGING_ARGUMENTS[@]}"
)
