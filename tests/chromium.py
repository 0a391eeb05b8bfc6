"""Chromium for a test of a page."""

from __future__ import annotations

import os

import pytest

from bench import chromium

REQUIRE = "KFCOMM_REQUIRE_CHROMIUM"


def needed() -> None:
    """Skip the test without Chromium; fail it if Chromium is required."""
    if chromium.program() is None:
        if os.environ.get(REQUIRE, "0") not in ("", "0"):
            pytest.fail(f"needs Chromium, and {REQUIRE} is set")
        pytest.skip("needs Chromium")
