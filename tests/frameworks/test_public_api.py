"""No public name or parameter of the torch and JAX interfaces changes by accident."""

from __future__ import annotations

import pytest

from tests.public_api import FRAMEWORKS, changes


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_public_api_is_the_recorded_one(framework: str) -> None:
    pytest.importorskip(framework)
    assert changes(framework) == {"gone": [], "new": []}
