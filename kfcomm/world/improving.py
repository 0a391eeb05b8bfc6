"""``auto`` improves itself: without a probe it looks at the links while the program makes its calls.

It works in groups on several hosts whose rates are unknown. Their first rank directs, and all ranks answer on their
event loops (see `directed`), whatever calls they have made:

1. *look*: all tell what the kernel has seen of the links in use. Where hosts are alike, that was all.
2. *measure*: all hold further calls, and one rank of each host measures the links to the others, pair by pair. This
   begins when that is estimated to take a tenth of the time for which the program has made calls; it is done once.
3. *choose*: all hear the rates, and compute ``auto`` with them. The first rank goes on only where that is predicted to
   be faster by 5 %, for messages of the sizes in use.
4. *change*: all hold further calls, tell the next use of each name, and hear from which use on the new graphs hold (see
   ``collectives.transition``). The first rank decides, at one moment, and does not hold.

A rank that does not answer in time costs the others that time, and is asked again later. A program or a policy that
sets a strategy ends all of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from kfcomm.collectives.transition import first_uses
from kfcomm.engine.closing import Drain, in_a_thread
from kfcomm.errors import CollectiveError, CollectiveTimeout, EpochChanged, KfcommError, PeerLost, SessionClosed
from kfcomm.strategies import SizedStrategy
from kfcomm.strategies.auto import auto_before
from kfcomm.strategies.gains import USUAL, Gain, predicted_gain
from kfcomm.types import Costs, Rates
from kfcomm.world.directed import END, FIRST, Directed
from kfcomm.world.links import LinkProber, Pace, Patience, seen_links

if TYPE_CHECKING:
    from kfcomm.collectives.group import Group
    from kfcomm.collectives.mailbox import Mailbox
    from kfcomm.engine.session import Session
    from kfcomm.probe.passive import SeenLink

logger = logging.getLogger("kfcomm")

GENERATION: Final = 1 << 20
"""Of such a change, plus the number of its question: those of ``set_strategy`` count from 1."""
LOOK, MEASURE, CHOOSE, CHANGE = "look", "measure", "choose", "change"
"""Kinds of questions."""
PROBE: Final = "probe"
"""Instruction to measure now."""


class TakesNoPart(Exception):
    """A rank takes no part: its program, or a policy, sets the strategy."""


class Improvement:
    """Improvement of ``auto`` in one group, on one rank.

    Args:
        session: of the group.
        group: of the ranks.
        mailbox: of the group.
        name: of the group, for the log.
        pace: when it begins, and what it may cost.
    """

    def __init__(self, session: Session, group: Group, mailbox: Mailbox, name: str, pace: Pace) -> None:
        self._session = session
        self._group = group
        self._layout = group.layout  # with rates, once they are known
        self._name = name
        self._pace = pace
        self._chosen: SizedStrategy | None = None
        self._directed = Directed(group, mailbox, self._answer)
        self._prober = LinkProber(group, pace)
        self._is_holding = False
        self._turn = asyncio.Lock()  # the end of a question may come after the next one
        self._asked: int | None = None  # question about which the others wait to be told
        self._task: asyncio.Task[None] | None = None
        self._patience = Patience(group, pace, self._begin)
        if group.view.rank == FIRST:
            self._patience.start()

    def drains(self) -> list[Drain]:
        """Ask nothing more; return the waits for what the others have yet to hear. May be called again."""
        self._patience.stop()
        self._end()
        if self._task is not None:
            self._task.cancel()
        return self._directed.drains()

    def close(self) -> None:
        """Take no part any more; calls that were held are made, and end with the group."""
        self.drains()
        self._release()

    def group_ids(self) -> set[bytes]:
        """Groups that were made for it."""
        return self._prober.group_ids()

    # ---------------------------------------------------------------- the first rank

    def _begin(self) -> None:
        if not self._group.is_set:
            loop = self._group.engine.loop
            self._task = loop.create_task(self._direct(), name=f"kfcomm improves auto of {self._name}")

    async def _direct(self) -> None:
        try:
            await self._improve()
        except TakesNoPart:
            logger.debug("auto of group %r stays as it is: the program sets its strategy", self._name)
        except (PeerLost, EpochChanged, SessionClosed) as error:
            logger.debug("auto of group %r stays as it is: %s", self._name, error)
        except KfcommError as error:  # a rank is late, or a link broke
            logger.debug("auto of group %r: %s", self._name, error)
            self._patience.start()

    async def _improve(self) -> None:
        rates = self._layout.costs.rates or self._session.rates_of(self._group.view)
        if rates is None:
            if await self._are_alike():
                logger.info("auto of group %r keeps its graphs: its hosts are alike", self._name)
                return
            rates = await self._measured()
        self._learn(self._layout.costs._replace(rates=rates))
        gain = await self._gain()
        chosen = self._chosen
        is_worth = chosen is not None and gain.factor >= self._pace.worth
        question = [list(self._layout.costs), is_worth]
        theirs = await self._directed.answers(self._directed.begin(CHOOSE, question), self._pace.patience_s)
        if chosen is None or not is_worth:
            logger.info("auto of group %r keeps its graphs, which fit the links: %s", self._name, shown(rates))
        elif any(digest != chosen.digest for digest in theirs):
            logger.warning("auto of group %r keeps its graphs: ranks find others by the same rates", self._name)
        else:
            await self._change(chosen)
            logger.info(
                "auto of group %r changes its graphs to fit the links: %s; predicted to be %.2f times as fast",
                self._name, shown(rates), gain.factor,
            )  # fmt: skip

    async def _are_alike(self) -> bool:
        from kfcomm.probe.passive import are_alike

        seen = list(self._seen())
        for row in await self._directed.answers(self._directed.begin(LOOK, None), self._pace.patience_s):
            seen += row
        return are_alike(seen, self._layout.num_hosts)

    async def _measured(self) -> Rates:
        """Measure the links, while no rank begins a call."""
        try:
            self._asked = number = self._directed.begin(MEASURE, None)
            within_s = self._patience.within_s
            answers = await self._directed.answers(number, within_s)
            if None in answers or self._hold() is None:
                raise TakesNoPart
            self._directed.tell(number, PROBE, within_s)
            rates = await self._prober.run(within_s)
        finally:
            self._end()
            self._release()
        if rates is None:
            raise CollectiveError("the links could not be measured", key=MEASURE)
        return rates

    async def _gain(self) -> Gain:
        """Choose, and predict what that gains."""
        group, found = self._group, []
        sizes: Mapping[int, int] = group.sizes_in_use() or USUAL

        def compute() -> None:
            chosen = auto_before(self._layout)
            found.append((chosen, predicted_gain(group.strategy, chosen, self._layout, sizes)))

        await in_a_thread(compute)
        ((self._chosen, gain),) = found
        return gain

    async def _change(self, chosen: SizedStrategy) -> None:
        try:
            self._asked = number = self._directed.begin(CHANGE, None)
            told = await self._directed.answers(number, self._patience.within_s)
            # From here to the end nothing else runs on this rank: what it has begun by now is what counts.
            group = self._group
            if None in told or group.waits or group.is_set:
                raise TakesNoPart
            first = first_uses([group.uses(), *told])
            group.change(chosen, self._layout, GENERATION + number, first)
            self._directed.tell(number, CHANGE, first)
            self._asked = None
        finally:
            self._end()

    def _end(self) -> None:
        """Tell the others that nothing more is to be done about the question, if they wait for that."""
        number, self._asked = self._asked, None
        if number is not None:
            self._directed.tell(number, END)

    # ---------------------------------------------------------------- the others

    async def _answer(self, number: int, kind: str, content: Any) -> None:
        match kind:
            case "look":
                self._directed.answer(number, self._seen())
            case "choose":
                costs, is_worth = content
                self._learn(Costs.of_record(costs))
                if is_worth:
                    await in_a_thread(self._choose)
                self._directed.answer(number, b"" if self._chosen is None else self._chosen.digest)
            case "measure" | "change":
                async with self._turn:
                    await self._hold_for(number)

    def _choose(self) -> None:
        self._chosen = auto_before(self._layout)

    async def _hold_for(self, number: int) -> None:
        """Hold calls, and do what the first rank tells."""
        self._directed.answer(number, self._hold())
        try:
            what, content = await self._directed.told(number, 0)
            if what == PROBE:
                await self._prober.run(content)
                what, content = await self._directed.told(number, 1)
            if what == CHANGE and self._is_holding and self._chosen is not None:
                self._group.change(self._chosen, self._layout, GENERATION + number, content)
        except CollectiveTimeout as error:
            logger.warning("auto of group %r: rank 0 has not said which graphs are in force: %s", self._name, error)
        except KfcommError as error:  # of the end of a rank, an epoch or a group
            logger.debug("auto of group %r stays as it is: %s", self._name, error)
        finally:
            self._release()

    # ---------------------------------------------------------------- all

    def _seen(self) -> list[SeenLink]:
        return seen_links(self._group)

    def _learn(self, costs: Costs) -> None:
        self._layout = replace(self._layout, costs=costs)
        if costs.rates is not None and self._group.view is self._session.world:
            self._session.know(costs.rates)

    def _hold(self) -> Any:
        uses = self._group.hold()
        self._is_holding = uses is not None
        return uses

    def _release(self) -> None:
        if self._is_holding:
            self._is_holding = False
            self._group.release()


def shown(rates: Rates) -> str:
    """The slowest and the fastest link, in words."""
    links = [(rate, a, b) for a, row in enumerate(rates.links) for b, rate in enumerate(row) if a != b]
    (least, a, b), most = min(links), max(links)[0]
    return f"{least / 1e6:.3g} MB/s from host {a} to host {b}, up to {most / 1e6:.3g} MB/s between others"
