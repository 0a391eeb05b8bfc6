"""Job of `kfcomm run`: its options, and the environment of each rank.

Ranks also get the variables of ``torch.distributed`` (``env://``), as torchrun sets them. Variables of the user stay;
those of an enclosing launcher (torchrun, or another ``kfcomm run``) describe its ranks, not these, and are replaced.
kfcomm itself reads ``KFCOMM_*`` first, and never uses these variables in such a job. In an elastic job rank and size
change while a process lives, which a group of torch cannot follow. So only ``LOCAL_RANK`` is set there, for the choice
of a device, and ``env://`` fails at once for lack of ``RANK``.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from kfcomm.common.sizes import shortened
from kfcomm.common.sockets import HOW_TO_RAISE, RESERVE, raise_limit
from kfcomm.errors import ConfigError
from kfcomm.launch.elastic import Elasticity, parse
from kfcomm.launch.hosts import Discovery, HostPlan, LaunchHost, parse_hosts, plan_for, resolved
from kfcomm.launch.placing import nodes_of, processors
from kfcomm.monitor import serving
from kfcomm.rendezvous.authentication import HOW_TO_SET, as_text, given_token, new_token, read_token
from kfcomm.rendezvous.backends import backend_of, secret_variables
from kfcomm.rendezvous.host import choose_address, hostname, interfaces, store_url
from kfcomm.rendezvous.settings import Settings, detect
from kfcomm.rendezvous.worlds import DEFAULT_PORT
from kfcomm.strategies.plugins import check
from kfcomm.transports.tls import Tls, load

_MAX_DIGITS = 6
MAX_NAME = 20
_NAME = re.compile(rf"[A-Za-z0-9][\w.-]{{0,{MAX_NAME - 1}}}", re.ASCII)
_INTERPRETER = re.compile(r"python[0-9.]*", re.ASCII)
JOB = "KFCOMM_JOB"
"""Variable of every process of a job, by which the guardian finds them."""
LAUNCHER = "KFCOMM_LAUNCHER"
"""Variable with the address for exit reports (see `exit_reports`)."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of `kfcomm run`."""

    command: tuple[str, ...]  # program and arguments of every rank
    num_ranks: int | None = None  # number of ranks; None to take it from ``hosts``
    hosts: str | None = None  # list of hosts, ``address:ranks,...``; None to run all ranks here
    own: str | None = None  # this host's entry of ``hosts``; None to find out
    port: int | None = None  # port of the store; None for any that is free, or `DEFAULT_PORT` with ``hosts``
    token_file: Path | None = None  # file that holds the token
    grace_s: float = 5.0  # seconds between asking the ranks to end and killing them
    keep_going: bool = False  # whether other ranks continue when one fails
    elastic: str | None = None  # ``MIN`` or ``MIN:MAX`` for an elastic job; None for a fixed size
    restart_limit: int = 100  # largest number of replacements in an elastic job
    spares: int = 0  # number of spare processes of an elastic job
    discover: str | None = None  # command that names the hosts of an elastic job; None if these do not change
    store: str | None = None  # address of the store of an elastic job (see ``rendezvous.backends``); None for memory
    time_limit_s: float | None = None  # seconds after which the job is ended; None for no limit
    bind_to: str = "none"  # processors of each rank (see `placing`)
    log_dir: Path | None = None  # folder for the unprefixed output of each rank
    stdin: str = "none"  # ranks that get the launcher's standard input: ``none``, ``all``, or one by its number
    color: bool | None = None  # whether prefixes are coloured; None to decide by terminal and ``NO_COLOR``
    settings: Mapping[str, str] = field(default_factory=dict)  # variables for the ranks, by full name
    name: str | None = None  # of the job; None for that of the program
    dashboard: bool = False  # whether to serve a live page

    def mark(self) -> str:
        """Return a new name of a job on this host: the given one, or the program's, and a number by chance.

        Raises:
            ConfigError: the given name is not valid.
        """
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"--name is up to {MAX_NAME} letters, digits, '_', '.' and '-' that begin with a letter or digit, "
                f"not {shortened(self.name, 40)!r}"
            )
        return f"{self.name or program_name(self.command)}-{secrets.token_hex(4)}"

    def plan(self) -> HostPlan:
        """Hosts and their initial ranks.

        Raises:
            ConfigError: neither or both of ``num_ranks`` and ``hosts`` are given, or the hosts do not work.
        """
        if self.hosts is None:
            if self.num_ranks is None:
                raise ConfigError("say how many ranks to start: -n 4, or -H 10.0.0.1:4,10.0.0.2:4")
            return HostPlan.single(self.num_ranks)
        plan = self._plan_for(parse_hosts(self.hosts))
        if self.num_ranks not in (None, plan.size):
            raise ConfigError(f"-n {self.num_ranks} contradicts -H {self.hosts!r}, which has {plan.size} ranks")
        return plan

    def _plan_for(self, hosts: tuple[LaunchHost, ...]) -> HostPlan:
        """Plan of this host, which may join later if hosts are discovered."""
        if self.discover is None:
            return plan_for(hosts, self.own)
        mine = {resolved(self.own)} if self.own is not None else {one.address for one in interfaces()}
        if not mine.isdisjoint(host.address for host in hosts):
            return plan_for(hosts, self.own)
        towards = hosts[0].address, self.store_port()
        return HostPlan(hosts).with_late(min(mine) if self.own is not None else choose_address(None, towards))

    def elasticity(self, plan: HostPlan) -> Elasticity | None:
        """Bounds of an elastic job; None for a fixed size.

        Raises:
            ConfigError: options are missing or contradict each other.
        """
        if self.elastic is None:
            given = (("--spares", self.spares), ("--discover", self.discover), ("--store", self.store))
            for option, is_given in given:
                if is_given:
                    raise ConfigError(f"{option} needs --elastic")
            return None
        if self.discover is not None and self.hosts is None:
            raise ConfigError("--discover needs -H with the initial hosts: later ones connect to the first")
        if self.discover is not None and ":" not in self.elastic:
            raise ConfigError(f"--discover starts ranks: expected --elastic MIN:MAX, got {self.elastic!r}")
        hosts = plan.hosts[: plan.num_first]
        ranks, addresses = [host.num_ranks for host in hosts], [host.address for host in hosts]
        return parse(self.elastic, ranks, self.restart_limit, self.spares, addresses)

    def readers(self, plan: HostPlan) -> range:
        """Ranks of this host that get the launcher's standard input.

        Raises:
            ConfigError: the rank does not exist.
        """
        if self.stdin == "all":
            return plan.ranks
        if self.stdin == "none":
            return range(0)
        if not (self.stdin.isascii() and self.stdin.isdigit() and len(self.stdin) <= _MAX_DIGITS):
            raise ConfigError(f"--stdin {self.stdin!r} must be all, none, or a rank")
        rank = int(self.stdin)
        if rank >= plan.size:
            raise ConfigError(f"--stdin {rank}: there are ranks 0 to {plan.size - 1}")
        return range(rank, rank + 1) if rank in plan.ranks else range(0)

    def store_port(self) -> int:
        """The port at which the first host's launcher serves the store; 0 for any."""
        if self.port is not None:
            return self.port
        return 0 if self.hosts is None else DEFAULT_PORT

    def token(self, environ: Mapping[str, str]) -> bytes:
        """The token of the job: the given one, or a new one if this launcher starts all of it.

        Raises:
            ConfigError: the job is on several hosts and no token is given, or the token is invalid.
        """
        if self.token_file is not None:
            return read_token(self.token_file)
        found = given_token(environ, None)
        if found is not None:
            return found[0]
        if self.hosts is None and self.store is not None and (saved := backend_of(self.store).token) is not None:
            return saved(self.store)
        if self.hosts is not None:
            raise ConfigError(f"with -H every host needs the job's token: {HOW_TO_SET}, or use --token-file")
        return new_token().encode()


def who_launches() -> bytes:
    """Unique description of this launcher."""
    return f"process {os.getpid()} on {hostname()} ({secrets.token_hex(8)})".encode()


def program_name(command: Sequence[str]) -> str:
    """Name for a job by its command: the script or the module of Python, else the program."""
    named = command[0]
    if _INTERPRETER.fullmatch(Path(named).name):
        for place, word in enumerate(command[1:], 1):
            if word == "-m":
                named = "".join(command[place + 1 : place + 2]).rpartition(".")[2] + ".py"
            elif not word.startswith("-"):
                named = word
            elif word != "-c":
                continue
            break
    return re.sub(r"[^\w.-]+", "-", Path(named).stem, flags=re.ASCII)[:MAX_NAME].strip("-._") or "job"


OWN, LEAST_PER_RANK, PER_RANK = 12, 5, 10
"""Descriptors of a launcher: its own, and for each rank two pipes, the process, the socket to it, and one of the store,
at least: 72 were counted of 12 ranks. More are open while they join."""


@dataclass(frozen=True, slots=True)
class LaunchJob:
    """Data shared by all ranks of the job on this host."""

    options: RunOptions  # as they were given
    plan: HostPlan  # hosts and their initial ranks
    elastic: Elasticity | None  # numbers and stages of the ranks; None for a fixed size
    program: str  # the file to run
    token: bytes  # the secret of the job
    mark: str  # the name of the job on this host
    environ: Mapping[str, str]  # of the launcher
    launcher: bytes = field(default_factory=who_launches)  # unique description of this launcher
    # script that names the hosts; None if they do not change, or this is not the first host
    discovery: Discovery | None = None
    # addresses of hosts whose launchers arrived after the beginning
    arrivals: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    torch_port: int | None = None  # port for rank 0 of torch's group; None if the job is elastic

    def at(self, position: int) -> LaunchJob:
        """Job as seen from a position; one that is assigned later has no initial ranks."""
        is_first = position == self.plan.here and not self.plan.is_late
        return self if is_first else replace(self, plan=self.plan.with_late(self.plan.address))

    def with_torch_port(self, settings: Settings) -> LaunchJob:
        """Job with a port for torch's group, if its size is fixed; on the first host."""
        if self.elastic is not None:
            return self
        first = settings.metrics_port or 0
        # Still free now, but used soon: by the store and by the metrics of the ranks.
        taken = {self.options.store_port(), *range(first, first + len(self.plan.ranks))}
        return replace(self, torch_port=free_port(self.mark, taken))

    async def discovered(self) -> LaunchJob:
        """Job with the hosts of the discovery script, if any; on the first host.

        Raises:
            ConfigError: the script cannot be run, or gives no valid answer.
        """
        if self.options.discover is None or self.elastic is None:
            return self
        discovery = Discovery.of(self.options.discover, {**self.environ, JOB: self.mark})
        self.elastic.slots = await discovery.first()
        self.elastic.asked = self.elastic.most
        return replace(self, discovery=discovery)

    def environ_of(self, rank: int, place: int, store: str, launcher: str = "") -> dict[str, str]:
        """Environment of the rank with this uid and local rank (``place``), based on the launcher's."""
        options, plan = self.options, self.plan
        # two tokens would contradict each other; passwords of backends are for launchers alone
        hidden = {"KFCOMM_TOKEN_FILE", *secret_variables()}
        kept = {name: value for name, value in inherited(self.environ).items() if name not in hidden}
        interface = {} if options.hosts is None else {"KFCOMM_INTERFACE": plan.address}
        elastic = {} if options.elastic is None else {"KFCOMM_ELASTIC": "1"}
        local_size = len(plan.ranks)
        if rank not in plan.ranks:
            # Started later: it joins by its uid and has no rank before, but the settings need a valid one.
            elastic, rank = elastic | {"KFCOMM_JOIN": str(rank)}, plan.ranks.start if plan.ranks else 0
            local_size = max(local_size, place + 1)
        return {
            # Later entries win: the user's variables over torch's, and those of the job over all.
            "PYTHONUNBUFFERED": "1",
            **torch_variables(plan, rank, (place, local_size), self.torch_port),
            **kept,
            **interface,
            **options.settings,
            **elastic,
            "KFCOMM_RANK": str(rank),
            "KFCOMM_SIZE": str(plan.size),
            "KFCOMM_LOCAL_RANK": str(place),
            "KFCOMM_LOCAL_SIZE": str(local_size),
            "KFCOMM_STORE": store,
            "KFCOMM_SERVE": "0",  # the launcher does
            "KFCOMM_TOKEN": as_text(self.token),
            JOB: self.mark,
            LAUNCHER: launcher,
        }

    def processors(self, place: int) -> list[int]:
        """Processors of the rank at this place of the host; none where ranks are not bound."""
        if self.options.bind_to == "none":
            return []
        size = max(1, len(self.plan.ranks))
        return processors(place, size, self.options.bind_to, sorted(os.sched_getaffinity(0)), nodes_of())

    def ranks_of(self, host: int) -> Iterable[int]:
        """Ranks that a host has, or had, as far as known here."""
        return self.plan.ranks_of(host) if self.elastic is None else self.elastic.uids_at(host)

    def _check_descriptors(self) -> None:
        """Raise the soft limit of open files as needed.

        Raises:
            ConfigError: the hard limit is too low for the initial ranks.
        """
        here, all_ranks = len(self.plan.ranks), self.plan.size
        most = all_ranks if self.elastic is None else max(all_ranks, self.elastic.most + self.elastic.spares)
        allowed = raise_limit(RESERVE + PER_RANK * most)
        least = OWN + LEAST_PER_RANK * here
        if allowed < least:
            raise ConfigError(
                f"{here} ranks on this host need {least} open files in their launcher: the hard limit is {allowed}; "
                f"{HOW_TO_RAISE}"
            )

    def check(self) -> Settings:
        """Check once, here, what every rank would check."""
        # which port it will be does not matter to the check
        store = self.plan.hosts[0].address, self.options.store_port() or DEFAULT_PORT
        settings = detect(self.environ_of(self.plan.ranks.start, 0, store_url(*store)))
        choose_address(settings.interface, store)
        self._check_descriptors()
        check(settings.strategy)
        serving.check(settings)
        tls_of(settings)
        return settings


def tls_of(settings: Settings) -> Tls | None:
    """TLS contexts of the job; None for plain connections."""
    return None if settings.tls is None else load(settings.tls)


LOCAL_RANK = "LOCAL_RANK"
TORCH_NAMES = ("RANK", "WORLD_SIZE", LOCAL_RANK, "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCH_KEY = "torch/port"
"""Key of the store for the port of rank 0 of torch's group, chosen by the first launcher."""

_OTHERS = ("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")
"""Further variables of torchrun."""
_TORCHRUN = "TORCHELASTIC_"
_PORTS = range(20000, 29500)
"""Below Linux's ports for clients, and the defaults of torch and kfcomm."""


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Environment without variables that an enclosing launcher has set for torch."""
    if JOB not in environ and not any(name.startswith(_TORCHRUN) for name in environ):
        return dict(environ)
    foreign = {*TORCH_NAMES, *_OTHERS}
    return {name: value for name, value in environ.items() if not (name in foreign or name.startswith(_TORCHRUN))}


def torch_variables(plan: HostPlan, rank: int, local: tuple[int, int], port: int | None) -> dict[str, str]:
    """Variables to set for a rank, unless the user has set them. ``local``: rank and number of ranks on its host."""
    found = {LOCAL_RANK: str(local[0])}
    if port is not None:
        whole = (rank, plan.size, *local, plan.hosts[0].address, port)
        found = dict(zip(TORCH_NAMES, map(str, whole), strict=True))
    return found


def contradictions(environ: Mapping[str, str], plan: HostPlan) -> Iterator[str]:
    """Warnings about variables of the user that do not fit these ranks."""
    kept = inherited(environ)
    if plan.size > 1 and "RANK" in kept:
        yield f"RANK={kept['RANK']} is kept for all {plan.size} ranks, since it is set: unset it for torch.distributed"
    if kept.get("WORLD_SIZE", str(plan.size)) != str(plan.size):
        yield f"WORLD_SIZE={kept['WORLD_SIZE']} is kept, since it is set, and this job has {plan.size} ranks"


def free_port(mark: str, taken: Collection[int]) -> int:
    """A free port of this host; jobs that start at the same time get different ones.

    Raises:
        ConfigError: no port is free.
    """
    # In an order of its own for each job, so that jobs that look at the same time do not choose the same port.
    for port in Random(mark).sample(_PORTS, len(_PORTS)):
        if port not in taken and all(_is_free(family, port) for family in (socket.AF_INET, socket.AF_INET6)):
            return port
    raise ConfigError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free for MASTER_PORT: set it")


def _is_free(family: int, port: int) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            if family == socket.AF_INET6:
                # Else the socket would take the IPv4 port as well.
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("", port))
    except OSError as error:
        return error.errno != errno.EADDRINUSE  # a host may lack one of the families
    return True
