"""What is refused, and in which words."""

import pytest

from fednas_flwr.base.errors import ConfigError
from fednas_flwr.pipeline.feasible import check_buildable


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


def raising(error):
    """Return a function that raises an error, whatever it is called with."""

    def fails(*_, **__):
        raise error

    return fails


def lacking(text, *parts):
    """Return the parts that a text does not contain."""
    return [part for part in parts if part not in text]


def refuses_run(words, compose, *overrides):
    """Check that a configuration is refused, when it is composed or by what it names."""
    return refuses(words, lambda: check_buildable(compose(*overrides)))
