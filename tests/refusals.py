"""What is refused, and in which words."""

import pytest

from fednas_flwr.base.errors import ConfigError


def refuses(words, call, /, *given, error=ConfigError, **named):
    """Check that a call ends with an error whose sentence has these words; return the sentence."""
    with pytest.raises(error, match=words) as told:
        call(*given, **named)
    return str(told.value)
