#!/usr/bin/env bash
# One page about a machine with a GPU, in 5 to 20 minutes: scripts/gpu_day.sh <CIFAR-10> [folder]
# CIFAR-10 is a folder, to which torchvision downloads it, or an npz file. In the other folder are the
# page and the runs. Rounds of DP-FNAS and FDNAS at the papers' size, the steps' benchmark, all tests
# that need a GPU (the self-test of privacy among them) and a whole run.
# FEDNAS_DEVICE=cpu tries the script without a GPU.
set -uo pipefail
data=$(realpath "${1:?the folder of CIFAR-10, to which torchvision downloads, or an npz file}")
made=$(realpath "${2:-$(mktemp -d)}")
source "$(dirname "$0")/setup.sh"
device=${FEDNAS_DEVICE:-cuda}
cifar=(dataset=npz)
[ -f "$data" ] || cifar=(dataset=cifar10 dataset.download=true)
cifar+=("dataset.root=$data" dataset.limit_train=null dataset.limit_test=null)
of_page=("stages=[search]" evaluation.baselines=0 "runtime.device=$device" runtime=inline)

part() {  # title, seconds allowed, command: its last lines, and how long it took
    local began=$SECONDS
    echo "== $1"
    timeout "$2" "${@:3}" 2>&1 | tail -n 60
    echo "-- exit code ${PIPESTATUS[0]} after $((SECONDS - began)) s"
}

{
    date --iso-8601=minutes
    git describe --always --dirty
    [ "$device" = cpu ] || nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
    python -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
    part "two rounds of DP-FNAS at the paper's size; 24.5 are an epoch" 300 \
        fednas run experiment=dp_fnas/cifar10 "${cifar[@]}" "${of_page[@]}" rounds=2 \
        privacy.micro_batch_size=128 run_dir="$made/dp_fnas"
    part "FDNAS at the paper's size: one epoch of ten clients" 300 \
        fednas run experiment=fdnas/fashion_mnist "${cifar[@]}" "${of_page[@]}" rounds=1 clients=10 \
        search_space=mbconv algorithm.batch_size=256 run_dir="$made/fdnas"
    part "steps" 300 env FEDNAS_DEVICE="$device" python scripts/bench_step.py --repeats 3
    part "tests with a GPU" 300 pytest -q -n 0 -m gpu
    part "a whole search" 300 fednas run experiment=search/recommended runtime.device="$device" \
        run_dir="$made/recommended"
} | tee "$made/gpu_day.txt"
echo "this page: $made/gpu_day.txt"
