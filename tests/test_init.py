"""What ``init`` refuses before it opens anything."""

import pytest

import kfcomm


@pytest.mark.parametrize("init", [kfcomm.init, kfcomm.sync.init], ids=["async", "sync"])
def test_an_unknown_strategy_is_refused_at_once(init) -> None:
    # nobody serves this store: whoever tried to join would wait for it
    with pytest.raises(kfcomm.ConfigError, match="did you mean ring"):
        init(rank=1, size=2, store="http://127.0.0.1:1", token="0123456789abcdef", strategy="rign")
