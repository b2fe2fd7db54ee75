#!/usr/bin/env bash
# Set up where needed, then the cost of adding clients: memory of the server, seconds per round.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
exec python scripts/bench_clients.py "$@"
