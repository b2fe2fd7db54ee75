"""End of a command: exit codes, and errors as sentences."""

from __future__ import annotations

import signal
import sys
import traceback

from fednas_flwr.errors import ConfigError, DamagedError
from fednas_flwr.foreign import terminal
from fednas_flwr.memory import described

RUN_FAILED = 1
USER_ERROR = 2
INCONCLUSIVE = 3  # of `fednas audit`
STOPPED = 128 + signal.SIGINT


def fail(error: Exception, *, debug: bool) -> int:
    """Print one error with its notes, and return the exit code.

    Its kind is printed unless it is a sentence of ours.
    """
    if debug:
        traceback.print_exception(error)
    is_sentence = isinstance(error, ConfigError | DamagedError)
    text = str(error) if is_sentence else described(error)
    told = "; ".join([f"fednas: {text}", *getattr(error, "__notes__", ())])
    print(terminal(told), file=sys.stderr)
    return USER_ERROR if isinstance(error, ConfigError) else RUN_FAILED
