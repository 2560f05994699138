#!/usr/bin/env bash
# Trains a GPT on several nodes, with checkpoints through megatron_flashckpt. Run it on every node:
#
#   MASTER_ADDR=node-0 MEGATRON_LM=/path/to/Megatron-LM CHECKPOINT_PATH=/shared/path \
#     scripts/pretrain_gpt_multi_node.sh [ARGS]
#
# MASTER_ADDR is any one of the nodes. torchrun's c10d rendezvous runs there and numbers the nodes. If a
# rank dies, torchrun restarts the ranks of all nodes, and they resume from the memory of their node's
# agent. The rendezvous waits for a node that comes back late.
#
# CHECKPOINT_PATH is a directory that all nodes see. pretrain_gpt_arguments.sh sets the model and its arguments from
# variables such as NODES and GPUS_PER_NODE. ARGS go to Megatron and override them. --help prints this text.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pretrain_gpt_arguments.sh
source "$(dirname "${BASH_SOURCE[0]}")/pretrain_gpt_arguments.sh"

: "${MASTER_ADDR:?set MASTER_ADDR to the name of one of the nodes, the same on all}"
exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "$GPUS_PER_NODE" \
  --max-restarts "$MAX_RESTARTS" --rdzv-id "${JOB_ID:-pretrain-gpt}" --rdzv-backend c10d \
  --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29400}" \
  "${TRAIN[@]}" "${GPT_ARGUMENTS[@]}" "$@"
