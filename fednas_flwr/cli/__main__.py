"""``python -m fednas_flwr.cli``."""

import sys

from fednas_flwr.cli import main

sys.exit(main())
