"""What calls say: errors and warnings."""

import warnings

import pytest


def refused(*rows, error=ValueError):
    """Check that each call raises an error with its words: rows of (call, words)."""
    for call, words in rows:
        with pytest.raises(error, match=words):
            pytest.fail(f"nothing was raised with {words!r}, got {call()}")


def warned(call):
    """Return the words of all warnings of a call."""
    with warnings.catch_warnings(record=True, action="always") as seen:
        call()
    return [str(one.message) for one in seen]
