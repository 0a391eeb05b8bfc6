"""Observer of one job for the dashboard: looks at its ranks, and publishes what they say.

What a rank pays is bounded: its figures are asked for some times a second and do not depend on the number of names;
names are asked for once a second, or less often where there are many; dumps once a second while something waits.
Without readers a look a second is left, so that the page has a past when it is opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any

from kfcomm.common.sizes import ranks_in_words
from kfcomm.monitor import live
from kfcomm.monitor.dashboard import frames
from kfcomm.monitor.dashboard.frames import Frame
from kfcomm.monitor.doctor import checked_record, diagnose
from kfcomm.monitor.dumps import Record
from kfcomm.monitor.live import Job, Question
from kfcomm.monitor.statistics import RecentEvent
from kfcomm.monitor.top import MAX_AT_ONCE, JobChange, JobWatcher, ask_elsewhere
from kfcomm.monitor.usage import Usage, usage_of

IDLE_S = 1.0
"""Between two looks without readers, and between two looks at names or dumps."""
NAME_COST_S = 0.002
"""Pause for each name, which costs a rank some 18 µs: about 1 % of a core."""
NAME_OF_RANK_COST_S = 0.0002
"""The same for the server, for each name of each rank."""
RANK_COST_S = 0.0125
"""Pause between two looks for each rank, which costs the server some 0.6 ms."""
WAITS_AFTER_S = 1.0
"""A call that has waited for so long is explained."""
PAST_S = 30.0
MAX_TRAINING = 3600
"""Points of figures of training; of more, every second one is left out."""


class FrameFeed:
    """Latest message of each kind, for any number of readers; a slow reader misses those between."""

    def __init__(self, past: Callable[[], Frame]) -> None:
        self._past = past
        self._latest: dict[str, tuple[int, str]] = {}
        self._version = 0
        self._readers: set[asyncio.Event] = set()
        self.is_closed = False
        self.has_new_reader = asyncio.Event()

    @property
    def num_readers(self) -> int:
        """Readers at present."""
        return len(self._readers)

    def publish(self, kind: str, frame: Frame) -> None:
        """Replace the message of a kind; nothing is sent if it is the same."""
        text = json.dumps(frame, separators=(",", ":"), allow_nan=False)
        if self._latest.get(kind, (0, ""))[1] != text:
            self._version += 1
            self._latest[kind] = (self._version, text)
            self._wake()

    def close(self) -> None:
        """Let all readers come to their end, after the messages that are there."""
        self.is_closed = True
        self._wake()

    async def read(self) -> AsyncGenerator[tuple[str, str], None]:
        """Messages from now on, kind and text; the first is the past, then follow the latest of all kinds."""
        awake = asyncio.Event()
        self._readers.add(awake)
        self.has_new_reader.set()
        try:
            yield "past", json.dumps(self._past(), separators=(",", ":"))
            sent = 0
            while True:
                awake.clear()
                news = sorted((version, kind, text) for kind, (version, text) in self._latest.items() if version > sent)
                for version, kind, text in news:
                    yield kind, text
                    sent = version
                if not news:
                    if self.is_closed:
                        return
                    await awake.wait()
        finally:
            self._readers.discard(awake)

    def _wake(self) -> None:
        for awake in self._readers:
            awake.set()


class Past:
    """Record of the last seconds, and of the training since the dashboard began."""

    def __init__(self, interval_s: float) -> None:
        self._rates: deque[list[Any]] = deque(maxlen=max(2, round(PAST_S / interval_s)))
        self._training: list[list[Any]] = []
        self._every = 1.0

    def add(self, frame: Frame) -> None:
        """Add the figures of a look."""
        ranks = [one for one in frame["ranks"] if one["answers"]]
        columns = [[one[field] for one in ranks] for field in ("rank", "sent", "received")]
        self._rates.append([frame["time"], *columns, frame["waited"]])
        if not self._training or frame["time"] - self._training[-1][0] >= self._every:
            self._training.append([frame["time"], frame["size"], frame["gauges"]])
            if len(self._training) > MAX_TRAINING:
                self._training = self._training[::2]
                self._every *= 2

    def frame(self) -> Frame:
        """Message for a new reader."""
        return {"rates": list(self._rates), "training": self._training}


class JobObserver:
    """Looks at a job until it is cancelled, and publishes to ``feed``; ``begins``: its ranks may not be there yet."""

    def __init__(self, job: str, interval_s: float = 0.2, *, begins: bool = False) -> None:
        self.job = job
        self._begins = begins
        self.has_ended = asyncio.Event()
        past = Past(interval_s)
        self.feed = FrameFeed(past.frame)
        self._past = past
        self._interval_s = interval_s
        self._log = frames.EventLog()
        self._change: JobChange | None = None
        self._frame: Frame | None = None
        self._usage: dict[int, Usage] = {}
        self._usage_s = -IDLE_S
        self._known: tuple[Any, ...] = ()

    async def run(self) -> None:
        """Observe. Ranks are asked on other threads: one that is stopped takes seconds to be given up."""
        # At once, and not one after the other: a rank that is stopped holds up none of the others.
        loops = [self._look_at_figures(), self._look_at_names(), self._look_at_waits()]
        named = partial(ThreadPoolExecutor, thread_name_prefix="kfcomm-dashboard")
        with named(len(loops)) as looking, named(MAX_AT_ONCE) as asking:
            self._looking, self._asking = looking, asking
            async with asyncio.TaskGroup() as tasks:
                for one in loops:
                    tasks.create_task(one)

    def end(self, words: str) -> None:
        """Say how the job has ended."""
        self._log.note(RecentEvent(time.time(), "end", words, ""))
        self._publish_events()
        if self._frame is not None:
            self.feed.publish("figures", self._frame | {"ended": True})

    async def _in_thread(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._looking, partial(work, *arguments))

    # ---------------------------------------------------------------- figures

    async def _look_at_figures(self) -> None:
        watcher = JobWatcher(self.job, Question.FIGURES, pool=self._asking)
        while not self.has_ended.is_set():
            began_s = time.monotonic()
            change: JobChange = await self._in_thread(watcher.look)
            if self._begins and change.has_ended:
                await asyncio.sleep(self._interval_s)
                continue
            self._begins = False
            if began_s - self._usage_s >= IDLE_S:
                self._usage, self._usage_s = await self._in_thread(_usage, change, self._asking), began_s
            self._compare(change)
            self._change = change
            frame = self._frame = frames.figures(change, self._usage, time.time())
            self._past.add(frame)
            self.feed.publish("figures", frame)
            self._add_events(change)
            if change.has_ended:
                self.has_ended.set()
            else:
                await self._ask_for_graphs(change)
                unread_s = 0.0 if self.feed.num_readers else IDLE_S
                pause_s = max(self._interval_s, RANK_COST_S * len(change.ranks), unread_s)
                self.feed.has_new_reader.clear()
                await _until(self.feed.has_new_reader, began_s + pause_s - time.monotonic())

    def _compare(self, change: JobChange) -> None:
        """Note ranks that have come, and processes that are gone."""
        before, now = self._change, time.time()
        if before is None:
            return
        came = change.ranks.keys() - before.ranks.keys()
        # At the beginning of a job they come one by one.
        is_later = any(answer.epoch for answer in change.answers)
        for kind, ranks in (("gone", set(change.gone) - set(before.gone)), ("came", came if is_later else set())):
            if ranks:
                self._log.note(RecentEvent(now, kind, ranks_in_words(ranks), ""))
        if change.has_ended:
            self._log.note(RecentEvent(now, "end", "no process of the job is left on this host", ""))
        self._publish_events()

    def _add_events(self, change: JobChange) -> None:
        told = [(rank, one.process, one.now.events) for rank, one in change.ranks.items() if one.now is not None]
        if sum(self._log.add(*one) for one in told):  # of all of them
            self._publish_events()

    def _publish_events(self) -> None:
        self.feed.publish("events", {"events": self._log.events})

    async def _ask_for_graphs(self, change: JobChange) -> None:
        """Ask a rank for the graphs, if they may have changed."""
        answering = [one for one in change.ranks.values() if one.now is not None and one.is_here]
        key = tuple((one.now.epoch, one.now.strategy) for one in answering[:1] if one.now is not None)
        if answering and key != self._known:
            graphs = await self._in_thread(live.answer_of, answering[0].socket, Question.GRAPHS)
            if isinstance(graphs, dict) and "rules" in graphs:  # a rank of an older version knows no graphs
                self._known = key
                self.feed.publish("graphs", graphs)

    # ---------------------------------------------------------------- names and waits

    async def _look_at_names(self) -> None:
        watcher = JobWatcher(self.job, pool=self._asking)
        is_first = True
        while not self.has_ended.is_set():
            pause_s = IDLE_S
            if is_first or self.feed.num_readers:
                change: JobChange = await self._in_thread(watcher.look)
                is_first = change.has_ended
                self._add_events(change)
                if change.answers:
                    self.feed.publish("names", frames.names(change))
                counts = [len(one.keys) for one in change.answers]
                pause_s += max(NAME_COST_S * max(counts, default=0), NAME_OF_RANK_COST_S * sum(counts))
            await self._sleep(pause_s)

    async def _look_at_waits(self) -> None:
        while not self.has_ended.is_set():
            await self._sleep(IDLE_S)
            change = self._change
            if change is None or not self.feed.num_readers:
                continue
            frame = frames.NOTHING_WAITS
            if any(one.longest_wait_s > WAITS_AFTER_S for one in change.answers):
                records = await self._in_thread(_dumps, change, self._asking)
                if records:
                    frame = frames.waits(diagnose(records))
            self.feed.publish("waits", frame)
        self.feed.publish("waits", frames.NOTHING_WAITS)

    async def _sleep(self, seconds: float) -> None:
        """Sleep, but not beyond the end of the job."""
        await _until(self.has_ended, seconds)


async def _until(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, so long at most; 0 or less: a turn of the loop."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()


def _dumps(change: JobChange, pool: Executor) -> list[Record]:
    """Dumps of the ranks that answer, of one epoch."""
    sockets = [one.socket for one in change.ranks.values() if one.now is not None and one.is_here]
    here = pool.map(partial(live.answer_of, question=Question.DUMP), sockets)
    records = []
    for answer in (*here, *_elsewhere(change, Question.DUMP, pool).values()):
        with contextlib.suppress(KeyError, ValueError):  # of another version
            records.append(checked_record(answer))
    sizes = Counter(record["size"] for record in records)
    return [record for record in records if record["size"] == sizes.most_common(1)[0][0]]


def _elsewhere(change: JobChange, question: Question, pool: Executor) -> dict[int, Any]:
    """Decoded answers of the ranks of other hosts that answer."""
    places = {rank: one.socket for rank, one in change.ranks.items() if one.now is not None and not one.is_here}
    return {rank: one.answer for rank, one in ask_elsewhere(places, question, pool).items()}


def _usage(change: JobChange, pool: Executor) -> dict[int, Usage]:
    """Resources of the processes: by /proc of this host, or as those of other hosts tell them."""
    here = Job(change.job, tuple((rank, one.socket) for rank, one in change.ranks.items() if one.is_here))
    found = dict(zip(here.ranks, map(usage_of, here.pids), strict=True))
    for rank, answer in _elsewhere(change, Question.USAGE, pool).items():
        with contextlib.suppress(TypeError):  # of another version
            found[rank] = Usage(**answer)
    return found
