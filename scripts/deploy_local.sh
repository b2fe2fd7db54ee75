#!/usr/bin/env bash
# Set up where needed, then a search on a server and three sites of this machine; the arguments are
# those of deploy_local.py.
set -euo pipefail
source "$(dirname "$0")/setup.sh"
exec python scripts/deploy_local.py "$@"
