#!/usr/bin/env bash
# One page about a machine with a GPU, in about 20 minutes: scripts/gpu_day.sh <folder of CIFAR-10>
# Tests that need a GPU (the self-test of privacy among them), the time of the papers' rounds on it
# and on the processor, and a whole run. FEDNAS_DEVICE=cpu tries the script without a GPU.
set -uo pipefail
root=$(realpath "${1:?the folder of CIFAR-10, to which torchvision downloads}")
source "$(dirname "$0")/setup.sh"
device=${FEDNAS_DEVICE:-cuda}
page=$(mktemp -d)/gpu_day.txt

part() {  # title, seconds allowed, command: its last lines, and how long it took
    local began=$SECONDS
    echo "== $1"
    timeout "$2" "${@:3}" 2>&1 | tail -n 15
    echo "-- exit code ${PIPESTATUS[0]} after $((SECONDS - began)) s"
}

predict() {  # experiment, its name, settings: a round's time on each device
    for on in "$device" cpu; do
        part "$1 on $on" 240 fednas run "experiment=$1" dataset=cifar10 dataset.root="$root" \
            dataset.download=true runtime.device="$on" --dry-run "${@:2}"
    done
}

{
    date --iso-8601=minutes
    git describe --always --dirty
    [ "$device" = cpu ] || nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv
    python -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
    part "tests with a GPU" 300 pytest -q -n 0 -m gpu
    predict dp_fnas/cifar10
    predict fdnas/fashion_mnist dataset.limit_train=50000 search_space=mbconv clients=10
    part "a whole search" 300 fednas run experiment=search/recommended runtime.device="$device" \
        run_dir="$(dirname "$page")/run"
} | tee "$page"
echo "this page: $page"
