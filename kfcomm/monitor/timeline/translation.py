"""From what the engine tells to the lines of a trace file: pure, in the order in which things happened.

The engine's side notes tuples, which are cheap; here they get their names, ids and tracks, and here it is worked out
who is waited for: while a collective is in flight, its program says how many chunks each peer still owes it. The tracks
of a rank:

- *collectives*: an asynchronous event for each, so that those that overlap show side by side;
- *waiting for rank p*: a slice for as long as any collective lacks a chunk of p;
- *from rank p*, *to rank p*: chunks as they arrive (a slice, where that takes more than one read) and leave;
- *program*: what the program above did, where it says so: slices of a training step;
- *events*: changes of strategy, decisions, losses; and *loop lag*, a counter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from kfcomm.core.program import ABSENT

if TYPE_CHECKING:
    from kfcomm.core.collective import GroupView, Key
    from kfcomm.core.program import Program
    from kfcomm.core.signature import Signature
    from kfcomm.engine.control import ClockSample


POSTED, ENDED, SENT, ARRIVED, INSTANT, COUNTER, SAMPLED, SPAN = range(8)
"""Kinds of notes: the first of the tuple. The second is the time in nanoseconds; for the rest see the methods."""

Note: TypeAlias = tuple[Any, ...]
Groups: TypeAlias = "dict[bytes, tuple[str, tuple[int, ...]]]"
Use: TypeAlias = "tuple[Key, int]"

MAX_REMEMBERED = 1 << 16
"""Of anything kept to save work, or for collectives not posted yet."""


class Translator:
    """Makes lines of notes. ``groups`` is looked at as notes come: groups may be made meanwhile."""

    def __init__(self, rank: int, groups: Groups) -> None:
        self._rank = rank
        self._groups = groups
        self._pid = process_of(rank)
        self._tracks: dict[str, int] = {}
        self._names: dict[Key, str] = {}
        self._begins: dict[tuple[int, int, Key], str] = {}
        self._kinds: dict[tuple[Signature, bytes], str] = {}
        self._labels: dict[Key, tuple[str, set[str]]] = {}
        self._open: dict[Use, tuple[str, set[str], str, dict[int, int]]] = {}
        self._early: dict[Use, dict[int, int]] = {}
        self._owed: dict[tuple[int, bytes], tuple[Program, dict[int, int]]] = {}
        self._awaiting: dict[int, int] = {}
        self._num_labels = 0
        self._translate: tuple[Callable[..., None], ...] = (
            self._posted, self._ended, self._sent, self._arrived, self._instant, self._counter, self._sampled,
            self._span,
        )  # fmt: skip

    @property
    def num_open(self) -> int:
        """Collectives that have begun and not ended."""
        return len(self._open)

    def translate(self, note: Note, lines: list[str]) -> None:
        """Append the lines of one note."""
        self._translate[note[0]](lines, note)

    # ---------------------------------------------------------------- collectives

    def _posted(self, lines: list[str], note: Note) -> None:
        _, ns, key, seq, group, signature, program, nbytes, priority = note
        label, in_use = self._label(key)
        name = self._name(key)
        owed = dict(self._owed_to(program, group))
        # Chunks may arrive before this rank has posted.
        for peer, count in self._early.pop((key, seq), {}).items():
            _take(owed, peer, count)
        self._open[key, seq] = (label, in_use, name, owed)
        lines.append(
            f'{{"ph":"b","cat":"collective","name":{name},"id":"{label}","pid":{self._pid},"ts":{microseconds(ns)},'
            f'"args":{{{self._kind(signature, group)},"name":{name},"seq":{seq},"bytes":{nbytes},'
            f'"priority":{priority}}}}}'
        )
        for peer in owed:
            self._awaits(lines, ns, peer, name)

    def _label(self, key: Key) -> tuple[str, set[str]]:
        """An id for the next collective of a name, and all of the name that are in use, this one included."""
        # Uses one after the other share an id: to viewers each id is a track, and they cannot show a hundred thousand.
        known = self._labels.get(key)
        if known is None:
            if len(self._labels) >= MAX_REMEMBERED:
                self._labels.clear()
            self._num_labels += 1
            known = self._labels[key] = (f"{self._rank}.{self._num_labels}", set())
        first, in_use = known
        label, number = first, 0
        while label in in_use:
            number += 1
            label = f"{first}.{number}"
        in_use.add(label)
        return label, in_use

    def _ended(self, lines: list[str], note: Note) -> None:
        _, ns, key, seq, reason = note
        found = self._open.pop((key, seq), None)
        # Its post was left out.
        if found is None:
            return
        label, in_use, name, owed = found
        in_use.discard(label)
        for peer in owed:
            self._has(lines, ns, peer, name)
        first_line = reason.partition("\n")[0]
        outcome = f'"failed","error":{quoted(first_line)}' if reason else '"completed"'
        lines.append(
            f'{{"ph":"e","cat":"collective","name":{name},"id":"{label}","pid":{self._pid},"ts":{microseconds(ns)},'
            f'"args":{{"outcome":{outcome}}}}}'
        )

    # ---------------------------------------------------------------- chunks

    def _sent(self, lines: list[str], note: Note) -> None:
        _, ns, peer, key, seq, nbytes = note
        # Most lines are of chunks, hence the kept beginning, and `microseconds` written out.
        begin = self._begins.get((SENT, peer, key)) or self._begin(lines, SENT, peer, key)
        lines.append(
            f'{{"ph":"i","s":"t",{begin}{ns // 1000}.{ns % 1000:03d},"args":{{"seq":{seq},"bytes":{nbytes}}}}}'
        )

    def _arrived(self, lines: list[str], note: Note) -> None:
        _, ns, since_ns, peer, key, seq, nbytes = note
        begin = self._begins.get((ARRIVED, peer, key)) or self._begin(lines, ARRIVED, peer, key)
        if since_ns:
            how, from_ns = f'"ph":"X","dur":{microseconds(ns - since_ns)}', since_ns
        else:
            how, from_ns = '"ph":"i","s":"t"', ns
        lines.append(f'{{{how},{begin}{from_ns // 1000}.{from_ns % 1000:03d},"args":{{"seq":{seq},"bytes":{nbytes}}}}}')
        found = self._open.get((key, seq))
        if found is not None:
            if _take(found[3], peer, 1):
                self._has(lines, ns, peer, found[2])
        else:
            self._note_early((key, seq), peer)

    def _begin(self, lines: list[str], kind: int, peer: int, key: Key) -> str:
        """Common part of the lines of one name's chunks, up to the time: half of the work of a line."""
        if len(self._begins) >= MAX_REMEMBERED:
            self._begins.clear()
        if kind == SENT:
            category, track = "sent", self._track(lines, f"to rank {peer}", 4 + 3 * peer)
        else:
            category, track = "arrived", self._track(lines, f"from rank {peer}", 3 + 3 * peer)
        begin = f'"cat":"{category}","name":{self._name(key)},"pid":{self._pid},"tid":{track},"ts":'
        self._begins[kind, peer, key] = begin
        return begin

    def _note_early(self, use: Use, peer: int) -> None:
        early = self._early.get(use)
        if early is None:
            if len(self._early) >= MAX_REMEMBERED:
                del self._early[next(iter(self._early))]
            early = self._early[use] = {}
        early[peer] = early.get(peer, 0) + 1

    # ---------------------------------------------------------------- who is waited for

    def _owed_to(self, program: Program, group: GroupView) -> dict[int, int]:
        """Chunks that each peer, by world rank, is to send for one collective."""
        known = self._owed.get((id(program), group.id))
        if known is not None:
            return known[1]
        owed: dict[int, int] = {}
        for lane in program.lanes.values():
            senders = lane.children if lane.source == ABSENT else (*lane.children, lane.source)
            for sender in senders:
                peer = group.members[sender]
                owed[peer] = owed.get(peer, 0) + lane.num_chunks
        if len(self._owed) >= MAX_REMEMBERED:
            self._owed.clear()
        self._owed[id(program), group.id] = (program, owed)  # keeps the program, and so its id, from being reused
        return owed

    def _awaits(self, lines: list[str], ns: int, peer: int, name: str) -> None:
        count = self._awaiting.get(peer, 0)
        self._awaiting[peer] = count + 1
        if not count:
            track = self._track(lines, f"waiting for rank {peer}", 2 + 3 * peer)
            lines.append(
                f'{{"ph":"B","cat":"waiting","name":"waiting for rank {peer}","pid":{self._pid},"tid":{track},'
                f'"ts":{microseconds(ns)},"args":{{"first":{name}}}}}'
            )

    def _has(self, lines: list[str], ns: int, peer: int, name: str) -> None:
        """Note that a collective has received everything from a peer."""
        self._awaiting[peer] -= 1
        if not self._awaiting[peer]:
            title = f"waiting for rank {peer}"
            track = self._tracks[title]
            lines.append(
                f'{{"ph":"E","cat":"waiting","name":"{title}","pid":{self._pid},"tid":{track},'
                f'"ts":{microseconds(ns)},"args":{{"last":{name}}}}}'
            )

    # ---------------------------------------------------------------- everything else

    def _instant(self, lines: list[str], note: Note) -> None:
        _, ns, name, details = note
        track = self._track(lines, "events", 1)
        lines.append(
            f'{{"ph":"i","s":"t","cat":"event","name":{quoted(name)},"pid":{self._pid},"tid":{track},'
            f'"ts":{microseconds(ns)},"args":{json.dumps(plain(details), ensure_ascii=False)}}}'
        )

    def _span(self, lines: list[str], note: Note) -> None:
        _, ns, until_ns, name, details = note
        track = self._track(lines, "program", 0)
        lines.append(
            f'{{"ph":"X","cat":"program","name":{quoted(name)},"pid":{self._pid},"tid":{track},'
            f'"ts":{microseconds(ns)},"dur":{microseconds(until_ns - ns)},'
            f'"args":{json.dumps(plain(details), ensure_ascii=False)}}}'
        )

    def _counter(self, lines: list[str], note: Note) -> None:
        _, ns, name, unit, value = note
        lines.append(
            f'{{"ph":"C","name":{quoted(name)},"pid":{self._pid},"ts":{microseconds(ns)},'
            f'"args":{{{quoted(unit)}:{value:.3f}}}}}'
        )

    def _sampled(self, lines: list[str], note: Note) -> None:
        sample: ClockSample = note[2]
        found = {"at_ns": sample.at_ns, "offset_ns": sample.offset_ns, "uncertainty_ns": sample.uncertainty_ns}
        lines.append(metadata(CLOCK, self._rank, found))

    def _track(self, lines: list[str], name: str, place: int) -> int:
        track = self._tracks.get(name)
        if track is None:
            track = self._tracks[name] = track_of(self._rank, len(self._tracks) + 1)
            lines.append(metadata("thread_name", self._rank, {"name": name}, track=track))
            lines.append(metadata("thread_sort_index", self._rank, {"sort_index": place}, track=track))
        return track

    def _name(self, key: Key) -> str:
        name = self._names.get(key)
        if name is None:
            if len(self._names) >= MAX_REMEMBERED:
                self._names.clear()
            called, _, step = key.name.partition("\0")
            name = self._names[key] = quoted(f"{called or 'unnamed'}{step and f' ({step})'}")
        return name

    def _kind(self, signature: Signature, group: GroupView) -> str:
        """Common members of ``args`` of all collectives of one signature."""
        kind = self._kinds.get((signature, group.id))
        if kind is None:
            if len(self._kinds) >= MAX_REMEMBERED:
                self._kinds.clear()
            called = self._groups.get(group.id, ("",))[0]
            named = "world" if group.id == b"world" else f"{called}#{group.id.hex()[:8]}"
            kind = self._kinds[signature, group.id] = (
                f'"verb":"{signature.verb}","dtype":"{signature.dtype}","op":"{signature.op}",'
                f'"strategy":{quoted(signature.strategy)},"group":{quoted(named)},"ranks":{group.size}'
            )
        return kind


def _take(owed: dict[int, int], peer: int, count: int) -> bool:
    """Note a chunk of a peer; return whether it was the last of those expected."""
    left = owed.get(peer)
    if left is None:
        return False
    if left > count:
        owed[peer] = left - count
        return False
    del owed[peer]
    return True


# A file is one JSON array in the Trace Event Format, one event to a line, the comma before it: whatever of it has been
# written is a whole trace but for the closing bracket, which viewers do without. So a killed process leaves a file that
# opens. Times are microseconds of the rank's own monotonic clock, with three decimals. A rank is a process of the
# trace, its number one more than the rank (0 means something else to viewers); the numbers of its tracks are unlike
# those of all other ranks, since viewers do not keep tracks of different processes apart. Besides the events there are
# three metadata events of our own, which viewers pass over: ``kfcomm`` on the first line (whose trace this is),
# ``kfcomm clock`` (how the clock relates to that of rank 0) and ``kfcomm end`` on the last. The format:
# https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
FORMAT = 1
SUFFIX = ".trace.json"
ABOUT, CLOCK, END = "kfcomm", "kfcomm clock", "kfcomm end"
FIRST, NEXT, LAST = "[", "\n,", "\n]\n"
MAX_TEXT_CHARS = 500


@dataclass(frozen=True, slots=True)
class About:
    """Whose trace a file is."""

    job: str  # the same on all ranks of one world, different in any other
    rank: int  # in the world
    size: int  # of the world
    host: int  # number of the rank's host in the world
    hostname: str  # for people
    pid: int  # process id
    started_ns: int  # when it began, by the rank's monotonic clock
    time_s: float  # the same moment by the wall clock

    @property
    def file_name(self) -> str:
        """Name of this trace in its folder."""
        return f"kfcomm-{self.job}-rank{self.rank}{SUFFIX}"

    @property
    def title(self) -> str:
        """The rank, for people."""
        return f"rank {self.rank} on host {self.hostname}"

    def as_lines(self) -> list[str]:
        """The first lines of the file."""
        return [
            metadata(ABOUT, self.rank, {"format": FORMAT, **asdict(self)}),
            metadata("process_name", self.rank, {"name": self.title}),
            metadata("process_labels", self.rank, {"labels": f"pid {self.pid}, job {self.job}"}),
            metadata("process_sort_index", self.rank, {"sort_index": self.rank}),
        ]


def process_of(rank: int) -> int:
    """The number of a rank's process in the trace."""
    return rank + 1


def track_of(rank: int, number: int) -> int:
    """The number of a rank's track in the trace: of no other rank, and of no process. ``number`` is below ``2**15``."""
    return (1 << 17) + (rank << 15) + number


def microseconds(ns: int) -> str:
    """Nanoseconds as the format has them."""
    return f"{ns // 1000}.{ns % 1000:03d}"


def metadata(name: str, rank: int, args: dict[str, Any], *, track: int | None = None) -> str:
    """A metadata event."""
    where = {} if track is None else {"tid": track}
    return json.dumps({"ph": "M", "name": name, "pid": process_of(rank), **where, "args": args}, ensure_ascii=False)


def quoted(text: str) -> str:
    """A JSON string of bounded length, without control characters: one viewer refuses files with their escapes."""
    clipped = text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + "…"
    if not clipped.isprintable():
        clipped = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in clipped)
    return json.dumps(clipped, ensure_ascii=False)


def plain(value: Any) -> Any:
    """A detail as JSON can carry it: texts bounded, what JSON does not know in words."""
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)  # neither infinite nor not a number
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return json.loads(quoted(str(value)))
