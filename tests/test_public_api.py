"""No public name, parameter, default, setting or option of a command changes by accident."""

from __future__ import annotations

from tests.public_api import changes


def test_public_api_is_the_recorded_one() -> None:
    """A change that is meant is recorded by ``python -m tests.public_api``, and told in the changelog."""
    assert changes("package") == {"gone": [], "new": []}
