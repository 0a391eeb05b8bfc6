"""A relay that flips, repeats and forges between three ranks, for as long as it is let; see ``tests/test_relays.py``.

python -m tests.search.relays --seconds 60 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import click
import uvloop

from kfcomm.engine import recovery
from kfcomm.engine.control import links
from kfcomm.transports import handshake
from kfcomm.transports.tls import make
from tests.relays import Relay
from tests.test_relays import ends, joined

HARMS_OF_A_WORLD = 300


async def search(until_s: float, random: Random, certificates: str) -> tuple[int, Counter[str]]:
    """How often something was harmed, and how calls ended."""
    total: Counter[str] = Counter()
    harmed = 0
    while time.monotonic() < until_s:
        settings: dict[str, Any] = random.choice([{"checksum": True}, {"tls": certificates}])
        relay = Relay(random, spared=300 if "checksum" in settings else 4000, every=random.choice([4, 10, 40]))
        handshake.connect = relay.connect  # type: ignore[assignment]
        async with joined(3, **settings) as comms:
            while relay.done < HARMS_OF_A_WORLD and time.monotonic() < until_s:
                total += await ends(comms, random, 10)
            relay.every = 1 << 30
            while (await ends(comms, random, 1))["failed"]:
                pass
        await relay.close()
        harmed += relay.done
    return harmed, total


def main() -> int:
    """Search for so many seconds."""
    parser = argparse.ArgumentParser(prog="python -m tests.search.relays")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    # links break all the time: pauses before the next one would be most of the search
    recovery.FIRST_PAUSE_S, recovery.LONGEST_PAUSE_S = 0.001, 0.002
    links.FIRST_PAUSE_S, links.LONGEST_PAUSE_S = 0.005, 0.01
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder, "tls"), days=1)
        searching = search(time.monotonic() + given.seconds, Random(given.seed), str(Path(folder, "tls")))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            harmed, total = runner.run(searching)
    click.echo(f"{harmed} harms: {dict(total)}, none wrong, no rank lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
