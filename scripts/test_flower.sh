#!/usr/bin/env bash
# What depends on Flower, tested with another of its versions: scripts/test_flower.sh 1.42
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:?a minor version of flwr, as in scripts/test_flower.sh 1.42}
shift
source scripts/setup.sh
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "flwr==$version.*"
export PYTHONPATH="$folder:$PWD${PYTHONPATH:+:$PYTHONPATH}"
python -c "import flwr; print('flwr', flwr.__version__)"
pytest -q -n 0 tests/deploy/test_flower_patches.py tests/deploy/test_deployment.py \
    tests/deploy/test_flwr_run.py tests/deploy/test_lean_start.py tests/server/test_cohort.py \
    tests/contracts/test_strategies.py \
    tests/algorithms/test_fedavg.py "$@"
