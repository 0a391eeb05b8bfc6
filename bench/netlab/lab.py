"""The bed: hosts on a bridge, each behind a link of its own rate, in namespaces of their own.

::

    host h0: port --htb-->  p0 +--------+ p1  <--htb-- port :host h1
                  <--htb--     | bridge |     --htb-->
                               +--------+
    each host, and the bridge, is a namespace: nothing of the machine's own network is touched

What leaves a host waits at its ``port``; what goes there, at the bridge's end of the same cable. So each direction has
its rate, as on a full-duplex link to a switch, and those who use it at once have equal parts of it (see ``links``).

A link has no delay but the kernel's (netem, which adds delay, is missing in many kernels), and loses
nothing. Little waits: TCP's window is what a link carries in a few milliseconds, given with the route, and a
pause does not close it. The congestion control is reno, which every kernel grants to every namespace; bbr would empty
its window for 200 ms every few seconds.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self, TypeAlias

from bench.netlab import signals
from bench.netlab.hosts import MAX_HOSTS, PORT, Host, HostSpec, index_of
from bench.netlab.links import Shaper, TailShaper, shown_rate
from bench.netlab.namespaces import Namespace, clean, owner
from bench.netlab.program import Outcome, Program
from bench.netlab.rates import MAX_MTU, MIN_MTU, Bucket, window_frames
from bench.netlab.tools import NetlabError, NetlabUnavailable, check_tools
from kfcomm.errors import ConfigError

NETWORK = "10.77.0.0/16"
MTU = 1500
VARIABLES = {
    "net.ipv4.tcp_congestion_control": "reno",
    "net.ipv4.tcp_no_metrics_save": "1",  # else a connection begins with what an earlier one has met
    "net.ipv4.tcp_slow_start_after_idle": "0",
    "net.ipv4.tcp_rmem": "4096 131072 4194304",
    "net.ipv4.tcp_wmem": "4096 65536 4194304",
}
_BRIDGE, _ASIDE = "bridge", "aside"
_RACK, _UP, _DOWN = "rack", "uplink", "downlink"
AnyShaper: TypeAlias = Shaper | TailShaper
_serials = itertools.count()


class Direction(StrEnum):
    """Of a link, seen from its host."""

    OUT = "out"
    IN = "in"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Wires:
    """Cables and switches as most networks have them: drop-tail queues, and TCP as the kernel has it.

    Attributes:
        slow: pairs of hosts whose link is slower than their ports, in bits per second.
        racks: hosts by rack, each rack with a switch of its own; at most two; empty for one switch.
        uplink: bits per second between racks, in each direction.
    """

    slow: Mapping[tuple[str, str], float] = field(default_factory=dict)
    racks: tuple[tuple[str, ...], ...] = ()
    uplink: float = 0.0


class Netlab:
    """A bed of hosts, as a context manager: it stands inside, and nothing is left of it afterwards.

    That holds after exceptions and Ctrl-C, and after SIGTERM and SIGHUP where it is used on the main thread without
    other handlers of these: they end the program through `SystemExit` then. What a process that was killed outright has
    left is taken away by the next one, or by ``python -m bench.netlab clean``.

    Args:
        hosts: who is there; the ranks of a program are given out in this order.
        network: in CIDR notation; the hosts get its first addresses. No other host can see it.
        mtu: bytes of IP in one frame.
        variables: of sysctl(8), for each host, beside and before `VARIABLES`.
        wires: drop-tail queues in place of fair ones, with slow links and racks.

    Attributes:
        hosts: those that stand there, in order; empty outside of the context.

    Raises:
        ConfigError: from the constructor: a value cannot work.
        NetlabUnavailable: on entering: no bed can be made here; the text names what is missing.
        NetlabError: on entering: something else went wrong.
    """

    def __init__(
        self,
        hosts: Sequence[HostSpec],
        *,
        network: str = NETWORK,
        mtu: int = MTU,
        variables: Mapping[str, str] | None = None,
        wires: Wires | None = None,
    ) -> None:
        self.hosts: tuple[Host, ...] = ()
        self.mtu = mtu
        self._specs = tuple(hosts)
        self._network = _checked_network(network, self._specs)
        self._variables = {**VARIABLES, **(variables or {})}
        self._wires = wires
        self._made: list[Namespace] = []
        self._switch = Namespace("")
        self._is_parted = False
        self._stack = contextlib.ExitStack()
        if not MIN_MTU <= mtu <= MAX_MTU:
            raise ConfigError(f"mtu={mtu}: must be between {MIN_MTU} and {MAX_MTU}")

    def __enter__(self) -> Self:
        check_tools()
        self._stack.enter_context(signals.ending(signal.SIGTERM, signal.SIGHUP))
        try:
            self._build()
            with contextlib.suppress(NetlabError):  # what others have left does not keep this bed from standing
                clean()
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_down()

    def host(self, name: str) -> Host:
        """The host of this name.

        Raises:
            ConfigError: the host is unknown.
        """
        return self.hosts[index_of(name, [host.name for host in self.hosts])]

    def set_rate(self, name: str, rate: float | None, direction: Direction = Direction.BOTH) -> None:
        """Give a host's link another rate, at once; what waits there goes on at the new one.

        Args:
            name: of the host.
            rate: bits per second, headers included; None for no limit.
            direction: seen from the host.

        Raises:
            ConfigError: the host is unknown, or the rate cannot be held.
        """
        host = self.host(name)
        for namespace, shaper in self._ends(host, direction):
            self._limit(namespace, shaper, rate, is_limited=_rate_of(namespace, shaper) is not None)

    def rates(self, name: str) -> dict[Direction, float | None]:
        """The rates of a host's link out of it and into it, as the kernel has them; None without a limit.

        Raises:
            ConfigError: the host is unknown.
        """
        host = self.host(name)
        return {each: _rate_of(*self._ends(host, each)[0]) for each in (Direction.OUT, Direction.IN)}

    def partition(self, names: Sequence[str]) -> None:
        """Cut these hosts off from all others until `heal`; their interfaces stay up.

        Raises:
            ConfigError: the host is unknown.
        """
        switch, cables = self._switch, [self._cable_end(self.host(name)) for name in names]
        if not self._is_parted:
            switch.ip("link", "add", _ASIDE, "type", "bridge", "mcast_snooping", "0")
            switch.ip("link", "set", _ASIDE, "mtu", str(self.mtu), "up")
            self._is_parted = True
        for cable in cables:
            switch.ip("link", "set", cable, "master", _ASIDE)

    def heal(self) -> None:
        """All hosts reach each other again."""
        if self._is_parted:
            for host in self.hosts:
                self._switch.ip("link", "set", self._cable_end(host), "master", _BRIDGE)
            self._switch.ip("link", "delete", _ASIDE)
            self._is_parted = False

    def start(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, collect: bool = True) -> Program:
        """Start a kfcomm program: ``kfcomm run`` on every host, each with the ranks of that host.

        Args:
            command: the program and its arguments; options of ``kfcomm run`` may stand before it.
            env: variables beside those of this process, for example ``KFCOMM_STRATEGY``.
            collect: whether its output is kept; else it goes where this process's goes.

        Returns:
            A context manager: nothing of the program outlives it.

        Raises:
            ConfigError: the command is empty.
        """
        if not command:
            raise ConfigError("expected a program to run, got an empty command")
        return Program(self.hosts, command, env or {}, collect=collect)

    def run(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float | None = None
    ) -> Outcome:
        """Run a kfcomm program to its end; see `start`.

        Raises:
            NetlabError: it did not end in time, and has been ended.
        """
        with self.start(command, env=env) as program:
            return program.wait(timeout_s)

    def _build(self) -> None:
        prefix = f"{owner()}-{next(_serials)}"
        self._switch = Namespace(prefix)
        with _naming("network namespaces are not permitted here (it takes root, or CAP_SYS_ADMIN and CAP_NET_ADMIN)"):
            self._add(self._switch)
        with _naming("the kernel makes no bridge (module bridge)"):
            self._switch.ip("link", "add", _BRIDGE, "type", "bridge", "mcast_snooping", "0")
        self._switch.ip("link", "set", _BRIDGE, "mtu", str(self.mtu), "up")
        if self._wires is not None and self._wires.racks:
            self._join_racks(self._wires)
        addresses = self._network.hosts()
        self.hosts = tuple(Host(spec, str(next(addresses)), Namespace(f"{prefix}-{spec.name}")) for spec in self._specs)
        for host in self.hosts:
            self._add(host.namespace)
            self._connect(host)

    def _join_racks(self, wires: Wires) -> None:
        """A second bridge, and a cable between the two that is limited in both directions."""
        switch = self._switch
        switch.ip("link", "add", _RACK, "type", "bridge", "mcast_snooping", "0")
        switch.ip("link", "set", _RACK, "mtu", str(self.mtu), "up")
        switch.ip("link", "add", _UP, "type", "veth", "peer", "name", _DOWN)
        gso = ["gso_max_size", str(Bucket.holding(wires.uplink, self.mtu).gso_nbytes(self.mtu))]
        for interface, bridge in ((_UP, _BRIDGE), (_DOWN, _RACK)):
            switch.ip("link", "set", interface, "mtu", str(self.mtu), "addrgenmode", "none", *gso)
            switch.ip("link", "set", interface, "master", bridge, "up")
            self._limit(switch, TailShaper(interface), wires.uplink)

    def _bridge_of(self, host: Host) -> str:
        racks = () if self._wires is None else self._wires.racks
        return _RACK if len(racks) > 1 and host.name in racks[1] else _BRIDGE

    def _add(self, namespace: Namespace) -> None:
        self._made.append(namespace)
        namespace.add()

    def _connect(self, host: Host) -> None:
        """Join the host to the bridge, and limit both directions."""
        switch, inside, cable_end = self._switch, host.namespace, self._cable_end(host)
        with _naming("the kernel makes no pairs of virtual interfaces (module veth)"):
            switch.ip("link", "add", cable_end, "type", "veth", "peer", "name", PORT, "netns", inside.name)
        options = ["mtu", str(self.mtu), "addrgenmode", "none", *self._segmentation(host)]
        switch.ip("link", "set", cable_end, *options)
        switch.ip("link", "set", cable_end, "master", self._bridge_of(host), "up")
        inside.ip("link", "set", PORT, *options)
        inside.ip("address", "add", f"{host.address}/{self._network.prefixlen}", "dev", PORT)
        inside.ip("link", "set", PORT, "up")
        window = self._window()
        inside.ip("route", "change", str(self._network), "dev", PORT, "src", host.address, *window)
        with _naming("variables of a namespace cannot be set (is /proc/sys writable?)"):
            for variable, value in self._variables.items():
                inside.write(variable, value)
        with _naming("the kernel limits no rates (modules sch_htb and cls_u32)"):
            for namespace, shaper in self._ends(host, Direction.BOTH):
                self._limit(namespace, shaper, host.spec.rate)

    def _segmentation(self, host: Host) -> list[str]:
        rate = host.spec.rate
        return [] if rate is None else ["gso_max_size", str(Bucket.holding(rate, self.mtu).gso_nbytes(self.mtu))]

    def _window(self) -> list[str]:
        """Wide enough for the fastest host: a connection keeps its window when rates change."""
        rates = [spec.rate for spec in self._specs if spec.rate is not None]
        is_bounded = len(rates) == len(self._specs) and self._wires is None
        return ["cwnd", "lock", str(window_frames(max(rates), self.mtu))] if is_bounded else []

    def _limit(self, namespace: Namespace, shaper: AnyShaper, rate: float | None, *, is_limited: bool = False) -> None:
        if rate is not None:
            bucket = Bucket.holding(rate, self.mtu)
            namespace.tc_all(shaper.changed(bucket) if is_limited else shaper.added(bucket))
        elif is_limited:
            namespace.tc_all(shaper.removed())

    def _ends(self, host: Host, direction: Direction) -> list[tuple[Namespace, AnyShaper]]:
        """Shapers of the link in this direction, and their namespaces."""
        out: tuple[Namespace, AnyShaper]
        into: tuple[Namespace, AnyShaper]
        if self._wires is not None:
            out = host.namespace, TailShaper(PORT, self._slow_links(host, self._wires))
            into = self._switch, TailShaper(self._cable_end(host))
        else:
            addresses = tuple(each.address for each in self.hosts)
            out = host.namespace, Shaper(PORT, "dst", addresses)
            into = self._switch, Shaper(self._cable_end(host), "src", addresses)
        ends = {Direction.OUT: (out,), Direction.IN: (into,), Direction.BOTH: (out, into)}
        return list(ends[Direction(direction)])

    def _slow_links(self, host: Host, wires: Wires) -> dict[str, float]:
        """Rates of this host's slow links, by the address of the other end."""
        addresses = {each.name: each.address for each in self.hosts}
        ends = [(ends, rate) for (a, b), rate in wires.slow.items() for ends in ((a, b), (b, a))]
        return {addresses[there]: rate for (here, there), rate in ends if here == host.name}

    def _cable_end(self, host: Host) -> str:
        return f"p{self.hosts.index(host)}"

    def _take_down(self) -> None:
        """Remove everything that was made, even if the bed is incomplete. Signals wait meanwhile."""
        errors = []
        with signals.held_back(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self.hosts, self._is_parted = (), False
            while self._made:
                try:
                    self._made.pop().delete()
                except NetlabError as error:
                    errors.append(str(error))
        self._stack.close()
        if errors:
            raise NetlabError("\n".join(errors))


def why_unavailable() -> str:
    """Name what is missing to make a bed here; empty if one can be made. Tries it with one small host."""
    try:
        with Netlab([HostSpec("h0", 1e6)]):
            return ""
    except NetlabUnavailable as error:
        return str(error)


def _checked_network(text: str, specs: Sequence[HostSpec]) -> ipaddress.IPv4Network:
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError as error:
        raise ConfigError(f"network {text!r}: {error}; one is like {NETWORK}") from None
    if not 1 <= len(specs) <= MAX_HOSTS:
        raise ConfigError(f"{len(specs)} hosts: must be 1 to {MAX_HOSTS}, each link has a class for every other host")
    if len(specs) > network.num_addresses - 2:
        raise ConfigError(f"network {text!r} has no addresses for {len(specs)} hosts")
    names = [spec.name for spec in specs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"more than one host is called {twice[0]!r}")
    return network


def _rate_of(namespace: Namespace, shaper: AnyShaper) -> float | None:
    """Bits per second to which the kernel holds this direction; None if it does not."""
    return shown_rate(namespace.tc("class", "show", "dev", shaper.interface))


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """A failure in here means that ``what``."""
    try:
        yield
    except NetlabError as error:
        raise NetlabUnavailable(f"{what}: {error}") from error
