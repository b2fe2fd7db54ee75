#!/usr/bin/env bash
# Set up where needed, then the tests with the given arguments of pytest: the quick tier, or with
# --all as the first of them every test that needs no GPU, no network and no minutes of its own.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
if [ "${1:-}" = --all ]; then
  export HYPOTHESIS_PROFILE=full
  set -- -m "not slow and not gpu and not network" "${@:2}"
fi
exec pytest "$@"
