"""Settings of one process: its place in the world, and its way of communicating.

A setting has one name everywhere: the argument ``stall_after`` of ``init`` is the option ``--stall-after`` of ``kfcomm
run`` and the variable ``KFCOMM_STALL_AFTER``. Arguments come before variables. Rank and size are taken together from
the first source that has them (see `finders`); sources are never mixed. The environment is an argument: only the
token's file and lists of nodes are read from disk.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

from kfcomm.common.arguments import hint, meant, plain_text, whole_number
from kfcomm.errors import ConfigError
from kfcomm.rendezvous.authentication import concealed_token, given_token, user_token
from kfcomm.rendezvous.finders import choose, survey
from kfcomm.rendezvous.host import LOOPBACK, host_and_port, is_loopback, store_url
from kfcomm.rendezvous.worlds import ALONE, ARGUMENTS, KFCOMM, MAX_RANKS, FoundWorld, Reader, integer
from kfcomm.transports.registry import AUTO, LINKS, TRANSPORT_NAMES

if TYPE_CHECKING:
    from kfcomm.types import Seconds

OTHER_VARIABLES = {
    "KFCOMM_ETCD_PASSWORD", "KFCOMM_JOB", "KFCOMM_LAUNCHER", "KFCOMM_PORT", "KFCOMM_TOKEN_FILE", "KFCOMM_TORCH_DEFAULT"
}  # fmt: skip
"""Variables that are not named after an argument."""
TIMEOUT_S = 300.0
MAX_DIGITS = 4
"""Longest number of a device."""


class Arguments(TypedDict, total=False):
    """Arguments of ``init``; None means absent."""

    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int | None
    store: str | None
    serve: bool | None
    token: bytes | str | None
    strategy: str | Mapping[str, str] | None
    transport: str | None
    device: str | None
    timeout: Seconds | None
    stall_after: Seconds | None
    lost_after: Seconds | None
    interface: str | None
    dump_dir: str | None
    timeline: str | None
    monitor: bool | None
    metrics_port: int | None
    port_range: str | None
    traceback: str | None
    checksum: bool | None
    tls: str | None
    elastic: bool | None
    join: int | None


class Settings(NamedTuple):
    """Settings of one process, checked.

    Attributes:
        rank: rank in the world.
        size: number of ranks.
        local_rank: rank on this host as the launcher says; 0 if it does not (after joining, the layout knows).
        local_size: number of ranks on this host as the launcher says; 1 if it does not.
        store: ``http://host:port`` of the store; None for a world of one.
        token: the secret of the job; None for a world of one, and where rank 0 hands it over by ``channel``.
        channel: name of the secret channel (see `channels`) by which rank 0 hands the token over; None for none.
        strategy: name of the strategy, or rules by size.
        transport: one of `TRANSPORT_NAMES`.
        device: ``auto``, ``none``, ``cuda`` or ``cuda:N``.
        timeout_s: time after which a wait fails.
        stall_after_s: time after which a wait is reported.
        lost_after_s: time without a sign of life after which a rank is lost.
        interface: name, address or network (CIDR) to listen at; None to go by the route.
        dump_dir: folder of the dumps that a signal asks for.
        timeline: folder for a trace of each rank; None for none.
        monitor: whether bytes, calls and waits are counted.
        traceback: ``short``: those of blocking verbs end at the caller's line; ``full``: they show all.
        checksum: whether what travels over TCP is checked; the same on all ranks.
        tls: where the certificates of the job are (see `kfcomm.transports.tls`); None for connections without TLS.
        elastic: whether the ranks may change while the program runs (see ``kfcomm.elastic``).
        join: uid of a process that joins a running job: a number that no other process of the job has or had, beyond
            the initial ranks. It is its ``rank`` here. Else None.
        metrics_port: port for Prometheus of local rank 0, followed by those of the others; None for none.
        ports: first and last port at which the process may listen; None for any.
        source: source of rank and size.
        reasons: lines that explain the settings to the user.
        serve: whether rank 0 starts the store; otherwise the launcher has.
        job: name of the job on this host; None without a launcher.
        launcher: socket for exit reports to the launcher (see `exit_report`); None without one.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    store: str | None = None
    token: bytes | None = None
    channel: str | None = None
    strategy: str = "auto"
    transport: str = "auto"
    device: str = "auto"
    timeout_s: float = 300.0
    stall_after_s: float = 10.0
    lost_after_s: float = 30.0
    interface: str | None = None
    dump_dir: str = "."
    timeline: str | None = None
    monitor: bool = True
    metrics_port: int | None = None
    traceback: str = "short"
    checksum: bool = False
    tls: str | None = None
    elastic: bool = False
    join: int | None = None
    ports: tuple[int, int] | None = None
    source: str = ALONE
    reasons: tuple[str, ...] = ()
    serve: bool = False
    job: str | None = None
    launcher: str | None = None

    @property
    def links(self) -> str:
        """The kind of links between the ranks, one of `LINKS`: NCCL carries device memory, and leaves links alone."""
        return self.transport if self.transport in LINKS else AUTO


def detect(environ: Mapping[str, str], **arguments: Unpack[Arguments]) -> Settings:
    """Find out who this process is and how it shall communicate.

    Args:
        environ: usually ``os.environ``.
        **arguments: the arguments of ``init`` (see `Arguments`); they come before variables.

    Raises:
        ConfigError: a value cannot work, or two contradict each other; names the setting, its value and what
            is allowed.
    """
    given: dict[str, Any] = {name: value for name, value in arguments.items() if value is not None}
    environ = {name: value for name, value in environ.items() if value}  # an empty variable counts as unset
    if unknown := sorted(given.keys() - Arguments.__annotations__.keys()):
        known = Arguments.__annotations__
        near = "".join(hint(name, known) for name in unknown[:1])
        raise ConfigError(f"unknown settings {', '.join(unknown)}; there are {', '.join(known)}{near}")
    if isinstance(rules := given.get("strategy"), Mapping):
        given["strategy"] = ", ".join(": ".join(map(_word, rule)) for rule in rules.items())
    reader = Reader(environ, given)
    reasons: list[str] = []
    world = _find_world(reader, reasons)
    store = _find_store(reader, world, reasons)
    local = world.local
    if local is None:
        local = (world.rank, world.size) if store is not None and _is_here(store) else (0, 1)
    join = _find_join(reader, world, store)
    if join is None:
        world.check_local()
    token, channel = _find_token(reader, store, world.source, reasons)
    return Settings(
        rank=world.rank if join is None else join,
        size=world.size,
        local_rank=local[0],
        local_size=local[1],
        store=store,
        token=token,
        channel=channel,
        strategy=reader.text("strategy", "auto"),
        transport=reader.choice("transport", TRANSPORT_NAMES),
        device=check_device(reader.text("device", "auto"), reader.name("device")),
        timeout_s=reader.seconds("timeout", TIMEOUT_S),
        stall_after_s=reader.seconds("stall_after", 10.0),
        lost_after_s=reader.seconds("lost_after", 30.0),
        interface=reader.optional("interface"),
        dump_dir=reader.text("dump_dir", "."),
        timeline=reader.optional("timeline"),
        monitor=reader.flag("monitor", default=True),
        metrics_port=reader.port("metrics_port"),
        traceback=reader.choice("traceback", ("short", "full")),
        checksum=reader.flag("checksum", default=False),
        tls=reader.optional("tls"),
        elastic=reader.flag("elastic", default=False),
        join=join,
        ports=reader.ports("port_range"),
        source=world.source,
        reasons=tuple(reasons),
        serve=store is not None and reader.flag("serve", default=True),
        job=environ.get("KFCOMM_JOB") or None,
        launcher=environ.get("KFCOMM_LAUNCHER") or None,
    )


def _word(given: Any) -> str:
    return plain_text(given) if isinstance(given, str) else str(given)


def _find_join(reader: Reader, world: FoundWorld, store: str | None) -> int | None:
    """The number of a process that joins a running job."""
    given = reader.raw("join")
    if given is None:
        return None
    text = str(given)
    if not text.isascii() or not text.isdigit() or not world.size <= int(text) < MAX_RANKS:
        raise ConfigError(
            f"{reader.name('join')}={text!r} must be a whole number from {world.size} to {MAX_RANKS - 1}: beyond the "
            "ranks with which the job began"
        )
    if store is None or not reader.flag("elastic", default=False):
        raise ConfigError(f"{reader.name('join')} needs the store of a running job, and elastic=True")
    return int(text)


def timeout_of(environ: Mapping[str, str]) -> float:
    """The setting ``timeout`` alone, in seconds. Raises `ConfigError`: it is invalid."""
    return Reader(environ, {}).seconds("timeout", TIMEOUT_S)


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """A line for each unknown variable of kfcomm that resembles a known one."""
    known = {f"KFCOMM_{name.upper()}" for name in Arguments.__annotations__} | OTHER_VARIABLES
    unknown = sorted(name for name in environ if name.startswith("KFCOMM_") and len(name) > 8 and name not in known)
    found = ((name, meant(name, known, like=0.85)) for name in unknown)
    return [
        f"{name} is an unknown setting and has no effect: did you mean {likely[0]}?" for name, likely in found if likely
    ]


def check_device(choice: str, name: str = "device") -> str:
    """Check and normalise the choice of a device.

    Raises:
        ConfigError: expected ``auto``, ``none``, ``cuda`` or ``cuda:N``.
    """
    kind, colon, ordinal = choice.partition(":")
    if choice in ("auto", "none", "cuda"):
        return choice
    # isdigit alone would accept digits of other scripts
    if (kind, colon) == ("cuda", ":") and ordinal.isascii() and ordinal.isdigit() and len(ordinal) <= MAX_DIGITS:
        return f"cuda:{int(ordinal)}"
    near = hint(kind, ("auto", "none", "cuda"))
    raise ConfigError(
        f"{name}={choice!r} must be auto, none, cuda, or cuda:N for the N-th device of this host, from 0{near}"
    )


def _find_world(reader: Reader, reasons: list[str]) -> FoundWorld:
    world = _from_arguments(reader.given) or choose(survey(reader.environ))
    if world is None:
        reasons.append("alone: no launcher's variables were found")
        return FoundWorld(ALONE, 0, 1, (0, 1), None, "")
    if world.source not in (ARGUMENTS, KFCOMM) and "KFCOMM_SIZE" in reader.environ:
        size = integer(reader.environ, "KFCOMM_SIZE", 1, MAX_RANKS)
        if size != world.size:
            raise ConfigError(f"KFCOMM_SIZE={size}, but {world.source} has {world.size} ranks ({world.because})")
    reasons.append(f"{world.source}: rank {world.rank} of {world.size} ({world.because})")
    return world


def _from_arguments(given: Mapping[str, Any]) -> FoundWorld | None:
    names = ("rank", "size")
    if not any(name in given for name in names):
        return None
    if "rank" not in given and whole_number(given["size"]) == 1:
        given = {**given, "rank": 0}
    rank, size = _integers(given, *names)
    local = None
    if "local_rank" in given or "local_size" in given:
        local = _integers(given, "local_rank", "local_size")
    return FoundWorld(ARGUMENTS, rank, size, local, None, f"rank={rank}, size={size}")


def _integers(given: Mapping[str, Any], *names: str) -> tuple[int, int]:
    for name in names:
        if name not in given:
            raise ConfigError(f"{' and '.join(names)} go together; {name} is missing")
        if whole_number(given[name]) is None:
            raise ConfigError(f"{name}={given[name]!r} must be an integer")
    return operator.index(given[names[0]]), operator.index(given[names[1]])


def _find_store(reader: Reader, world: FoundWorld, reasons: list[str]) -> str | None:
    given = reader.optional("store")
    if given is not None:
        host, port = host_and_port(given, reader.name("store"))
        if world.source == ALONE:
            raise ConfigError(f"{reader.name('store')}={given!r} is set, but no rank and size: set both of them too")
        # An elastic job of one rank may grow: others find it by the store.
        if world.size > 1 or reader.flag("elastic", default=False):
            reasons.append(f"store {given}: {reader.name('store')}")
            return store_url(LOOPBACK if host == "localhost" else host, port)
    if world.size == 1:
        return None
    if world.store is None:
        raise ConfigError(
            f"{world.source}: rank {world.rank} of {world.size} cannot tell where the others are; "
            "set KFCOMM_STORE to http://ADDRESS:PORT, an address of rank 0's host and a free port there"
        )
    host, port = world.store
    # ranks of one host use loopback, which no other host can reach
    url = store_url(LOOPBACK if world.is_one_host or host == "localhost" else host, port)
    reasons.append(f"store {url}: served by rank 0, from {world.source}'s variables")
    return url


def _find_token(reader: Reader, store: str | None, source: str, reasons: list[str]) -> tuple[bytes | None, str | None]:
    """The token, or the channel by which rank 0 hands it over; neither for a world of one."""
    found = given_token(reader.environ, reader.given.get("token"))
    if found is None:
        if store is None:
            return None, None
        found = concealed_token(store)
        if found is None and not _is_here(store):
            from kfcomm.rendezvous.channels import choose_channel  # few need one

            channel = choose_channel(reader.environ, source, serves=reader.flag("serve", default=True))
            reasons.append(f"token: rank 0 hands it over by {channel}")
            return None, channel
    token, origin = found or user_token(reader.environ)
    reasons.append(f"token: {origin}")
    return token, None


def _is_here(store: str) -> bool:
    return is_loopback(host_and_port(store)[0])
