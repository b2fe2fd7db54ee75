#!/usr/bin/env bash
# Set up where needed, then the cost of noise, and of the bookkeeping of private steps, on one thread.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
OMP_NUM_THREADS=1 exec python scripts/bench_privacy.py "$@"
