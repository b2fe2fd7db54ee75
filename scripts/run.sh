#!/usr/bin/env bash
# Set up where needed, then `fednas run` with the given arguments; without any, the quickstart.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
exec fednas run "$@"
