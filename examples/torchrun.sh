#!/usr/bin/env bash
# One node: torchrun starts the processes, and the settings define how they divide the work.
#
#   examples/torchrun.sh                                           two processes divide the tokens of each sequence
#   PROCESSES=8 examples/torchrun.sh strategy.context_parallel_size=4 strategy.zero_stage=3
#
# Arguments are settings of python -m lightning_memo.train; if a name occurs twice, the last value counts.
set -euo pipefail

PROCESSES=${PROCESSES:-2}

# --standalone finds a free port, so that several runs fit on one machine.
torchrun --standalone --nproc_per_node "$PROCESSES" -m lightning_memo.train \
    name=torchrun \
    trainer.devices="$PROCESSES" \
    strategy.context_parallel_size=2 \
    "$@"
