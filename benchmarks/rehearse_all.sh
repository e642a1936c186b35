#!/usr/bin/env bash
# Rehearses all cells of the pages on simulated GPUs, in half an hour on two idle cores.
#
#     bash benchmarks/rehearse_all.sh [FOLDER]
#
# FOLDER is benchmarks/results if it is left out. Finished cells are not repeated, so that the same command continues a
# run that was stopped. For a new run, remove the results first: ratios are of cells of one commit.
# PYTHON is the interpreter with the emulated device, .cuda/venv/bin/python if it is left out.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.cuda/venv/bin/python}
results=${1:-benchmarks/results}
peers="checkpointing selective selective_products checkpointing_async_offload"
liger="selective_liger selective_products_liger checkpointing_async_offload_liger"
memo="memo_alpha_0 memo_alpha_1 memo_auto_without_triton memo_auto_unplanned"

# cells SET DEVICE HOST_MEMORY ARGUMENTS...: the arguments are those of benchmarks/gpu.py.
cells() {
    local set=$1 device=$2 host=$3
    shift 3
    OMP_NUM_THREADS=1 "$python" benchmarks/rehearse.py --device "$device" --host-memory "$host" \
        benchmarks/gpu.py --attention cudnn --warmup 1 --repeats 5 --settle 1 --output "$results/$set/$host" "$@"
}

for tuning in lora full; do
    # With all weights trained, liger-kernel overwrites products that this method has saved.
    [ "$tuning" = lora ] || liger=${liger/selective_products_liger/}
    for host in 128GiB 1TiB; do
        lengths="64K 128K 256K"
        [ "$host" = 1TiB ] || lengths="32K $lengths"
        cells rehearsed h200 "$host" --models llama3_8b --tuning "$tuning" --lengths $lengths \
            --methods $peers $liger $memo
        for layers in 1 2; do
            cells rehearsed h200 "$host" --models llama3_8b --layers "$layers" --tuning "$tuning" --lengths $lengths \
                --methods plain plain_liger
        done
    done
done
cells rehearsed h200 128GiB --models llama3_2_1b --tuning full --lengths 64K 128K 256K \
    --methods $peers $liger $memo
for layers in 1 2; do
    cells rehearsed h200 128GiB --models llama3_2_1b --layers "$layers" --tuning full --lengths 64K 128K 256K \
        --methods plain plain_liger
done

others="selective selective_liger checkpointing_async_offload_liger memo_alpha_0 memo_alpha_1"
for host in 128GiB 1TiB; do
    for device in h200 h100; do
        cells rehearsed_beside_all "$device" "$host" --models llama3_2_1b --tuning full \
            --lengths 16K 32K 64K 128K 256K 512K --methods $others memo_auto_unplanned
    done
    cells rehearsed_beside_all h200 "$host" --models llama3_8b --tuning full --lengths 16K 32K 64K 128K 256K 512K \
        --methods $others memo_auto_unplanned
    cells rehearsed_beside_all h100 "$host" --models llama3_8b --tuning full --lengths 16K 32K 64K \
        --methods $others memo_auto_unplanned
    cells rehearsed_beside_all h200 "$host" --models qwen3_30b_a3b --tuning lora --lengths 16K 32K 64K 128K 256K 512K \
        --methods $others memo_auto_unplanned
    cells rehearsed_beside_all h100 "$host" --models qwen3_30b_a3b --tuning lora --lengths 16K 32K 64K 128K \
        --methods $others memo_auto_unplanned
done

alst="checkpointing selective alst alst_freed alst_reentrant memo_auto_unplanned"
cells rehearsed_alst h200 128GiB --models llama3_8b --tuning lora --lengths 64K 128K 256K 320K --methods $alst
cells rehearsed_alst h100 1769GiB --models llama3_8b --tuning lora --lengths 256K 512000 --methods $alst

further="checkpointing selective selective_liger memo_auto_unplanned"
for tuning in lora full; do
    cells rehearsed_further h200 256GiB --models llama3_2_3b --tuning "$tuning" --lengths 64K 128K --methods $further
    cells rehearsed_further h200 64GiB --models llama3_2_1b --tuning "$tuning" --lengths 96K 160K --methods $further
done
cells rehearsed_further h200 256GiB --models llama3_8b --tuning lora --lengths 96K 192K --attention sdpa \
    --methods $further
cells rehearsed_further h200 256GiB --models qwen3_8b --tuning lora --lengths 64K --methods $further

longest="--methods memo_auto_unplanned --tuning"
cells rehearsed_longest h200 128GiB --models llama3_8b $longest lora --lengths 320K
cells rehearsed_longest h200 1TiB --models llama3_8b $longest lora --lengths 1408000
cells rehearsed_longest h200 1TiB --models llama3_2_1b $longest full --lengths 2M
cells rehearsed_longest h100 1769GiB --models llama3_8b $longest lora --lengths 512000

# PyTorch's allocator, its expandable segments, and planned memory, which serves after seconds of simulated time.
memory="--models llama3_8b --settle 9999 --methods memo_auto_unplanned"
for options in "memo_auto" "--allocator expandable_segments"; do
    cells rehearsed_memory h200 128GiB $memory $options --tuning lora --lengths 64K 128K 256K 320K
    cells rehearsed_memory h200 128GiB $memory $options --tuning full --lengths 64K
done

# One rank of eight. The last commands run TRL's trainer, of the release that the published runs are of.
for options in "memo_alpha_0" "memo_auto_unplanned" "memo_auto_unplanned --allocator expandable_segments" \
    "memo_auto_unplanned --context ulysses" "memo_slices" "memo_slices_hidden"; do
    OMP_NUM_THREADS=1 "$python" benchmarks/rehearse.py --device h100 --ranks 8 --host-memory 1536GiB benchmarks/gpu.py \
        --attention cudnn --warmup 1 --repeats 1 --settle 1 --models llama3_8b --lengths 1M --precision bf16-mixed \
        --slice-tokens 64K --output "$results/rehearsed_ranks/1536GiB" --methods $options
done
# Two hours.
OMP_NUM_THREADS=1 "$python" benchmarks/rehearse.py --device h100 --ranks 8 --host-memory 1536GiB benchmarks/gpu.py \
    --attention cudnn --warmup 1 --repeats 1 --settle 1 --models llama3_8b --lengths 5M --precision bf16-mixed \
    --slice-tokens 64K --time-limit 9000 --output "$results/rehearsed_ranks/1536GiB" --methods memo_auto_unplanned \
    --allocator expandable_segments
trl=$(mktemp -d)
"$python" -m pip install --quiet --no-deps --target "$trl" trl==1.13.0
for options in "qwen3_8b" "qwen3_30b_a3b --offload" "qwen3_32b --offload"; do
    OMP_NUM_THREADS=1 PYTHONPATH=$trl "$python" benchmarks/rehearse.py --device h100 --ranks 8 --host-memory 2TiB \
        benchmarks/trl_long_context.py --tokens 1M --output "$results/rehearsed_published" --model $options
done
