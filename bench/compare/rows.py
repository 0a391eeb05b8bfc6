"""Rows of the table as data: comparisons and the ratios to reach."""

from __future__ import annotations

from dataclasses import dataclass

from bench.compare.works import WORKS, Entry, Mode, Work


@dataclass(frozen=True, slots=True)
class Rival:
    """Rival of a row; of several entries the fastest counts.

    Attributes:
        title: for the table.
        entries: who takes part for it.
        minimum: least ratio (its time / kfcomm's time) that must be reached; None: shown without judgement.
        aim: the ratio that is hoped for.
        is_floor: the ratio is shown in percent: the share of the floor's rate.
    """

    title: str
    entries: tuple[Entry, ...]
    minimum: float | None = None
    aim: float | None = None
    is_floor: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One work of one entry of ours, against its rivals."""

    title: str
    work: Work
    ranks: int
    ours: Entry
    rivals: tuple[Rival, ...]
    note: str = ""


def rival(title: str, contender: str, minimum: float | None = None, aim: float | None = None) -> Rival:
    """A rival that calls one by one."""
    return Rival(title, (Entry(contender),), minimum, aim)


def best_of(
    title: str, contender: str, modes: tuple[Mode, ...], minimum: float | None = None, aim: float | None = None
) -> Rival:
    """A rival with the fastest of several modes."""
    return Rival(title, tuple(Entry(contender, mode) for mode in modes), minimum, aim)


def floor(title: str, contender: str, minimum: float | None = None, aim: float | None = None) -> Rival:
    """A floor."""
    return Rival(title, (Entry(contender, Mode.FLOOR),), minimum, aim, is_floor=True)


EVERY = (Mode.ONE, Mode.ALL, Mode.BUCKETS, Mode.VIEWS)
FUSED = (Mode.BUCKETS, Mode.VIEWS)
OURS, BLOCKING = Entry("kfcomm"), Entry("kfcomm-blocking")
OURS_TCP, BLOCKING_TCP = Entry("kfcomm-tcp"), Entry("kfcomm-tcp-blocking")
BLOCKING_ALL_TCP = Entry("kfcomm-tcp-blocking", Mode.ALL)
ALL, ALL_TCP, MANY = Entry("kfcomm", Mode.ALL), Entry("kfcomm-tcp", Mode.ALL), Entry("kfcomm", Mode.MANY)
SYMMETRIC, SYMMETRIC_ALL = Entry("kfcomm-symmetric"), Entry("kfcomm-symmetric", Mode.ALL)
SHARED = Entry("kfcomm-symmetric", Mode.SHARED)
GLOO, OPENMPI, MPICH = "Gloo", "Open MPI shared memory", "MPICH shared memory"
# Its ranks wait without yielding: with more of them than cores, for each other's time slices. So not with 16.
DEEPSPEED = rival("DeepSpeed shared memory", "deepspeed")
BUCKETS = "Gloo in 25 MB buckets"
QUOTED = "quoted, not measured here: KungFu's Go runtime is 15 times slower than Open MPI"

ROWS = (
    Row(
        "one host, auto, 64 MiB",
        WORKS["64MiB"],
        4,
        OURS,
        (
            rival(GLOO, "gloo", 2.6, 3),
            rival(OPENMPI, "openmpi", 1.9, 2.4),
            floor("copy floor", "copy", 0.55, 0.7),
            rival(MPICH, "mpich"),
            DEEPSPEED,
        ),
    ),
    Row(
        "one host, auto, 64 MiB in symmetric memory",
        WORKS["64MiB"],
        4,
        SYMMETRIC,
        (floor("copy floor", "copy", 0.55, 0.65), rival(OPENMPI, "openmpi")),
    ),
    Row(
        "one host, auto, 64 MiB in symmetric memory, shared result",
        WORKS["64MiB"],
        4,
        SHARED,
        (floor("copy floor", "copy", 0.9, 1.2), rival(OPENMPI, "openmpi")),
    ),
    Row(
        "one host, auto, 1 MiB",
        WORKS["1MiB"],
        4,
        OURS,
        (
            rival(GLOO, "gloo", 11, 15),
            rival(OPENMPI, "openmpi", 1, 1.3),
            floor("copy floor", "copy"),
            rival(MPICH, "mpich"),
            DEEPSPEED,
        ),
    ),
    Row(
        "one host, auto, 64 KiB, blocking call",
        WORKS["64KiB"],
        4,
        BLOCKING,
        (rival(GLOO, "gloo"), rival(OPENMPI, "openmpi", 1.5, 2.5), rival(MPICH, "mpich"), DEEPSPEED),
    ),
    Row(
        "one host, auto, 16 KiB, blocking call",
        WORKS["16KiB"],
        4,
        BLOCKING,
        (rival(GLOO, "gloo"), rival(OPENMPI, "openmpi", 1.3, 2.5), rival(MPICH, "mpich"), DEEPSPEED),
    ),
    Row(
        "one host, auto, 1 KiB, blocking call",
        WORKS["1KiB"],
        4,
        BLOCKING,
        (rival(GLOO, "gloo", 200, 350), rival(OPENMPI, "openmpi", 0.8, 1.4), rival(MPICH, "mpich"), DEEPSPEED),
        QUOTED,
    ),
    Row(
        "one host, auto, 1 KiB, awaited",
        WORKS["1KiB"],
        4,
        OURS,
        (rival(GLOO, "gloo"), rival(OPENMPI, "openmpi", 0.4, 0.8), rival(MPICH, "mpich")),
    ),
    Row(
        "one host, auto, 1 KiB, blocking call",
        WORKS["1KiB"],
        2,
        BLOCKING,
        (rival(GLOO, "gloo", 60, 150), rival(OPENMPI, "openmpi"), rival(MPICH, "mpich"), DEEPSPEED),
    ),
    Row(
        "one host, auto, 1 MiB",
        WORKS["1MiB"],
        2,
        OURS,
        (rival(GLOO, "gloo"), rival(OPENMPI, "openmpi"), floor("copy floor", "copy"), rival(MPICH, "mpich"), DEEPSPEED),
    ),
    Row(
        "one host, auto, 64 MiB",
        WORKS["64MiB"],
        2,
        OURS,
        (rival(GLOO, "gloo"), rival(OPENMPI, "openmpi"), floor("copy floor", "copy"), rival(MPICH, "mpich"), DEEPSPEED),
    ),
    Row(
        "one host, auto, ResNet-50 gradients all at once",
        WORKS["resnet50"],
        4,
        ALL,
        (
            best_of(BUCKETS, "gloo", FUSED, 2.2, 3),
            best_of("Open MPI shared memory, best mode", "openmpi", EVERY, 1, 1.3),
            floor("copy floor", "copy"),
            best_of("MPICH shared memory, best mode", "mpich", EVERY),
            best_of("DeepSpeed in 25 MB buckets", "deepspeed", FUSED),
        ),
    ),
    Row(
        "one host, auto, ResNet-50 gradients through all_reduce_many",
        WORKS["resnet50"],
        4,
        MANY,
        (
            best_of(BUCKETS, "gloo", FUSED, 2.2, 3),
            best_of("Open MPI shared memory, best mode", "openmpi", EVERY, 1, 1.3),
        ),
    ),
    Row(
        "one host, auto, ResNet-50 gradients all at once, in symmetric memory",
        WORKS["resnet50"],
        4,
        SYMMETRIC_ALL,
        (
            best_of(BUCKETS, "gloo", FUSED, 3, 3),
            best_of("Open MPI shared memory, best mode", "openmpi", EVERY, 1.4, 2),
        ),
    ),
    Row(
        "one host, auto, 1 KiB, blocking call",
        WORKS["1KiB"],
        16,
        BLOCKING,
        (rival(GLOO, "gloo"), rival(OPENMPI, "openmpi", 0.7, 1)),
    ),
    Row(
        "one host, auto, 4 MiB, blocking call",
        WORKS["4MiB"],
        16,
        BLOCKING,
        (rival(GLOO, "gloo"), rival(OPENMPI, "openmpi", 0.9, 1)),
    ),
    Row(
        "TCP only, 64 MiB",
        WORKS["64MiB"],
        4,
        OURS_TCP,
        (
            rival(GLOO, "gloo", 1.25, 1.5),
            rival("Open MPI TCP", "openmpi-tcp", 1.5, 2),
            floor("socket floor", "sockets", 0.82, 0.9),
            rival("MPICH TCP", "mpich-tcp"),
        ),
    ),
    Row(
        "TCP only, 64 MiB, blocking call",
        WORKS["64MiB"],
        4,
        BLOCKING_TCP,
        (
            rival(GLOO, "gloo", 1.25, 1.5),
            rival("Open MPI TCP", "openmpi-tcp", 1.5, 2),
            floor("socket floor", "sockets", 0.82, 0.9),
        ),
    ),
    Row(
        "TCP only, 1 KiB, blocking call",
        WORKS["1KiB"],
        4,
        BLOCKING_TCP,
        (rival(GLOO, "gloo", 20, 40), rival("Open MPI TCP", "openmpi-tcp", 0.5, 1), rival("MPICH TCP", "mpich-tcp")),
    ),
    Row(
        "TCP only, ResNet-50 gradients all at once",
        WORKS["resnet50"],
        4,
        ALL_TCP,
        (
            best_of(BUCKETS, "gloo", FUSED, 1.1, 1.4),
            best_of("Open MPI TCP, best mode", "openmpi-tcp", EVERY, 1.05, 1.4),
            floor("socket floor", "sockets"),
            best_of("MPICH TCP, best mode", "mpich-tcp", EVERY),
        ),
    ),
    Row(
        "TCP only, ResNet-50 gradients all at once, blocking interface",
        WORKS["resnet50"],
        4,
        BLOCKING_ALL_TCP,
        (
            best_of(BUCKETS, "gloo", FUSED, 1.1, 1.4),
            best_of("Open MPI TCP, best mode", "openmpi-tcp", EVERY, 1.05, 1.4),
        ),
    ),
    Row(
        "10,000 tensors of 8 float32, one collective each, all at once",
        WORKS["10000x8"],
        4,
        ALL,
        (best_of("Open MPI Iallreduce", "openmpi", (Mode.ALL,), 4, 8),),
    ),
    Row(
        "the same through all_reduce_many",
        WORKS["10000x8"],
        4,
        MANY,
        (best_of("Open MPI Iallreduce", "openmpi", (Mode.ALL,), 5, 20),),
    ),
)


@dataclass(frozen=True, slots=True)
class Case:
    """Entries that are measured together: the same work with the same number of ranks."""

    work: Work
    ranks: int
    entries: tuple[Entry, ...]


def cases(rows: tuple[Row, ...] = ROWS, without: frozenset[str] = frozenset()) -> list[Case]:
    """The cases that the rows need, those of one number of ranks together; contenders in ``without`` left out."""
    found: dict[tuple[int, str], dict[Entry, None]] = {}
    for row in rows:
        entries = [row.ours, *(entry for one in row.rivals for entry in one.entries)]
        wanted = {entry: None for entry in entries if entry.contender not in without}
        found.setdefault((row.ranks, row.work.name), {}).update(wanted)
    keys = sorted(found, key=lambda key: -key[0])
    return [Case(WORKS[name], ranks, tuple(found[ranks, name])) for ranks, name in keys]
