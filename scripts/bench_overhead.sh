#!/usr/bin/env bash
# Set up where needed, then measure a first run, and what several processes save of a round.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
exec python scripts/bench_overhead.py "$@"
