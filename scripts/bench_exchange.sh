#!/usr/bin/env bash
# Set up where needed, then measure an exchange with three sites over Flower's own empty one.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
exec python scripts/bench_exchange.py "$@"
