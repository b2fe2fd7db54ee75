#!/usr/bin/env bash
# Set up where needed, then the CPU time of one secure sum, of a site and of the server.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
exec python scripts/bench_secure_sum.py "$@"
