#!/usr/bin/env bash
# Set up where needed, then how many faults the tests notice: scripts/mutate.sh [--number 60] ...
set -euo pipefail
source "$(dirname "$0")/setup.sh"
python -c "import cosmic_ray, pytest_cov" 2>/dev/null || pip install --quiet cosmic-ray pytest-cov
exec python scripts/mutate.py "$@"
