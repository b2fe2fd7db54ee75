#!/usr/bin/env bash
# Set up where needed, then send malformed requests to private sites that differ in one record:
# scripts/fuzz_actions.sh [--requests 5000] [--seed 1]. Ends with 1 if one of them can be told apart.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
requests=5000 seed=1
while [ $# -gt 0 ]; do
  case "$1" in
    --requests) requests="$2" ;;
    --seed) seed="$2" ;;
    *) echo "unknown: $1; expected --requests N or --seed N" >&2; exit 2 ;;
  esac
  shift 2
done
FUZZ_REQUESTS="$requests" FUZZ_SEED="$seed" OMP_NUM_THREADS=1 \
  exec python -m pytest -q -s -n 0 tests/client/test_fuzz_actions.py
