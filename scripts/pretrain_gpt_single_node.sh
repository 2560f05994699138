#!/usr/bin/env bash
# Trains a GPT on the GPUs of one node, with checkpoints through megatron_flashckpt.
#
#   MEGATRON_LM=/path/to/Megatron-LM CHECKPOINT_PATH=/path scripts/pretrain_gpt_single_node.sh [ARGS]
#
# CHECKPOINT_PATH is the directory for checkpoints. pretrain_gpt_arguments.sh sets the model and its arguments from
# variables such as GPUS_PER_NODE and NUM_LAYERS. ARGS go to Megatron and override them. --help prints this text.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=pretrain_gpt_arguments.sh
source "$(dirname "${BASH_SOURCE[0]}")/pretrain_gpt_arguments.sh"

exec torchrun --standalone --nproc-per-node "$GPUS_PER_NODE" --max-restarts "$MAX_RESTARTS" \
  "${TRAIN[@]}" "${GPT_ARGUMENTS[@]}" "$@"
