#!/usr/bin/env bash
# Set up where needed, then the tests with the given arguments of pytest.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
exec pytest "$@"
