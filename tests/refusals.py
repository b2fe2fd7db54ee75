"""What is refused, and in which words."""

import pytest

from fednas_flwr.base.errors import ConfigError


def refuses(words, call, /, *given, error=ConfigError, **named):
    """Check that a call ends with an error in whose sentence ``words`` are; return the sentence.

    Args:
        words: A pattern; ``""`` leaves the sentence to whoever calls this.
        call: Called with all further arguments.
        error: Class of the error.
    """
    with pytest.raises(error, match=words or None) as told:
        call(*given, **named)
    return str(told.value)
