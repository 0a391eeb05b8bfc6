"""Rate-limited log records."""

from __future__ import annotations

import logging

import pytest

from kfcomm.rendezvous.store import RateLimitFilter


def test_one_line_a_second_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    limit = RateLimitFilter(lambda: now[0])
    logger = logging.getLogger("kfcomm.test_rate_limit")
    logger.addFilter(limit)
    try:
        for step in range(30):
            now[0] = step / 10
            try:
                raise ValueError("no request")
            except ValueError:
                logger.exception("from %s", "there")
    finally:
        logger.removeFilter(limit)
    assert [record.getMessage() for record in caplog.records] == [
        "from there: ValueError('no request')",
        "from there: ValueError('no request') (and 9 such lines before)",
        "from there: ValueError('no request') (and 9 such lines before)",
    ]
    assert "Traceback" not in caplog.text
