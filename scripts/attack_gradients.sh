#!/usr/bin/env bash
# Set up where needed, then attacks on what clients send, with and without privacy, on one thread.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
OMP_NUM_THREADS=1 exec python scripts/attack_gradients.py "$@"
