"""Launchers that do not arrive, or stop answering."""

import asyncio

import pytest

from kfcomm.launch.hosts import HostPlan, LaunchHost
from kfcomm.launch.job import LaunchJob, RunOptions
from kfcomm.launch.other_hosts import company, watch_hosts
from kfcomm.rendezvous.backends import LocalStore
from kfcomm.rendezvous.keyvalue import Exit, Why

PLAN = HostPlan((LaunchHost("10.0.0.1", 1), LaunchHost("10.0.0.2", 2), LaunchHost("10.0.0.3", 1)))
JOB = LaunchJob(RunOptions(("true",)), PLAN, None, "true", b"", "mark", {})
FOREVER_S = 1e6


@pytest.mark.asyncio
async def test_absent_launcher_is_given_up_but_not_one_that_left() -> None:
    store = LocalStore()
    contents = store.contents
    contents.set("launchers/2", b"")
    await watch_hosts(JOB, store, come_within_s=0.01, lost_after_s=0.02)
    assert list(contents.exits.values()) == [Exit(1, 1, Why.ABSENT), Exit(2, 1, Why.ABSENT)]
    assert company(PLAN, store) == {"2"}


@pytest.mark.asyncio
async def test_silent_launcher_is_given_up_but_not_one_that_asks() -> None:
    store = LocalStore()
    contents = store.contents
    await contents.exits_since(0, 0, host=1)
    await contents.exits_since(0, 0, host=2)
    watching = asyncio.create_task(watch_hosts(JOB, store, come_within_s=FOREVER_S, lost_after_s=0.4))
    while not contents.exits:
        contents.heard_s[2] = asyncio.get_running_loop().time()
        await asyncio.sleep(0)
    assert {end.rank for end in contents.exits.values()} == {1, 2}
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
