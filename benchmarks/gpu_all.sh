#!/usr/bin/env bash
# Everything that is to be shown on a GPU, the most important first.
#
#     bash benchmarks/gpu_all.sh [SECONDS [FOLDER]]
#
# It ends by itself after SECONDS (default: when all is done). What is done is not done again: the same command goes on.
# Results go to FOLDER (default: benchmarks/results), beside them in FOLDER/stages the outputs of each stage.
# PYTHON is the interpreter; peers (deepspeed, trl, peft) and kernels (liger-kernel, flash-attn) are used where it
# finds them.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
seconds=${1:-86400}
results=${2:-benchmarks/results}
stages=$results/stages
mkdir -p "$stages"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "$python: PyTorch finds no GPU; python benchmarks/gpu.py --plan smoke tries things out without one" >&2
    exit 2
fi

# stage NAME MOST_SECONDS COMMAND...: run it, unless it has ended well before, or taken too long.
stage() {
    local name=$1 left=$((seconds - SECONDS)) status
    local limit=$(($2 < left ? $2 : left))
    shift 2
    if [ -f "$stages/$name.status" ]; then
        echo "$name: status $(cat "$stages/$name.status"), from before"
        return
    fi
    if [ "$left" -lt 20 ]; then
        echo "$name: no time left"
        return
    fi
    echo "$name: $*"
    timeout --kill-after=15 "$limit" "$@" >>"$stages/$name.log" 2>&1
    status=$?
    if [ "$status" -eq 0 ] || { [ "$status" -eq 124 ] && [ "$limit" -lt "$left" ]; }; then
        echo "$status" >"$stages/$name.status"
    fi
    echo "$name: status $status after $SECONDS s; the end of $stages/$name.log:"
    tail -n 5 "$stages/$name.log"
}

# cells NAME COMMAND...: a benchmark that goes on by itself; it is over when it has nothing to measure any more.
cells() {
    local name=$1 left=$((seconds - SECONDS))
    shift
    if [ "$left" -lt 30 ]; then
        echo "$name: no time left"
        return
    fi
    echo "$name: $*"
    "$python" benchmarks/gpu.py "$@" --budget "$((left - 10))" --output "$results/gpu" 2>&1 | tee -a "$stages/$name.log"
}

{
    date --utc --iso-8601=seconds
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>&1
    free -g | sed -n 2p
    "$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
} | tee "$stages/machine.txt"

stage tests 400 "$python" -m pytest -q -x tests/gpu
stage engine 120 "$python" benchmarks/engine.py --device cuda --dtype bfloat16 --hidden 4096 --heads 32 --kv-heads 8 \
    --seq-len 16384 --output "$results" --name engine-cuda
stage kernels 120 "$python" benchmarks/kernel_times.py --device cuda --output "$results/kernels"
cells side_by_side --plan important
cells longest_lora --plan longest --models llama3_8b --tuning lora --lengths 64K 1M --multiple-of 64K \
    --methods memo_auto_unplanned alst checkpointing memo_slices
cells longest_full --plan longest --models llama3_2_1b --tuning full --lengths 128K 2M --multiple-of 128K \
    --methods memo_auto_unplanned alst checkpointing memo_slices
echo "All stages were tried. The page of it: $python benchmarks/performance.py"
