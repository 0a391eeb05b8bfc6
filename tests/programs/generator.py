"""Makes a program of a seed: the same on every rank, and one that is right by the documentation.

A shorter program of a seed is the beginning of a longer one, so that a failure can be cut down to the calls it needs.

What keeps a program right: no name is used while it is in flight; a set of names neither, for ``all_reduce_many``; the
n-th receive of a tag belongs to the n-th send; a queue is never put more into than it holds; what is requested has been
saved on a rank that all others know to have come so far, and is not saved over before they have it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.programs.arrays import DTYPES, FLOATS, OPS, Shape
from tests.programs.calls import Call, Close, Do, Make, Pipe, Program, Step, Together, Wait
from tests.programs.collectives import IN_PLACE, REDUCING, WIRED, Agreement, Collective, Many, Swap
from tests.programs.messages import Get, Message, Objects, Put, Recv, Request, Save, Send

MAX_IN_FLIGHT = 24
MAX_GROUPS = 4
REPEATED = tuple(f"grad/{number}" for number in range(8))
STEADY = tuple(f"steady/{number}" for number in range(12))
"""Names that mean the same call whenever they come, in any program: so they come to have slots."""
FRESH_NAMESPACES = 100
"""A world keeps every name it has met, so programs far apart use the same fresh ones."""

SMALL_NBYTES, MEDIUM_NBYTES, LARGE_NBYTES = 64, 64 << 10, (1 << 20, 3 << 20)
MEDIUM, LARGE = 0.03, 0.003
STRATEGIES = (
    "star", "ring", "binary_tree", "clique", "binomial", "chain_star", "tree", "multi_star", "auto", "direct",
    "auto", "direct", "auto", "direct", "binary_tree_star", "multi_binary_tree_star",
    {"<=1KiB": "star", "else": "ring"},
)  # fmt: skip
COLLECTIVES = (
    "all_reduce", "all_reduce", "all_reduce", "reduce", "reduce_scatter", "broadcast", "gather", "all_gather",
    "scatter", "all_to_all",
)  # fmt: skip
PRIORITIES = (-300, -1, 1, 32767)
TAGS: tuple[int | str, ...] = (0, 1, "1", "tag")
MESSAGE_DTYPES = ("int64", "float32", "uint8", "bfloat16", "complex64")


@dataclass(slots=True)
class Group:
    """A communicator as far as the program has come.

    Attributes:
        members: ranks of the world.
        busy: names in flight.
        channels: by source, target, tag and kind: halves of messages whose other halves are to come.
        queues: by pipe, what was put and not taken.
        saved: by key: the save, when it was made, and when it was last requested, in meetings of all ranks.
        swaps: numbers of the changes of strategy in flight.
    """

    number: int
    members: tuple[int, ...]
    busy: set[str] = field(default_factory=set)
    channels: dict[tuple[Any, ...], deque[Half]] = field(default_factory=dict)
    queues: dict[Pipe, deque[Message]] = field(default_factory=dict)
    saved: dict[str, Saved] = field(default_factory=dict)
    swaps: set[int] = field(default_factory=set)

    @property
    def size(self) -> int:
        return len(self.members)


@dataclass(frozen=True, slots=True)
class Half:
    """One end of a message, and the number of its call, which cannot be awaited yet."""

    sends: bool
    message: Message
    number: int


@dataclass(slots=True)
class Saved:
    """Saved blob of a rank: the meeting that announces it, and the meeting after which it is not requested any more."""

    save: Save
    since: int
    until: int
    asked: set[int] = field(default_factory=set)


def program(seed: int, calls: int, size: int) -> Program:
    """The program of a seed, with about so many calls, for so many ranks."""
    return _Generator(seed, calls, size).run()


class _Generator:
    """One program in the making. Everything random comes from ``_random``, in the order of the program."""

    def __init__(self, seed: int, calls: int, size: int) -> None:
        self._seed, self._calls, self._size = seed, calls, size
        self._random = random.Random(f"{seed} {size}")
        self._steps: list[Step] = []
        self._groups = [Group(0, tuple(range(size)))]
        self._open = [self._groups[0]]
        self._number = 0
        self._meetings = 0
        self._in_flight: dict[int, tuple[Group, Sequence[str]]] = {}
        self._halves: set[int] = set()
        self._blocking = self._random.choice((0.2, 0.5, 0.8))
        self._is_urgent = self._random.random() < 0.3
        self._menu: list[tuple[int, Callable[[Group], None]]] = [
            (40, self._collective),
            (15, self._steady),
            (3, self._series),
            (6, self._many),
            (8, self._agreement),
            (8, self._objects),
            (5, self._together),
            (12, self._message),
            (2, self._funnel),
            (6, self._queue),
            (4, self._blob),
            (4, self._swap),
            (1, self._make),
            (1, self._close),
            (12, lambda _: self._wait_for_some()),
        ]

    def run(self) -> Program:
        weights = [weight for weight, _ in self._menu]
        entries = [entry for _, entry in self._menu]
        while self._number < self._calls:
            group = self._groups[0] if self._random.random() < 0.6 else self._random.choice(self._open)
            self._random.choices(entries, weights)[0](group)
            if len(self._in_flight) > MAX_IN_FLIGHT:
                self._wait_for_some()
        self._finish()
        members = tuple(group.members for group in self._groups)
        return Program(self._seed, self._calls, self._size, tuple(self._steps), members)

    # ---------------------------------------------------------------- steps

    def _new(self, group: Group, call: Call, blocks: Sequence[bool] | None = None) -> Do:
        """A call that is about to begin on all ranks."""
        made = Do(self._number, group.number, call, tuple(self._modes() if blocks is None else blocks))
        self._number += 1
        group.busy.update(call.names)
        if all(made.blocks[rank] for rank in group.members):
            group.busy.difference_update(call.names)
        else:
            self._in_flight[made.number] = (group, call.names)
        return made

    def _do(self, group: Group, call: Call, blocks: Sequence[bool] | None = None) -> Do:
        made = self._new(group, call, blocks)
        self._steps.append(made)
        return made

    def _meet(self, group: Group, made: Do) -> None:
        """If all ranks of the world wait for it, each knows that the others have come so far."""
        if group.number == 0 and all(made.blocks):
            self._meetings += 1

    def _modes(self) -> list[bool]:
        draw = self._random.random
        if draw() < 0.15:
            return [draw() < 0.5 for _ in range(self._size)]
        return [draw() < self._blocking] * self._size

    def _wait(self, numbers: Iterable[int]) -> None:
        waited = tuple(numbers)
        if not waited:
            return
        self._steps.append(Wait(waited, self._random.randrange(1000)))
        for number in waited:
            group, names = self._in_flight.pop(number)
            group.busy.difference_update(names)
            group.swaps.discard(number)

    def _wait_for_some(self) -> None:
        numbers = [number for number in self._in_flight if number not in self._halves]
        if numbers:
            self._wait(self._random.sample(numbers, self._random.randint(1, len(numbers))))

    # ---------------------------------------------------------------- what is drawn

    def _name(self, group: Group) -> str | None:
        """None, a fresh name, or a used one that is not in flight."""
        draw = self._random.random()
        free = [name for name in REPEATED if name not in group.busy]
        if draw < 0.4:
            return None
        if draw < 0.75 and free:
            return self._random.choice(free)
        return self._fresh("name")

    def _fresh(self, kind: str) -> str:
        return f"{kind} {self._seed % FRESH_NAMESPACES}/{self._number}"

    def _salt(self) -> int:
        return self._random.randrange(1 << 16)

    def _priorities(self, group: Group) -> tuple[int, ...]:
        draw = self._random
        if not self._is_urgent or draw.random() < 0.6:
            return (0,) * group.size
        if draw.random() < 0.3:
            return tuple(draw.choice(PRIORITIES) for _ in range(group.size))
        return (draw.choice(PRIORITIES),) * group.size

    def _shape(self, itemsize: int, *, least_dims: int = 0, may_be_large: bool = True) -> Shape:
        """Mostly tiny, some of 64 KiB, few of 1 to 3 MiB."""
        draw = self._random
        kind = draw.random()
        if not may_be_large or kind >= MEDIUM:
            return tuple(draw.randint(0 if draw.random() < 0.1 else 1, 5) for _ in range(draw.randint(least_dims, 3)))
        nbytes = draw.randint(*LARGE_NBYTES) if kind < LARGE else draw.randint(MEDIUM_NBYTES - 99, MEDIUM_NBYTES + 99)
        count = nbytes // itemsize
        return (count,) if draw.random() < 0.5 else (count // 16, 16)

    def _dtype(self) -> str:
        return self._random.choice(("float32", "int64", "float64", *DTYPES))

    def _wire(self, dtype: str) -> str | None:
        if self._random.random() >= 0.15 or dtype not in FLOATS:
            return None
        return dtype if dtype in ("float16", "bfloat16") else self._random.choice(("float16", "bfloat16"))

    # ---------------------------------------------------------------- calls of a whole group

    def _collective(self, group: Group) -> None:
        made = self._do(group, self._drawn(group))
        self._meet(group, made)

    def _drawn(self, group: Group, name: str | None = None) -> Collective:
        draw, size = self._random, group.size
        verb = draw.choice(COLLECTIVES)
        dtype = self._dtype()
        has_axis = verb in ("reduce_scatter", "scatter", "all_to_all")
        form = self._form(verb)
        shape = self._shape(4, least_dims=int(has_axis or form != ""))
        shapes, rows = (shape,) * size, ()
        if form == "concat":
            shapes = tuple((max(0, shape[0] - draw.randint(0, 3)), *shape[1:]) for _ in range(size))
        elif form == "list":
            rows = tuple(tuple(draw.randint(0, 4) for _ in range(size)) for _ in range(size))
            shapes = ((0, *self._shape(4, may_be_large=False)),) * size
        elif verb == "all_to_all":
            shapes = ((shape[0] // size * size, *shape[1:]),) * size
        outs = ("",) * size
        if draw.random() < 0.3 and not (verb == "all_to_all" and form == "list"):
            outs = tuple(draw.choice(("", "new", "gaps", "x" if verb in IN_PLACE else "new")) for _ in range(size))
        monitored = draw.random() < 0.1 and verb == "all_reduce"
        return Collective(
            verb,
            size,
            self._name(group) if name is None else name,
            dtype,
            shapes,
            self._salt(),
            form,
            op=draw.choice(OPS[dtype]) if verb in REDUCING else "sum",
            root=draw.randrange(size),
            rows=rows,
            outs=outs,
            priorities=self._priorities(group),
            wire=self._wire(dtype) if verb in WIRED else None,
            monitored=tuple(rank for rank in range(size) if draw.random() < 0.7) if monitored else (),
            is_strided=draw.random() < 0.1 and "x" not in outs,
        )

    def _steady(self, group: Group) -> None:
        """Some uses of names that mean the same call always."""
        draw = self._random
        free = [name for name in STEADY if name not in group.busy]
        for name in draw.sample(free, min(len(free), draw.randint(1, 4))):
            alike = random.Random(f"{name} {group.size}")
            dtype = alike.choice(("float32", "float32", *DTYPES))
            shape = (alike.choice((1, 2, 3, 7, 60, 300, 5000, 9000)), *alike.choice(((), (1,), (2,))))
            verb = alike.choice(("all_reduce", "barrier", *COLLECTIVES))
            op, root = alike.choice(OPS[dtype]) if verb in REDUCING else "sum", alike.randrange(group.size)
            is_shared = verb == "all_reduce" and alike.random() < 0.25
            if verb == "all_to_all":
                shape = (shape[0] * group.size, *shape[1:])
            for _ in range(draw.randint(1, 4)):
                if verb == "barrier":
                    made = self._do(group, Agreement("barrier", group.size, name, (0,) * group.size))
                else:
                    made = self._do(group, self._alike(group, name, verb, dtype, shape, op, root, is_shared=is_shared))
                self._meet(group, made)
                if made.number in self._in_flight:
                    if draw.random() < 0.5:
                        break
                    self._wait([made.number])

    def _alike(
        self, group: Group, name: str, verb: str, dtype: str, shape: Shape, op: str, root: int, *, is_shared: bool
    ) -> Collective:
        draw, size = self._random, group.size
        outs = ("", "", "new", "x" if verb in IN_PLACE else "")
        return Collective(
            verb,
            size,
            name,
            dtype,
            (shape,) * size,
            self._salt(),
            "",
            op=op,
            root=root,
            rows=(),
            outs=("",) * size if is_shared else tuple(draw.choice(outs) for _ in range(size)),
            is_shared=is_shared,
            priorities=self._priorities(group) if draw.random() < 0.1 else (0,) * size,
            wire=None,
            monitored=(),
            is_strided=False,
        )

    def _series(self, group: Group) -> None:
        """A persistent collective that is started some times; each start meets plain calls of some ranks."""
        draw, name = self._random, self._name(group)
        drawn = self._drawn(group, name)
        if drawn.form:
            return
        number = self._number
        for _ in range(draw.randint(2, 4)):
            starting = tuple(rank for rank in range(group.size) if draw.random() < 0.8)
            call = replace(drawn, name=name, salt=self._salt(), series=number, starting=starting)
            made = self._do(group, call)
            self._meet(group, made)
            if draw.random() < 0.3:
                self._swap(group)
            if made.number in self._in_flight:
                self._wait([made.number])

    def _form(self, verb: str) -> str:
        draw = self._random.random()
        if verb in ("gather", "all_gather"):
            return "concat" if draw < 0.5 else ""
        return "list" if verb in ("scatter", "all_to_all") and draw < 0.5 else ""

    def _many(self, group: Group) -> None:
        draw = self._random
        free = [f"w{number}" for number in range(10) if f"many w{number}" not in group.busy]
        if not free:
            return
        op = draw.choice(("sum", "min", "max", "prod"))
        dtypes: tuple[str, ...] = tuple(name for name in DTYPES if op in OPS[name])
        wire = draw.choice(("float16", "bfloat16")) if draw.random() < 0.15 else None
        if wire is not None:
            dtypes = ("float32", "float64", wire)
        names = draw.sample(free, draw.randint(1, len(free)))
        arrays = tuple((name, draw.choice(dtypes), self._shape(4)) for name in names)
        made = self._do(group, Many(group.size, arrays, self._salt(), op, self._priorities(group), wire))
        self._meet(group, made)

    def _agreement(self, group: Group) -> None:
        draw = self._random
        name, priorities = self._name(group), self._priorities(group)
        if draw.random() < 0.6:
            made = self._do(group, Agreement("barrier", group.size, name, priorities))
        else:
            odd = draw.randrange(group.size) if draw.random() < 0.5 else None
            made = self._do(group, Agreement("consensus", group.size, name, priorities, self._salt(), odd))
        self._meet(group, made)

    def _objects(self, group: Group) -> None:
        made = self._do(group, self._drawn_objects(group, self._name(group)))
        self._meet(group, made)

    def _drawn_objects(self, group: Group, name: str | None) -> Objects:
        draw = self._random
        verb = draw.choice(("broadcast_object", "all_gather_object", "gather_object", "scatter_object"))
        return Objects(verb, group.size, name, self._salt(), draw.randrange(group.size), self._priorities(group))

    def _together(self, group: Group) -> None:
        """Different names, of one or more groups, begun in another order by each rank."""
        draw = self._random
        dos = []
        for number in range(draw.randint(2, 8)):
            where = group if draw.random() < 0.7 else draw.choice(self._open)
            name = f"{self._fresh('together')}/{number}"
            call = self._drawn(where, name) if draw.random() < 0.8 else self._drawn_objects(where, name)
            dos.append(self._new(where, call, [False] * self._size))
        self._steps.append(Together(tuple(dos), draw.randrange(1000)))

    def _swap(self, group: Group) -> None:
        made = self._do(group, Swap(self._random.choice(STRATEGIES)))
        if made.number in self._in_flight:
            group.swaps.add(made.number)
        self._meet(group, made)

    # ---------------------------------------------------------------- calls of single ranks

    def _drawn_message(self, source: int, to: int, tag: int | str, *, is_object: bool = False) -> Message:
        dtype = self._random.choice(MESSAGE_DTYPES)
        if is_object:
            return Message(source, to, tag, self._salt(), None)
        return Message(source, to, tag, self._salt(), dtype, self._shape(4))

    def _message(self, group: Group) -> None:
        """One half of a message: the next of its tag that lacks the other, or a new one."""
        draw = self._random
        if group.size == 1:
            return
        source, to = draw.sample(range(group.size), 2)
        tag, is_object = draw.choice(TAGS), draw.random() < 0.25
        waiting = group.channels.setdefault((source, to, tag, is_object), deque())
        if waiting and draw.random() < 0.7:
            self._complete(group, waiting.popleft())
            return
        message = self._drawn_message(source, to, tag, is_object=is_object)
        if not waiting and draw.random() < 0.4:  # both at once: either may block
            self._send(group, message, self._modes())
            self._recv(group, message, self._modes())
            return
        sends = waiting[0].sends if waiting else draw.random() < 0.5
        begun = (self._send if sends else self._recv)(group, message, [False] * self._size)
        self._halves.add(begun.number)
        waiting.append(Half(sends, message, begun.number))

    def _complete(self, group: Group, half: Half) -> None:
        """The other end of a message, which may block."""
        (self._recv if half.sends else self._send)(group, half.message, self._modes())
        self._halves.discard(half.number)

    def _send(self, group: Group, message: Message, modes: Sequence[bool]) -> Do:
        return self._do(group, Send(message, self._priorities(group)[0]), modes)

    def _recv(self, group: Group, message: Message, modes: Sequence[bool]) -> Do:
        draw = self._random
        verb = "recv_object" if message.dtype is None else draw.choice(("recv", "recv", "recv_any"))
        has_out = message.dtype is not None and draw.random() < 0.3
        return self._do(group, Recv(message, self._priorities(group)[0], verb, has_out), modes)

    def _funnel(self, group: Group) -> None:
        """All others send to one rank, which takes what comes. No other message has that tag, now or later."""
        if group.size == 1:
            return
        to, tag = self._random.randrange(group.size), self._fresh("funnel")
        messages = [self._drawn_message(source, to, tag) for source in range(group.size) if source != to]
        for message in messages:
            self._do(group, Send(message, 0))
        for message in messages:
            self._do(group, Recv(message, 0, "recv_any", others=tuple(messages)))

    def _queue(self, group: Group) -> None:
        """A put while the queue is not full, or a get."""
        draw = self._random
        if group.size == 1:
            return
        source, target = draw.sample(range(group.size), 2)
        pipe = Pipe("queue", source, target, 1 + (source + 2 * target) % 4)
        inside = group.queues.setdefault(pipe, deque())
        if inside and (len(inside) >= pipe.capacity or draw.random() < 0.5):
            self._do(group, Get(pipe, inside.popleft()))
            return
        message = self._drawn_message(source, target, "")
        inside.append(message)
        self._do(group, Put(pipe, message))

    def _blob(self, group: Group) -> None:
        """Save something, or request what is known to be saved; in the world alone, which has meetings."""
        draw = self._random
        world = self._groups[0]
        key = draw.choice(("a", "b"))
        kept = world.saved.get(key)
        if kept is not None and self._meetings > kept.since and draw.random() < 0.7:
            ranks = tuple(rank for rank in range(self._size) if draw.random() < 0.5)
            made = self._do(world, Request(kept.save, ranks))
            kept.until = self._meetings
            kept.asked.add(made.number)
            return
        if kept is not None:
            asked = kept.asked & self._in_flight.keys()
            if asked:
                self._wait(sorted(asked))
                kept.until = self._meetings
            if kept.asked and self._meetings <= kept.until:
                return
        message = self._drawn_message(draw.randrange(self._size), 0, "")
        save = Save(key, message, draw.choice((None, 0, 1, 7)))
        self._do(world, save, [True] * self._size)
        world.saved[key] = Saved(save, self._meetings, self._meetings)

    # ---------------------------------------------------------------- groups

    def _make(self, group: Group) -> None:
        """Divide a communicator; a strategy that is handed on must be the same on all ranks by then."""
        draw = self._random
        if len(self._open) > MAX_GROUPS:
            self._close(group)
            return
        name = draw.choice(("pair", "part"))
        if draw.random() < 0.5:
            members = tuple(draw.sample(range(group.size), draw.randint(1, group.size)))
            strategy = draw.choice((None, "ring", "star"))
            if strategy is None:
                self._wait(sorted(group.swaps))
            self._steps.append(Make(group.number, (self._made(group, members),), None, name, strategy))
            return
        colors = tuple((draw.choice((0, 1, 1, None)), draw.randint(0, 2)) for _ in range(group.size))
        parts = []
        for color in (0, 1):
            own = sorted((colors[rank][1], rank) for rank in range(group.size) if colors[rank][0] == color)
            if own:
                parts.append(self._made(group, tuple(rank for _, rank in own)))
        self._steps.append(Make(group.number, tuple(parts), colors, name))

    def _made(self, parent: Group, members: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        made = Group(len(self._groups), tuple(parent.members[rank] for rank in members))
        self._groups.append(made)
        self._open.append(made)
        return made.number, members

    def _close(self, group: Group) -> None:
        if group.number == 0:
            return
        self._settle(group)
        self._wait([number for number, (where, _) in self._in_flight.items() if where is group])
        if group.queues:  # what was put may still be under way, and would be lost
            self._barrier(group)
        self._open.remove(group)
        self._steps.append(Close(group.number))

    def _settle(self, group: Group) -> None:
        """Every message gets its other half, and every queue is emptied."""
        for waiting in group.channels.values():
            while waiting:
                self._complete(group, waiting.popleft())
        for pipe, inside in group.queues.items():
            while inside:
                self._do(group, Get(pipe, inside.popleft()))

    def _finish(self) -> None:
        for group in [*self._open]:
            self._settle(group)
        self._wait(list(self._in_flight))
        for group in [*self._open]:
            self._close(group)
        self._barrier(self._groups[0])

    def _barrier(self, group: Group) -> None:
        self._do(group, Agreement("barrier", group.size, None, (0,) * group.size), [True] * self._size)


def beginning(whole: Program, steps: int) -> Program:
    """The first steps of a program, which need not be a right one by themselves."""
    return replace(whole, steps=whole.steps[:steps])
