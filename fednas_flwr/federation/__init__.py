"""Where a run takes place: its stages on the server, its clients, and the three runtimes."""

import os

# Flower asks the environment while it is imported: no telemetry unless the user turns it on.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
