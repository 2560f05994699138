#!/usr/bin/env bash
# Trains a GPT on several nodes, with checkpoints through megatron_flashckpt. Run it on every node:
#
#   MASTER_ADDR=node-0 MEGATRON_LM=/path/to/Megatron-LM CHECKPOINT_PATH=/shared/path \
#     scripts/pretrain_gpt_multi_node.sh [ARGS]
#
# MASTER_ADDR is any one of the nodes. The nodes meet there (torchrun's c10d rendezvous) and give
# themselves their numbers. A rank that dies has the ranks of all nodes started again, and each node's
# agent gives its ranks their memory back. A node that comes back late is waited for.
#
# What is trained: pretrain_gpt_arguments.sh. ARGS go to Megatron and win over what is there.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pretrain_gpt_arguments.sh
source "$(dirname "${BASH_SOURCE[0]}")/pretrain_gpt_arguments.sh"

: "${MASTER_ADDR:?set MASTER_ADDR to the name of one of the nodes, the same on all}"
exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "$GPUS_PER_NODE" \
  --max-restarts "$MAX_RESTARTS" --rdzv-id "${JOB_ID:-pretrain-gpt}" --rdzv-backend c10d \
  --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29400}" \
  "${TRAIN[@]}" "${GPT_ARGUMENTS[@]}" "$@"
