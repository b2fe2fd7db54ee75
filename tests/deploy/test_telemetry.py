import os
import subprocess
import sys

import pytest


@pytest.mark.run
@pytest.mark.parametrize(("given", "expected"), [(None, "0"), ("1", "1")])
def test_flowers_telemetry_is_off_unless_the_user_turns_it_on(given, expected):
    """Also for those who import a strategy and never go through ``federation``."""
    code = "import fednas_flwr, flwr.supercore.telemetry as t; print(t.FLWR_TELEMETRY_ENABLED)"
    environment = {k: v for k, v in os.environ.items() if k != "FLWR_TELEMETRY_ENABLED"}
    if given is not None:
        environment["FLWR_TELEMETRY_ENABLED"] = given
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
