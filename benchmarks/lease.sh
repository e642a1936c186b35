#!/usr/bin/env bash
# Runs all measurements that need a GPU, the most important first: a quarter of an hour measures the most important cells.
#
#     bash benchmarks/lease.sh [SECONDS [FOLDER]]
#
# It stops after SECONDS (default: when everything is done). The same command continues it without repeating finished
# work; a stage that failed is not repeated either. Results go to FOLDER (default: benchmarks/results), the output of each
# stage to FOLDER/stages, and all of it once more to FOLDER/lease.tar.gz.
# PYTHON is the interpreter. Other programs (deepspeed, trl) and kernels (liger-kernel, flash-attn) are used if it finds
# them. COMMIT is recorded in the results if this is a copy without its repository.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
seconds=${1:-86400}
results=${2:-benchmarks/results}
stages=$results/stages
mkdir -p "$stages"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

"$python" - <<'EOF' || exit 2
import configparser, re, sys
from importlib.metadata import PackageNotFoundError, version

def missing(*packages):
    for package in packages:
        try:
            version(package)
        except PackageNotFoundError:
            yield package

settings = configparser.ConfigParser()
settings.read("setup.cfg")
needed = re.findall(r"^[\w-]+", settings["options"]["install_requires"], re.MULTILINE)
if absent := ", ".join(missing(*needed, "antlr4-python3-runtime", "peft")):
    sys.exit(f"{sys.executable} has no {absent}: docs/benchmarks.md tells how to bring packages")
if absent := ", ".join(missing("liger-kernel", "nvidia-ml-py", "trl", "deepspeed")):
    print(f"Without {absent}: what needs them is left out")

import torch

if not torch.cuda.is_available():
    sys.exit(f"{sys.executable}: PyTorch finds no GPU; python benchmarks/gpu.py --plan smoke is a trial without one")
EOF

# stage NAME MOST_SECONDS COMMAND...: runs a command unless it ended or timed out before.
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
    if { [ "$status" -ne 124 ] && [ "$status" -ne 137 ]; } || [ "$limit" -lt "$left" ]; then
        echo "$status" >"$stages/$name.status"
    fi
    echo "$name: status $status after $SECONDS s; the end of $stages/$name.log:"
    tail -n 5 "$stages/$name.log"
}

# cells NAME COMMAND...: runs a benchmark that continues where it stopped, until it has nothing left to measure.
cells() {
    local name=$1 left=$((seconds - SECONDS))
    shift
    if [ "$left" -lt 30 ]; then
        echo "$name: no time left"
        return
    fi
    echo "$name: $*"
    timeout --foreground --kill-after=5 "$left" "$python" benchmarks/gpu.py "$@" \
        --budget "$((left - 10))" --output "$results/gpu" 2>&1 | tee -a "$stages/$name.log"
}

{
    date --utc --iso-8601=seconds
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>&1
    free -g | sed -n 2p
    "$python" -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
} | tee "$stages/machine.txt"

cells side_by_side --plan important
stage gradients 200 "$python" benchmarks/gradients.py --full --output "$results"
stage tests 400 "$python" -m pytest -q tests/gpu
stage engine 120 "$python" benchmarks/engine.py --device cuda --dtype bfloat16 --hidden 4096 --heads 32 --kv-heads 8 \
    --seq-len 16384 --output "$results" --name engine-cuda
stage large_attention 200 "$python" benchmarks/large_attention.py --output "$results/large_attention.json"
stage kernels 120 "$python" benchmarks/kernel_times.py --device cuda --output "$results/kernels"
cells longest_lora --plan longest --models llama3_8b --tuning lora --lengths 64K 1M --multiple-of 64K \
    --methods memo_auto_unplanned alst checkpointing memo_slices
cells longest_full --plan longest --models llama3_2_1b --tuning full --lengths 128K 2M --multiple-of 128K \
    --methods memo_auto_unplanned alst checkpointing memo_slices
tar --create --gzip --file - --directory "$results" --exclude lease.tar.gz . >"$results/lease.tar.gz"
echo "All stages were tried. To generate the page: $python benchmarks/performance.py"
