#!/usr/bin/env bash
# Set up where needed, then measure what federation costs beside the local steps; prints ratios.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
exec python scripts/bench_overhead.py "$@"
