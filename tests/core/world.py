"""A simulated world: routers joined by links that keep their order, in plain synchronous code.

Everything that can happen is a *token* in one bag: a rank posts, a link reads a payload, delivers a frame or says
that it reads no more, news of an abort arrives, a rank notices that a link broke. ``run`` takes all tokens, in an
order chosen by the test. All frames go through msgpack; payloads are copied as late as a real link may copy them, or
as early; blocks of memory are counted.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgpack
import numpy as np

from kfcomm.core.calls import Tell
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.collective import Collective, GroupView
from kfcomm.core.frame import Header, Kind, decode_header
from kfcomm.core.links import DEFAULT_CREDIT, LINKS, Credit, Early, Incoming, Outgoing, admit, announce
from kfcomm.core.machine import DOWN, INPUT, PARTIAL, PAYLOAD, RESULT, Do, Effect
from kfcomm.core.program import Lane
from kfcomm.core.recorder import EffectRecorder
from kfcomm.core.router import Router
from tests.core.specs import ITEM, Spec

MAX_STEPS = 1_000_000


Reader = tuple[int, tuple[int, ...], int, int, int]


def reader(effect: Effect) -> Reader:
    """Identity of a SEND to one destination, the same when it is emitted again."""
    _, collective, to, lane, index, phase, _, _ = effect
    return id(collective), to, lane.number, index, phase


class Payload:
    """A chunk that arrived. It lies in a block of the arena, in reserved memory (-1), or where it belongs."""

    def __init__(self, node: Node, data: np.ndarray, block: int, memory: Memory | None) -> None:
        self.node = node
        self.data = data
        self.block = block
        self.placed_in = memory
        self.readers: set[Reader] = set()
        self.held = False
        self.released = False
        node.payloads.add(self)

    def read_by(self, effect: Effect) -> None:
        assert not self.released or reader(effect) in self.readers
        self.readers.add(reader(effect))

    def read_no_more(self, effect: Effect) -> None:
        self.readers.discard(reader(effect))
        self._free()

    def release(self) -> None:
        assert not self.released, "released twice"
        self.released = True
        self._free()

    def _free(self) -> None:
        if self.released and not self.readers and self in self.node.payloads:
            self.node.payloads.remove(self)
            if self.block >= 0:
                self.node.free_blocks.append(self.block)


class Memory:
    """The arrays of one collective on one rank. ``shared``: partial results are kept in the result's memory."""

    def __init__(self, spec: Spec, rank: int) -> None:
        self.spec = spec
        self.rank = rank
        self.input = spec.source(rank)
        self.pristine = self.input.copy()
        self.result = np.full(spec.result_count(rank), np.nan, ITEM)
        self.shared = not spec.wide and self.result.size == self.input.size
        self.partial = self.result if self.shared else np.full(self.input.size, np.nan, spec.accumulate)
        self.reserved: set[tuple[int, ...]] = set()
        self.readers: dict[Reader, Payload] = {}
        self.collective: Collective
        self.done = False
        self.cause: Cause | None = None
        self.next_token: tuple | None = None

    def part(self, lane: Lane, index: int, source: int) -> np.ndarray:
        array = (self.input, self.partial, self.result)[source]
        at_input = source == INPUT or (source == PARTIAL and not self.shared)
        offset = lane.input_offset if at_input else lane.result_offset
        start, stop = index * self.spec.chunk, min((index + 1) * self.spec.chunk, lane.count)
        assert offset + stop <= array.size
        return array[offset + start : offset + stop]

    def fold(self, lane: Lane, index: int, payload: Payload, first: bool) -> None:
        partial = self.part(lane, index, PARTIAL)
        own = self.part(lane, index, INPUT).astype(partial.dtype) if first else partial
        np.add(own, payload.data.astype(partial.dtype), out=partial)

    def store(self, lane: Lane, index: int, payload: Payload) -> None:
        assert payload.placed_in in (None, self)
        self.part(lane, index, RESULT)[:] = payload.data

    def check(self) -> None:
        assert self.done
        assert np.array_equal(self.input, self.pristine)
        assert self.result.tobytes() == self.spec.expected(self.rank).tobytes(), self.spec


@dataclass(eq=False)
class Frame:
    """A frame on its way; ``owner`` and ``effect`` while a payload is read from its memory."""

    header: bytes
    data: np.ndarray | None = None
    memory: Memory | None = None
    effect: Effect | None = None
    charged: bool = False

    @property
    def is_view(self) -> bool:
        return self.memory is not None


@dataclass(eq=False)
class Wire:
    """A directed link, both ends of it.

    ``streaming`` is a partly received chunk. A broken link accepts frames until its sender has ``noticed``, and
    delivers the frames that ``still`` arrive until its receiver is ``deaf``. ``posted`` is how often the sender had
    used each name when it noticed.
    """

    outgoing: Outgoing
    incoming: Incoming
    queue: deque[Frame] = field(default_factory=deque)
    answers: deque[bytes] = field(default_factory=deque)
    unsent: list[tuple[Memory, Effect]] = field(default_factory=list)
    streaming: tuple | None = None
    broken: bool = False
    still: int = 0
    noticed: bool = False
    deaf: bool = False
    posted: dict[tuple[bytes, str], int] = field(default_factory=dict)
    chunks: int = 0
    nbytes: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether all credit is accounted for, when nothing moves."""
        sender, receiver = self.outgoing.window, self.incoming.window
        owed = receiver._owed_nbytes, receiver.owed_headers
        credit = receiver._credit
        return (
            owed
            == (receiver._spent_nbytes, receiver._spent_headers)
            == (
                credit.nbytes - sender.nbytes,
                credit.headers - sender.headers,
            )
        )


class Node:
    """One rank: its router, its memory, its ends of links."""

    def __init__(self, rank: int, num_blocks: int) -> None:
        self.rank = rank
        self.router = Router(rank)
        self.num_blocks = num_blocks
        self.free_blocks = list(range(num_blocks))
        self.payloads: set[Payload] = set()
        self.wires: dict[int, Wire] = {}
        self.effects: list[Effect] = []
        self.dead = False

    def block(self) -> int:
        return self.free_blocks.pop() if self.free_blocks else -1


@dataclass(frozen=True)
class Weather:
    """How the world behaves: bounds, and in which order things happen."""

    seed: int = 0
    order: str = "uniform"
    credit: Credit = DEFAULT_CREDIT
    num_blocks: int = 4
    streamed: float = 0.5
    settled: float = 0.7

    ORDERS = ("uniform", "newest", "oldest", "starved", "waves")


class World:
    """Ranks, links and the bag of what can happen next."""

    def __init__(self, size: int, weather: Weather | None = None) -> None:
        self.weather = weather or Weather()
        self.random = random.Random(self.weather.seed)
        self.nodes = [Node(rank, self.weather.num_blocks) for rank in range(size)]
        self.tokens: list[tuple] = []
        self.memories: dict[tuple[Spec, int, int], Memory | Cause] = {}
        self.memory_of: dict[Collective, Memory] = {}
        self.wires: list[Wire] = []
        self.violations: list[tuple[Incoming, str]] = []
        self.early: list[tuple] = []
        self.short = self.long = 0  # whole chunks that were taken at once, and those that were not
        self._views: dict[tuple[bytes, int], GroupView] = {}
        self._starved = self.random.randrange(size)

    # ---------------------------------------------------------------- what tests do

    def plan(self, rank: int, chain: Sequence[Spec]) -> None:
        """``rank`` posts these one after the other: each when the one before is over, unless they may overlap."""
        if chain:
            self.tokens.append((self._post_next, rank, list(chain), 0))

    def plan_all(self, chains: Iterable[Sequence[Spec]]) -> None:
        """Every member posts every chain, each rank in an order of its own."""
        mine = [(rank, chain) for chain in chains for rank in chain[0].members]
        self.random.shuffle(mine)
        for rank, chain in mine:
            self.plan(rank, chain)

    def run(self, steps: int = MAX_STEPS) -> None:
        """Let things happen until nothing can, or for a number of steps."""
        for _ in range(steps):
            if not self.tokens:
                return
            act, *arguments = self.tokens.pop(self._pick())
            act(*arguments)
        assert steps < MAX_STEPS, "a world that never comes to rest"

    def wait(self) -> None:
        """Time passes: what waits announces itself, and the world runs on."""
        self.announce()
        self.run()

    def announce(self) -> None:
        """Announce every waiting collective."""
        for node in self.nodes:
            for collective in list(node.router.live) if not node.dead else ():
                for to in collective.unheard():
                    wire = self.wire(node.rank, collective.group.members[to])
                    for header in announce(wire.outgoing, collective):
                        self._send(wire, Frame(msgpack.packb(header)))

    def post(self, rank: int, spec: Spec) -> Memory | Cause:
        """Post now."""
        node = self.nodes[rank]
        group = self.view(spec.members, rank)
        memory = Memory(spec, group.rank)
        seq = self.seq(rank, spec)
        outcome = node.router.post(spec.post(group), EffectRecorder(node.effects), node.effects)
        assert node.router.is_posted(spec.group_id, spec.name, seq)
        posted: Memory | Cause = outcome if isinstance(outcome, Cause) else memory
        if isinstance(outcome, Collective):
            assert outcome.seq == seq
            memory.collective = outcome
            self.memory_of[outcome] = memory
        self.memories[spec, seq, rank] = posted
        self.perform(node)
        return posted

    def abort(self, rank: int, spec: Spec, seq: int, kind: CauseKind = CauseKind.TIMEOUT) -> None:
        """Cancel the call at ``rank``, if it waits."""
        memory = self.memories.get((spec, seq, rank))
        if isinstance(memory, Memory):
            node = self.nodes[rank]
            node.router.abort(memory.collective, Cause(kind, rank, f"{kind} on {rank}"), node.effects)
            self.perform(node)

    def send(self, wire: Wire, header: Header, data: np.ndarray | None = None) -> None:
        """Send a frame that no router made."""
        self._send(wire, Frame(msgpack.packb(header), data))

    def refuse(self, rank: int, spec: Spec) -> None:
        """A call of ``rank`` fails its local checks."""
        node, seq = self.nodes[rank], self.seq(rank, spec)
        cause = node.router.refuse(self.view(spec.members, rank), spec.name, "bad argument", node.effects)
        self.memories[spec, seq, rank] = cause
        self.perform(node)

    def crash(self, rank: int) -> None:
        """A rank is gone: its links break, the others hear of it some time later."""
        self.nodes[rank].dead = True
        for wire in self.wires:
            if rank in (wire.outgoing.peer, wire.incoming.peer) and not wire.broken:
                self.break_wire(wire, "both")
        for node in self.nodes:
            self.tokens.append((self._lost, node, rank))

    def break_wire(self, wire: Wire, noticed_by: str = "") -> None:
        """A link breaks: some of what was sent still arrives. Both ends notice some time later, or one does."""
        wire.broken = True
        wire.still = self.random.randint(0, len(wire.queue) + (wire.streaming is not None))
        choices = ["both", "both", "sender", "receiver"][: 4 if wire.incoming.number else 3]
        noticed_by = noticed_by or self.random.choice(choices)
        if noticed_by != "receiver":
            self.tokens.append((self._broken_for_sender, wire))
        if noticed_by != "sender":
            self.tokens.append((self._broken_for_receiver, wire))

    def wire(self, source: int, target: int) -> Wire:
        """The link between two ranks, opened if need be."""
        wire = self.nodes[source].wires.get(target)
        if wire is None:
            self.nodes[source].router.credit = self.nodes[target].router.credit = self.weather.credit
            outgoing, first = self.nodes[source].router.open(target)
            wire = self.nodes[source].wires[target] = Wire(outgoing, self.nodes[target].router.opened(source))
            self.wires.append(wire)
            for header in first:
                self._send(wire, Frame(msgpack.packb(header)))
            if self.nodes[source].dead or self.nodes[target].dead:
                self.break_wire(wire, "both")
        return wire

    def receiver(self, incoming: Incoming) -> int:
        """The rank at which this end of a link is."""
        return next(wire.outgoing.peer for wire in self.wires if wire.incoming is incoming)

    def view(self, members: tuple[int, ...], rank: int) -> GroupView:
        """The group of these ranks as one of them sees it."""
        view = self._views.get((bytes(members), rank))
        if view is None:
            view = self._views[bytes(members), rank] = GroupView(bytes(members), members, members.index(rank))
        return view

    def seq(self, rank: int, spec: Spec) -> int:
        """The number that the next use of this key on this rank gets."""
        key = self.nodes[rank].router.names.find(spec.group_id, spec.name)
        return 0 if key is None else key.next_seq

    # ---------------------------------------------------------------- what must hold when nothing moves

    def outcomes(self, spec: Spec) -> list[Memory | Cause]:
        """Outcomes of the uses of a spec, on every rank that posted it."""
        return [outcome for (one, _, _), outcome in self.memories.items() if one == spec]

    def check_done(self, specs: Iterable[Spec]) -> None:
        """All of these are complete and right, on every member."""
        for spec in specs:
            outcomes = self.outcomes(spec)
            assert len(outcomes) >= len(spec.members)
            for outcome in outcomes:
                assert isinstance(outcome, Memory), (spec, outcome)
                assert outcome.done, (spec, outcome.rank, outcome.cause)
                outcome.check()

    def check_failed(self, spec: Spec, *kinds: CauseKind) -> list[Cause]:
        """It failed on every member, and for one of these kinds of causes."""
        causes = []
        outcomes = self.outcomes(spec)
        assert outcomes
        for outcome in outcomes:
            cause = outcome if isinstance(outcome, Cause) else outcome.cause
            assert cause is not None, (spec, outcome)
            assert cause.kind in kinds
            if isinstance(outcome, Memory):
                assert np.array_equal(outcome.input, outcome.pristine)
            causes.append(cause)
        return causes

    def check_at_rest(self, aborted: int = 0) -> None:
        """Nothing is left but names: no memory, no early arrivals, no aborted calls; all credit is back."""
        for node in self.nodes:
            if node.dead:
                continue
            router = node.router
            assert not router.live
            assert len(router.dead) <= aborted
            for key in router.names:
                assert not key.live
                assert not key.early
            assert not node.payloads
            assert sorted(node.free_blocks) == list(range(node.num_blocks))
        for wire in self.wires:
            if not wire.broken:
                assert not wire.queue
                assert not wire.answers
                assert not wire.unsent
                assert wire.incoming.asks == 0
                assert wire.is_whole

    # ---------------------------------------------------------------- tokens

    def _pick(self) -> int:
        tokens, chance = self.tokens, self.random
        match self.weather.order:
            case "newest":
                return len(tokens) - 1 if chance.random() < 0.9 else chance.randrange(len(tokens))
            case "oldest":
                return 0
            case "waves":
                return chance.randrange(min(len(tokens), 8))
            case "starved":
                for _ in range(4):
                    choice = chance.randrange(len(tokens))
                    if not self._concerns(tokens[choice], self._starved):
                        return choice
        return chance.randrange(len(tokens))

    @staticmethod
    def _concerns(token: tuple, rank: int) -> bool:
        what = token[1]
        return what.outgoing.peer == rank if isinstance(what, Wire) else what == rank

    def _post_next(self, rank: int, chain: list[Spec], place: int) -> None:
        if self.nodes[rank].dead or place == len(chain):
            return
        before = self.memories.get((chain[place - 1], self.seq(rank, chain[0]) - 1, rank)) if place else None
        if isinstance(before, Memory) and not (before.done or before.cause or chain[place].overlapping):
            before.next_token = (self._post_next, rank, chain, place)
            return
        self.post(rank, chain[place])
        self.tokens.append((self._post_next, rank, chain, place + 1))

    def _over(self, memory: Memory) -> None:
        if memory.next_token is not None:
            self.tokens.append(memory.next_token)

    def _deliver(self, wire: Wire) -> None:
        node = self.nodes[wire.outgoing.peer]
        if wire.deaf or node.dead or (wire.broken and not wire.still):
            return
        wire.still -= wire.broken
        if wire.streaming is not None:
            ticket, payload = wire.streaming
            wire.streaming = None
            node.router.arrived(ticket, payload, node.effects)
        elif wire.queue:
            self._receive(wire, node, wire.queue.popleft())
        self.perform(node)
        if self.random.random() < self.weather.settled:
            owed = wire.incoming.window.settle()
            if owed is not None:
                self.answer(wire, (Kind.CREDIT, owed.nbytes, owed.headers))

    def _receive(self, wire: Wire, node: Node, frame: Frame) -> None:
        if frame.is_view:
            self._take(wire, frame)
        header = decode_header(frame.header)
        router = node.router
        match header[0]:
            case Kind.OPEN:
                wire.incoming.number = header[1]
                for other in self._same_way(wire):
                    if other.outgoing.number < wire.outgoing.number:
                        self._deafen(other)
            case Kind.KEY:
                router.define_key(wire.incoming, header, node.effects)
            case Kind.SIGNATURE:
                router.define_signature(wire.incoming, *header[1:], node.effects)
            case Kind.ASK:
                router.on_ask(wire.incoming, header, node.effects)
            case _:
                self._chunk(wire, node, header, frame.data)

    def _chunk(self, wire: Wire, node: Node, header: Header, data: np.ndarray | None) -> None:
        nbytes = 0 if data is None else data.nbytes
        if self.random.random() >= self.weather.streamed:
            self._whole(wire, node, header, Payload(node, np.empty(0, ITEM) if data is None else data, -1, None))
            return
        ticket = node.router.match(wire.incoming, header, nbytes, node.effects)
        self.perform(node)
        if ticket is None:
            return
        payload = self._room(node, ticket, np.empty(0, ITEM) if data is None else data)
        if nbytes:
            wire.streaming = (ticket, payload)
            self.tokens.append((self._deliver, wire))
        else:
            node.router.arrived(ticket, payload, node.effects)

    def _whole(self, wire: Wire, node: Node, header: Header, shown: Payload) -> None:
        """A chunk that came as a whole: the short way if that takes it, else the long one, as in the engine."""
        nbytes = shown.data.nbytes
        whose = node.router.receive(wire.incoming, header, nbytes, shown, node.effects)
        if whose is not None:
            self.short += 1
            self.perform(node)
            assert shown.held or shown not in node.payloads, "it may be read during the call only, unless it is held"
            return
        assert not any(shown in effect for effect in node.effects)
        ticket = node.router.match(wire.incoming, header, nbytes, node.effects)
        if ticket is None:
            shown.release()  # nobody's
        else:
            self.long += 1
            node.router.arrived(ticket, shown, node.effects)

    def _room(self, node: Node, ticket: tuple, data: np.ndarray) -> Payload:
        """DESIGN: a posted collective can always absorb its chunks; an early one has its peer's credit."""
        if isinstance(ticket[0], Early):
            return Payload(node, data, -1, None)
        collective, route, index = ticket
        memory = self.memory_of[collective]
        if route.phase == DOWN and route.lane.keeps:
            return Payload(node, data, -1, memory)
        block = node.block()
        if block < 0:
            place = (route.lane.number, index, route.phase, route.position)
            assert place not in memory.reserved, "reserved memory is used once"
            memory.reserved.add(place)
        return Payload(node, data, block, None)

    def _answered(self, wire: Wire) -> None:
        node = self.nodes[wire.incoming.peer]
        if wire.broken or node.dead or not wire.answers:
            return
        header = decode_header(wire.answers.popleft())
        if header[0] == Kind.CREDIT:
            wire.outgoing.window.give(header[1], header[2])
        else:
            node.router.on_posted(wire.outgoing, header[1], header[2], node.effects)
        self.perform(node)

    def _taken(self, wire: Wire) -> None:
        frame = next((frame for frame in wire.queue if frame.is_view), None)
        if frame is not None and not wire.noticed:
            self._take(wire, frame)

    def _take(self, wire: Wire, frame: Frame) -> None:
        """The link has read this payload; it says so some time later."""
        assert frame.data is not None
        assert frame.memory is not None
        frame.data = frame.data.copy()
        wire.unsent.append((frame.memory, frame.effect or ()))
        self.tokens.append((self._sent, wire))
        frame.memory = frame.effect = None

    def _sent(self, wire: Wire) -> None:
        if not wire.unsent or wire.noticed:
            return
        memory, effect = wire.unsent.pop(self.random.randrange(len(wire.unsent)))
        self._read_no_more(memory, effect)
        memory.collective.was_read()
        self.perform(self.nodes[wire.incoming.peer])

    def _heard(self, rank: int, group_id: bytes, name: str, seq: int, cause: list) -> None:
        node = self.nodes[rank]
        if not node.dead:
            node.router.on_abort(group_id, name, seq, Cause.from_wire(cause), node.effects)
            self.perform(node)

    def _lost(self, node: Node, peer: int) -> None:
        if node.dead:
            return
        node.router.on_peer_lost(peer, Cause(CauseKind.LOST, peer, f"rank {peer} is lost"), node.effects)
        self.perform(node)

    def _broken_for_sender(self, wire: Wire) -> None:
        node, peer = self.nodes[wire.incoming.peer], wire.outgoing.peer
        if wire.noticed or node.dead:
            return
        if self.random.random() < 0.5:
            self._let_go(wire)
        wire.noticed = True
        wire.posted = {(group_id, name): uses for group_id, name, uses in node.router.uses()}
        if node.wires.get(peer) is wire:
            del node.wires[peer]
        carried = node.router.broke(wire.outgoing)
        self.tokens.append((self._verdict, node, carried, Cause(CauseKind.LINK, node.rank, "no route")))
        self.tokens.append((self._redial, node.rank, peer))

    def _let_go(self, wire: Wire) -> None:
        """The link ends: it tells the owners of what it did not send the same as of what it sent."""
        for frame in [frame for frame in wire.queue if frame.is_view]:
            self._take(wire, frame)
        while wire.unsent:
            self._sent(wire)

    def _redial(self, rank: int, peer: int) -> None:
        node = self.nodes[rank]
        if not (node.dead or self.nodes[peer].dead) and node.router.owes(peer):
            self.wire(rank, peer)

    def _broken_for_receiver(self, wire: Wire) -> None:
        node, number = self.nodes[wire.outgoing.peer], wire.incoming.number
        self._deafen(wire)
        if number and not node.dead:
            cause = Cause(CauseKind.LINK, node.rank, "no route")
            for _ in range(self.random.randint(1, 2)):
                self._tell(node, (Tell.FLOOD, LINKS, str(wire.incoming.peer), number, cause))

    def _same_way(self, wire: Wire) -> list[Wire]:
        ends = wire.incoming.peer, wire.outgoing.peer
        return [other for other in self.wires if (other.incoming.peer, other.outgoing.peer) == ends]

    @staticmethod
    def _deafen(wire: Wire) -> None:
        wire.deaf = True
        if wire.streaming is not None:
            wire.streaming[1].release()
            wire.streaming = None

    def _verdict(self, node: Node, carried: list[Collective], cause: Cause) -> None:
        """Time has shown that the peer lives (else they have failed by its loss): what the link carried fails."""
        for collective in carried:
            node.router.abort(collective, cause, node.effects)
        self.perform(node)

    # ---------------------------------------------------------------- effects

    def perform(self, node: Node) -> None:
        """Carry out effects in order, as the engine does; the list may grow meanwhile."""
        while node.effects:
            effect = node.effects.pop(0)
            if effect[0] == Tell.RESUME and effect[1] in node.router.live:
                effect[1].resume(effect[2])
            if effect[0] >= Tell.ANSWER:
                self._tell(node, effect)
                continue
            memory = self.memory_of[effect[1]]
            if memory.cause is None:
                self._do(node, memory, effect)
            if effect[0] == Do.RELEASE:
                effect[2].release()
            elif effect[0] in (Do.FOLD, Do.FOLD_UP, Do.FOLD_LAST, Do.STORE):
                effect[4].release()

    def _do(self, node: Node, memory: Memory, effect: Effect) -> None:
        assert not memory.done
        match effect[0]:
            case Do.SEND:
                for to in effect[2]:
                    self._carry(node, memory, (*effect[:2], (to,), *effect[3:]))
            case Do.FOLD | Do.FOLD_UP:
                memory.fold(*effect[2:])
            case Do.HOLD:
                effect[2].held = True
            case Do.FOLD_LAST:
                memory.fold(*effect[2:])
                _, _, lane, index, _, _ = effect
                memory.part(lane, index, RESULT)[:] = memory.part(lane, index, PARTIAL)
            case Do.FINISH:
                _, _, lane, index = effect
                memory.part(lane, index, RESULT)[:] = memory.part(lane, index, INPUT)
            case Do.STORE:
                memory.store(*effect[2:])
            case Do.COPY:
                _, _, lane, index = effect
                memory.part(lane, index, RESULT)[:] = memory.part(lane, index, INPUT)
            case Do.DONE:
                node.router.complete(effect[1])
                memory.done = True
                assert not memory.readers
                assert not any(frame.memory is memory for wire in node.wires.values() for frame in wire.queue)
                self._over(memory)

    def _tell(self, node: Node, effect: Effect) -> None:
        match effect[0]:
            case Tell.ANSWER:
                wire = next(wire for wire in self.wires if wire.incoming is effect[1])
                self.answer(wire, effect[2])
            case Tell.FAILED:
                self._failed(node, self.memory_of[effect[1]], effect[2])
            case Tell.FLOOD:
                _, group_id, name, seq, cause = effect
                for other in self.nodes:
                    if other is not node:
                        self.tokens.append((self._heard, other.rank, group_id, name, seq, cause.to_wire()))
            case Tell.VIOLATION:
                self.violations.append(effect[1:])
                wire = next((wire for wire in self.wires if wire.incoming is effect[1]), None)
                if wire is not None and not wire.broken:
                    self.break_wire(wire)
            case Tell.EARLY:
                self.early.append((node.rank, *effect[1:]))
            case Tell.DROPPED:
                effect[1].release()
            case Tell.BROKEN:
                wire = node.wires.get(effect[1])
                if wire is not None and wire.outgoing.number == effect[2]:
                    self._broken_for_sender(wire)

    def _carry(self, node: Node, memory: Memory, effect: Effect) -> None:
        _, collective, (to,), lane, index, phase, source, payload = effect
        if source == PAYLOAD:
            payload.read_by(effect)
            memory.readers[reader(effect)] = payload
            data = payload.data
        else:
            data = memory.part(lane, index, source)
        assert data.nbytes == collective.nbytes_sent(lane.number, index, phase)
        wire = self.wire(node.rank, collective.group.members[to])
        before, header = admit(wire.outgoing, collective, to, (lane, index, phase, source, payload), data.nbytes)
        for definition in before:
            self._send(wire, Frame(msgpack.packb(definition)))
        if header is None:
            return
        wire.chunks += 1
        wire.nbytes += data.nbytes
        self.tokens.append((self._taken, wire))
        self._send(wire, Frame(msgpack.packb(header), data, memory, effect, bool(header[7] & 1)))

    def _send(self, wire: Wire, frame: Frame) -> None:
        wire.queue.append(frame)
        self.tokens.append((self._deliver, wire))

    def answer(self, wire: Wire, header: Header) -> None:
        """Send a small frame back."""
        wire.answers.append(msgpack.packb(header))
        self.tokens.append((self._answered, wire))

    def _failed(self, node: Node, memory: Memory, cause: Cause) -> None:
        memory.cause = cause
        for wire in self.wires:
            if wire.incoming.peer != node.rank:
                continue
            for frame in [one for one in wire.queue if one.memory is memory]:
                wire.queue.remove(frame)
                if frame.charged:
                    assert frame.data is not None
                    wire.outgoing.window.give(frame.data.nbytes, 1)
            wire.unsent = [one for one in wire.unsent if one[0] is not memory]
        for payload in memory.readers.values():
            payload.readers.clear()
            payload._free()
        memory.readers.clear()
        self._over(memory)

    def _read_no_more(self, memory: Memory, effect: Effect) -> None:
        payload = memory.readers.pop(reader(effect), None)
        if payload is not None:
            payload.read_no_more(effect)
