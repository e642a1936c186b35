#!/usr/bin/env bash
# Simulates two hosts on this machine: two torchrun agents with different addresses train together on CPUs. One process
# then trains on the same batches, and the losses are compared. They are equal up to rounding.
#
#   examples/two_hosts.sh
#
# On real hosts, run the command in agent() once on each host: with --node_rank 0 on the host whose address is
# --master_addr, and with --node_rank 1 on the other. Arguments are settings of python -m lightning_memo.train.
set -euo pipefail

PORT=${PORT:-29411}
SETTINGS=(
    experiment=demo_parallel trainer.max_steps=5 trainer.val_check_interval=5
    data.seq_len=128 data.max_bytes=200000 data.val_fraction=0.2 "$@"
)

agent() { # arguments: number and address of the host
    torchrun --nnodes 2 --node_rank "$1" --nproc_per_node 1 --local_addr "$2" \
        --master_addr 127.0.0.1 --master_port "$PORT" -m lightning_memo.train "${SETTINGS[@]}" \
        trainer.num_nodes=2 trainer.devices=1 name=two_hosts strategy.context_parallel_size=1 data.batch_size=1
}

export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
agent 1 127.0.0.2 &
other=$!
trap 'kill "$other" 2>/dev/null || true' EXIT
agent 0 127.0.0.1
wait "$other"

# Two data-parallel processes with one sequence each train on the same batches as one process with two sequences.
python -m lightning_memo.train "${SETTINGS[@]}" \
    trainer.num_nodes=1 trainer.devices=1 name=one_process strategy.context_parallel_size=1 data.batch_size=2

python - <<'PYTHON'
import json
import math
from pathlib import Path

losses = {}
for name in ("two_hosts", "one_process"):
    newest = max(Path("outputs", name, "runs").glob("*/summary.json"), key=lambda path: path.stat().st_mtime)
    losses[name] = json.loads(newest.read_text())["train_loss"]
print("train loss:", ", ".join(f"{name} {loss:.6f}" for name, loss in losses.items()))
if not math.isclose(*losses.values(), rel_tol=1e-5):
    raise SystemExit("error: the losses differ")
PYTHON
