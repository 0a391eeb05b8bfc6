"""Names of the calls of ``torch.distributed``: given by the program, or made from the properties of a call.

torch matches the n-th call of one rank with the n-th call of another. A call that the program has not named gets a name
here from its verb, dtype, number of elements, op and root. So a repeated call has a repeated name, and uses its cached
plan; ranks whose n-th calls differ wait for each other instead of mixing their data. A call that waits for longer than
a second is compared, through torch's store, with the n-th calls of the other ranks. If they differ, both fail on all
ranks, with an error that shows both.

Cost: two records per call, as long as no call waits.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import count
from time import monotonic
from types import CodeType, FrameType
from typing import Any, TypeAlias

from kfcomm.collectives.group import IN_ORDER
from kfcomm.common.arguments import checked_name
from kfcomm.monitor.dumps import OTHERS
from kfcomm.torch.kept_works import above


class _Names(threading.local):
    current: list[Any] | None = None  # name of `named`, and the number of calls that have used it


_names = _Names()


@contextmanager
def named(name: str) -> Iterator[None]:
    """Name the collectives that this thread calls in the block, on all ranks; unnamed ones match by their order.

    ::

        with kfcomm.torch.named("grad/0"):
            work = dist.all_reduce(tensor, async_op=True)

    Ranks may call named collectives in any order, and from any thread. The second call in a block is named
    ``grad/0#1``, and so on. Messages (``send``, ``recv``) match by their tags, in a block or not.

    Args:
        name: not empty; see "Name collectives".

    Raises:
        ConfigError: the name is not allowed.
    """
    given = checked_name(name)
    outer = _names.current
    _names.current = [given, 0]
    try:
        yield
    finally:
        _names.current = outer


def next_name() -> str | None:
    """The name of the call that this thread makes now; None outside of `named`."""
    current = _names.current
    if current is None:
        return None
    name, used = current
    current[1] = used + 1
    return f"{name}#{used}" if used else name


PATIENCE_S = 1.0
"""Time that a call may wait before it is compared with those of other ranks."""
LOOK_EVERY_S, LOOK_AT_LEAST_EVERY_S = 0.5, 5.0
"""Interval of comparisons: at first, and for a call that waits long."""
MAX_WORDS = 1024
"""Kinds of calls with names of their own, the same number on all ranks; further kinds share a name per verb."""
ABOVE = 2
"""Frames above `TorchCalls.begin` that are kfcomm's, at least: each look at one costs 0.1 µs."""
MAX_IN_FLIGHT = 64
"""Records kept before finished calls are removed."""


Words: TypeAlias = "tuple[str, str, Iterator[int]]"
"""Of a kind of calls: name, description, and numbers for the uses of the name."""


class TorchCall:
    """A call without a name, of this rank."""

    __slots__ = ("_code", "_line", "begun_s", "handle", "name", "number", "seq", "what")

    def __init__(self, number: int, name: str, what: str, seq: int, frame: FrameType) -> None:
        self.number = number  # in the order of its group
        self.name = name  # of the collective; empty for a call that was refused
        self.seq = seq  # number of the use of the name
        self.what = what
        self.begun_s = monotonic()
        self.handle: weakref.ref[Any] | None = None  # weak: the caller decides how long a result lives
        self._code, self._line = _caller(frame)

    def is_under_way(self) -> bool:
        """Whether it is not done."""
        if self.handle is None:
            return True
        handle = self.handle()
        return handle is not None and not handle.done()

    def __str__(self) -> str:
        if self._code is None:
            return f"{self.what}, not from a line of the program (a backward pass, perhaps)"
        return f"{self.what}, at {self._code.co_filename}:{self._line} in {self._code.co_qualname}"


class TorchCalls:
    """The calls of one group that have no name, which ranks compare through a store of this group alone.

    ``fail`` is called with name, number of its use and error text of each call that differs from those of other ranks.
    """

    def __init__(self, store: Any, rank: int, fail: Callable[[str, int, str], object]) -> None:
        self.number = 0
        self._store = store
        self._rank = rank
        self._fail = fail
        self._in_flight: dict[int, TorchCall] = {}
        self._words: dict[Hashable, Words] = {}
        self._uses: dict[str, Iterator[int]] = {}
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None

    def begin(self, verb: str, x: Any, options: dict[str, Any]) -> TorchCall:
        """Record a call that is made now."""
        kind = _kind(verb, x, options)
        words = self._words.get(kind)
        if words is None:
            words = self._new_words(verb, kind)
        number, (name, what, uses) = self.number, words
        self.number = number + 1
        self._in_flight[number] = call = TorchCall(number, name, what, next(uses), above(ABOVE))
        # Started here: a group with named calls only needs no thread.
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="kfcomm-torch-order", daemon=True)
            self._watcher.start()
        if len(self._in_flight) > MAX_IN_FLIGHT:
            self._oldest()
        return call

    def refused(self, error: BaseException) -> None:
        """Record a call that cannot be made on this rank, so that the others, which wait for it, find out."""
        call = TorchCall(self.number, "", f"a call that was refused ({error})", 0, sys._getframe(1))
        self.number += 1
        with contextlib.suppress(RuntimeError):  # without the store the group fails anyway
            self._compare(call)

    def end(self, call: TorchCall) -> None:
        """Drop a call that its caller has waited for."""
        self._in_flight.pop(call.number, None)

    def close(self) -> None:
        """Stop comparing."""
        self._stop.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()

    def _new_words(self, verb: str, kind: tuple[Any, ...]) -> Words:
        what = _in_words(*kind)
        is_full = len(self._words) >= MAX_WORDS
        name = f"{IN_ORDER}{verb if is_full else what}"
        words = name, what, self._uses.setdefault(name, count())
        if not is_full:
            self._words[kind] = words
        return words

    def _oldest(self) -> TorchCall | None:
        """The first call that is not done."""
        # A copy is made in one go; a list of items is not: tuples are allocated, so a collection may let others run.
        for number, call in self._in_flight.copy().items():
            if call.is_under_way():
                return call
            self._in_flight.pop(number, None)
        return None

    def _watch(self) -> None:
        pause_s = LOOK_EVERY_S
        while not self._stop.wait(pause_s):
            call = self._oldest()
            if call is None or monotonic() - call.begun_s < PATIENCE_S:
                pause_s = LOOK_EVERY_S
                continue
            pause_s = min(2 * pause_s, LOOK_AT_LEAST_EVERY_S)
            try:
                self._compare(call)
            except RuntimeError:  # the rank that served the store is lost, which fails the collective itself
                return

    def _compare(self, call: TorchCall) -> None:
        """Compare a call with those of other ranks at this place in the order; fail it if they differ."""
        # The first rank that looks at the place writes its call there, and the first with another call writes that. So
        # every rank finds both, whatever order they look in.
        key = f"order/{call.number}"
        mine = json.dumps([call.what, call.name, call.seq, f"rank {self._rank}: {call}"])
        first = json.loads(self._store.compare_set(key, "", mine))
        other = f"{key}/other"
        if first[0] != call.what:
            second = json.loads(self._store.compare_set(other, "", mine))
        elif self._store.check([other]):
            second = json.loads(self._store.get(other))
        else:
            return
        text = f"call {call.number} of this process group is not the same on all ranks:\n  {first[3]}\n  {second[3]}"
        for _, name, seq, _ in (first, second, json.loads(mine)):
            if name:
                self._fail(name, seq, text)


def _kind(verb: str, x: Any, options: dict[str, Any]) -> tuple[Any, ...]:
    """The properties of a call on which ranks have to agree; hashable."""
    op, root = options.get("op"), options.get("root")
    if verb == "scatter":
        x = options["out"]
    if x is None:
        return verb, None, None, op, root
    if type(x) is not list:
        return verb, x.dtype, None if "concat" in options else _length(x), op, root
    if verb == "all_to_all":
        return verb, x[0].dtype, None, op, root
    return verb, x[0].dtype, tuple(map(_length, x)), op, root


def _length(x: Any) -> int:
    return int(x.size if type(x.size) is int else x.numel())


def _in_words(verb: str, dtype: Any, length: Any, op: Any, root: int | None) -> str:
    said = verb
    if dtype is not None:
        said += f" of {str(dtype).removeprefix('torch.')}"
    if isinstance(length, tuple):
        said += f", {len(length)} tensors of {sum(length)} elements"
    elif length is not None:
        said += f"[{length}]"
    if op is not None:
        said += f", {op}"
    return said if root is None else f"{said}, root {root}"


def _caller(frame: FrameType | None) -> tuple[CodeType | None, int]:
    """The innermost line that is not in torch or kfcomm, from a frame on."""
    while frame is not None:
        code = frame.f_code
        is_program = _is_program.get(code.co_filename)
        if is_program is None:
            is_program = _is_program[code.co_filename] = not code.co_filename.startswith(OTHERS)
        if is_program:
            return code, frame.f_lineno
        frame = frame.f_back
    return None, 0


_is_program: dict[str, bool] = {}
"""By file."""
