#!/usr/bin/env bash
# Set up where needed, then runs with generated settings, each in a process of its own.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
OMP_NUM_THREADS=1 exec python scripts/fuzz_settings.py "$@"
