"""Names of the calls of ``torch.distributed``, which has none: given by the program, or made from what a call is.

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
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

from kfcomm.collectives.group import IN_ORDER
from kfcomm.common.arguments import checked_name
from kfcomm.monitor.whereabouts import OTHERS

_names = threading.local()
"""Of this thread: the name, and how many calls have used it."""


@contextmanager
def named(name: str) -> Iterator[None]:
    """The collectives that this thread calls in the block have this name, on all ranks; others match by their order.

    ::

        with kfcomm.torch.named("grad/0"):
            work = dist.all_reduce(tensor, async_op=True)

    Ranks may call collectives with names in any order, and from any thread. Of several calls in one block the second is
    called ``grad/0#1``, and so on. Messages (``send``, ``recv``) go by their tags, in a block or not.

    Args:
        name: not empty; see "Name collectives".

    Raises:
        ConfigError: it cannot be a name.
    """
    given = checked_name(name)
    outer = getattr(_names, "current", None)
    _names.current = [given, 0]
    try:
        yield
    finally:
        _names.current = outer


def next_name() -> str | None:
    """The name of the call that this thread makes now; None if it has none."""
    current = getattr(_names, "current", None)
    if current is None:
        return None
    name, used = current
    current[1] = used + 1
    return f"{name}#{used}" if used else name


PATIENCE_S = 1.0
"""Of a call that waits, until it is compared with those of the others."""
LOOK_EVERY_S, LOOK_AT_LEAST_EVERY_S = 0.5, 5.0
"""Between two looks: at first, and when a call waits for long."""
MAX_WORDS = 1024
"""Kinds of calls that get names of their own, the same on all ranks; further ones share one for each verb."""
MAX_IN_FLIGHT = 64
"""Calls under way that are kept before those that are over are looked for."""


class Call:
    """A call without a name, of this rank.

    Attributes:
        number: in the order of its group.
        name: under which kfcomm knows it; empty if it does not.
        seq: which use of the name.
        what: it is, in words.
        begun_s: monotonic time.
        handle: of it, weakly (its result is the caller's to keep), if its caller does not wait.
    """

    __slots__ = ("_code", "_line", "begun_s", "handle", "name", "number", "seq", "what")

    def __init__(self, number: int, name: str, what: str, seq: int) -> None:
        self.number = number
        self.name = name
        self.seq = seq
        self.what = what
        self.begun_s = time.monotonic()
        self.handle: weakref.ref[Any] | None = None
        self._code, self._line = _caller()

    def is_under_way(self) -> bool:
        """Whether it is not over."""
        if self.handle is None:
            return True
        handle = self.handle()
        return handle is not None and not handle.done()

    def __str__(self) -> str:
        if self._code is None:
            return f"{self.what}, not from a line of the program (a backward pass, perhaps)"
        return f"{self.what}, at {self._code.co_filename}:{self._line} in {self._code.co_qualname}"


class Calls:
    """The calls of one group that have no name.

    Args:
        store: of this group alone, by which its ranks tell each other of calls that wait.
        rank: of this process in the group.
        fail: called with name, number of its use and message of each call that does not fit those of other ranks.

    Attributes:
        number: of the next call.
    """

    def __init__(self, store: Any, rank: int, fail: Callable[[str, int, str], object]) -> None:
        self.number = 0
        self._store = store
        self._rank = rank
        self._fail = fail
        self._in_flight: dict[int, Call] = {}
        self._words: dict[Hashable, tuple[str, str]] = {}
        self._uses: dict[str, int] = {}
        self._stop = threading.Event()
        self._watcher: threading.Thread | None = None

    def begin(self, verb: str, x: Any, options: dict[str, Any]) -> Call:
        """A call is made now.

        Args:
            verb: of the communicator.
            x: what it is given.
            options: of the verb.
        """
        kind = _kind(verb, x, options)
        words = self._words.get(kind)
        if words is None:
            words = self._new_words(verb, kind)
        number, name = self.number, words[0]
        self.number = number + 1
        self._uses[name] = seq = self._uses.get(name, -1) + 1
        call = Call(number, *words, seq)
        self._in_flight[number] = call
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="kfcomm-torch-order", daemon=True)
            self._watcher.start()
        if len(self._in_flight) > MAX_IN_FLIGHT:
            self._oldest()
        return call

    def refused(self, error: BaseException) -> None:
        """A call cannot be made on this rank; the others, which wait for it, will look what this one has made of it."""
        call = Call(self.number, "", f"a call that was refused ({error})", 0)
        self.number += 1
        with contextlib.suppress(RuntimeError):  # the store has gone: so will the group
            self._compare(call)

    def end(self, call: Call) -> None:
        """A call whose caller has waited is over."""
        self._in_flight.pop(call.number, None)

    def close(self) -> None:
        """Compare no more."""
        self._stop.set()
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join()

    def _new_words(self, verb: str, kind: tuple[Any, ...]) -> tuple[str, str]:
        what = _in_words(*kind)
        words = f"{IN_ORDER}{what}", what
        if len(self._words) >= MAX_WORDS:
            return f"{IN_ORDER}{verb}", what
        self._words[kind] = words
        return words

    def _oldest(self) -> Call | None:
        """The first call that is not over."""
        for number, call in list(self._in_flight.items()):
            if call.is_under_way():
                return call
            self._in_flight.pop(number, None)
        return None

    def _watch(self) -> None:
        pause_s = LOOK_EVERY_S
        while not self._stop.wait(pause_s):
            call = self._oldest()
            if call is None or time.monotonic() - call.begun_s < PATIENCE_S:
                pause_s = LOOK_EVERY_S
                continue
            pause_s = min(2 * pause_s, LOOK_AT_LEAST_EVERY_S)
            try:
                self._compare(call)
            except RuntimeError:  # the store has gone with the rank that served it: the collective's own failure tells
                return

    def _compare(self, call: Call) -> None:
        """Look what other ranks have made of this place in the order; where that differs, it fails for all of them.

        The first rank that looks there says what it has called, the first that has called something else says that.
        """
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
    """All that ranks have to agree on; hashable."""
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


def _caller() -> tuple[CodeType | None, int]:
    """The innermost line that is neither torch's nor ours."""
    frame = sys._getframe(2)
    while True:
        code = frame.f_code
        is_program = _is_program.get(code.co_filename)
        if is_program is None:
            is_program = _is_program[code.co_filename] = not code.co_filename.startswith(OTHERS)
        if is_program:
            return code, frame.f_lineno
        outer = frame.f_back
        if outer is None:
            return None, 0
        frame = outer


_is_program: dict[str, bool] = {}
"""By file."""
