"""``python -m fednas_flwr``."""

import sys

from fednas_flwr.cli import main

sys.exit(main())
