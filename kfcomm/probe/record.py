"""Result of a probe: two matrices, and the hosts of the ranks."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

import numpy as np

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.saved_costs import Link, Rack, save_costs
from kfcomm.strategies import Strategy, hosts_of, minimum_spanning_tree
from kfcomm.strategies.cost import NetworkModel, costs_of, host_rates, network_of
from kfcomm.strategies.matrices import checked_bandwidth, checked_latency, rates_of
from kfcomm.strategies.tree_packing import bound_of, packed_by, ports_of
from kfcomm.types import Costs, Layout, Rates, Uplink, check_racks

Matrix: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

FORMAT = 1


@dataclass(frozen=True, eq=False, slots=True)
class Probe:
    """Latency and bandwidth between every two ranks; row r is about the ways from rank r.

    Attributes:
        layout: where the ranks are.
        latency_s: float64[n, n], seconds one way (half of a round trip); 0 on the diagonal.
        bandwidth: float64[n, n], bytes per second from row to column, each pair measured while no other used its hosts'
            ports, between racks also by the uplinks; infinite on the diagonal.
        overhead_s: float64[n, n], seconds of work for each message, of its sender or its receiver, whichever has more;
            0 on the diagonal. None if it was not measured.
        fold_s_per_byte: float64[n], seconds that each rank needs to fold one byte of float32; None likewise.
        host_names: name and address of each host of the layout, for ``keep``; empty if they are not known.
        uplinks: of racks whose hosts share one, in bytes per second; see `kfcomm.probe.together`.

    Raises:
        ConfigError: a matrix does not have the layout's size, an entry is not a latency or bandwidth, there is not
            one name for each host, or a rack has unknown hosts or rates that are not above 0 and finite.
    """

    layout: Layout
    latency_s: Matrix
    bandwidth: Matrix
    overhead_s: Matrix | None = None
    fold_s_per_byte: Matrix | None = None
    host_names: tuple[str, ...] = ()
    uplinks: tuple[Uplink, ...] = ()

    def __post_init__(self) -> None:
        size = self.layout.size
        checks: dict[str, Callable[[Any, int], Any]] = {
            "latency_s": checked_latency, "bandwidth": checked_bandwidth, "overhead_s": checked_latency,
            "fold_s_per_byte": _checked_work,
        }  # fmt: skip
        for name, check in checks.items():
            given = getattr(self, name)
            if given is not None:
                checked = np.array(check(given, size), np.float64)
                # A frozen record is not changed through its arrays either.
                checked.flags.writeable = False
                object.__setattr__(self, name, checked)
        if self.host_names and len(set(self.host_names)) != self.layout.num_hosts:
            raise ConfigError(
                f"host_names needs {self.layout.num_hosts} different names, one for each host of the layout, got "
                f"{list(self.host_names)!r}"
            )
        try:
            check_racks(self.uplinks, self.layout.num_hosts)
        except ValueError as error:
            raise ConfigError(str(error)) from error

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.layout.size

    def slowest(self, number: int = 3) -> list[tuple[int, int]]:
        """The ``(from, to)`` of least bandwidth, slowest first."""
        pairs = [(a, b) for a in range(self.size) for b in range(self.size) if a != b]
        return sorted(pairs, key=lambda pair: (self.bandwidth[pair], pair))[:number]

    # ---------------------------------------------------------------- what to make of it

    def minimum_spanning_tree(self, *, name: str = "minimum_spanning_tree") -> Strategy:
        """Strategy of the tree with the least total latency, by ``kfcomm.strategies.minimum_spanning_tree``."""
        return minimum_spanning_tree(self.latency_s.tolist(), name=name)

    def packed_trees(self, *, name: str = "packed_trees") -> Strategy:
        """Strategy of trees that share the measured bandwidth, by ``kfcomm.strategies.packed_trees``."""
        return packed_by(*self._ports(), name=name)

    def bound_seconds(self, nbytes: int) -> float:
        """Lower bound of the time of an all_reduce, by ``kfcomm.strategies.bound_seconds``."""
        return nbytes * bound_of(self._ports()[1])

    def _ports(self) -> tuple[Layout, Rates]:
        """Owners of ports, with rates: hosts, or the ranks of a single host."""
        nodes = ports_of(self.layout)
        return nodes, rates_of(nodes, self.bandwidth.tolist())._replace(uplinks=self.uplinks)

    def network(self) -> NetworkModel:
        """For ``predict_seconds`` of ``kfcomm.strategies.cost``: the constants of its model as they were measured."""
        network = network_of(self.layout, *self._lists())
        return network if network.rates is None else replace(network, rates=self._of_racks(network.rates))

    def _of_racks(self, rates: Rates) -> Rates:
        return rates._replace(uplinks=self.uplinks)

    def costs(self) -> Costs:
        """Costs of messages here, for ``keep`` and for ``Layout.costs``: the medians of what was measured."""
        return costs_of(self.layout, *self._lists())

    def measured_layout(self) -> Layout:
        """The layout with these costs and, of several hosts, their rates: what a job on them sees after ``keep``."""
        several = self.layout.num_hosts > 1
        rates = self._of_racks(host_rates(self.layout, *self._lists()[:3])) if several else None
        return replace(self.layout, costs=self.costs()._replace(rates=rates))

    def keep(self, busy: float | None = None) -> Path:
        """Keep the costs for all jobs of this user that start on this host after this: their ``auto`` counts with them.

        With several hosts also the rates and latencies between every two of them, by name and address. A job uses them
        if each of its hosts has kept its links to all others, in this probe or another. Call it on one rank of each
        host.

        Args:
            busy: the share of the processors that was in use just before (0 to 1), which is kept with them.

        Returns:
            The file that holds them, in the user's cache.

        Raises:
            ConfigError: it cannot be written.
        """
        names = self.host_names
        racks = [Rack(tuple(names[host] for host in one.hosts), one.send, one.receive) for one in self.uplinks if names]
        return save_costs(self.costs(), busy, self._links(), racks)

    def _links(self) -> dict[str, dict[str, Link]]:
        """Rate and latency from host to host, by their names."""
        if self.layout.num_hosts == 1 or not self.host_names:
            return {}
        rates = host_rates(self.layout, *self._lists()[:3])
        return {
            here: {
                there: (rates.links[a][b], rates.latency_s[a][b]) for b, there in enumerate(self.host_names) if a != b
            }
            for a, here in enumerate(self.host_names)
        }

    def hosts(self) -> Layout:
        """Hosts (or racks) as the distances show them; see ``kfcomm.strategies.hosts_of``."""
        return hosts_of(self.latency_s.tolist(), self.bandwidth.tolist())

    def _lists(self) -> tuple[Any, ...]:
        measured = (self.latency_s, self.bandwidth, self.overhead_s, self.fold_s_per_byte)
        return tuple(None if one is None else one.tolist() for one in measured)

    # ---------------------------------------------------------------- as a file

    def as_json(self) -> dict[str, Any]:
        """A record for ``json.dumps``, with None for the infinite diagonal."""
        return {
            "format": FORMAT,
            "hosts": list(self.layout.hosts),
            "num_cpus": self.layout.num_cpus,
            "latency_s": self.latency_s.tolist(),
            "bandwidth": [[None if math.isinf(rate) else rate for rate in row] for row in self.bandwidth.tolist()],
            "overhead_s": None if self.overhead_s is None else self.overhead_s.tolist(),
            "fold_s_per_byte": None if self.fold_s_per_byte is None else self.fold_s_per_byte.tolist(),
            "host_names": list(self.host_names),
            "uplinks": [{**one._asdict(), "hosts": list(one.hosts)} for one in self.uplinks],
        }

    @classmethod
    def from_json(cls, record: Any) -> Self:
        """Inverse of ``as_json``.

        Raises:
            ConfigError: it is something else.
        """
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ConfigError(f"expected a probe: it has no field 'format' of {FORMAT}")
        try:
            layout = Layout(tuple(map(int, record["hosts"])), int(record["num_cpus"]))
            bandwidth = [[math.inf if rate is None else rate for rate in row] for row in record["bandwidth"]]
            names = tuple(map(str, record.get("host_names", ())))
            uplinks = tuple(
                Uplink(tuple(map(int, one["hosts"])), float(one["send"]), float(one["receive"]))
                for one in record.get("uplinks", ())
            )
            works = record.get("overhead_s"), record.get("fold_s_per_byte")
            return cls(
                layout, record["latency_s"], cast("Any", bandwidth), *works, names, uplinks
            )  # it is checked there
        except KeyError as error:
            raise ConfigError(f"expected a probe: field {error} is missing") from error
        except (TypeError, ValueError) as error:
            raise ConfigError(f"expected a probe: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote.

        Raises:
            ConfigError: it is something else; the message names the file.
            OSError: the file cannot be read.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise ConfigError(f"{os.fspath(path)}: {error}") from error


def _checked_work(seconds: Any, size: int) -> list[float]:
    """Seconds for each byte, by rank."""
    try:
        values = [float(one) for one in seconds]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"fold_s_per_byte is a list of numbers, one for each rank: {error}") from error
    if len(values) != size or not all(0 <= one < math.inf for one in values):
        raise ConfigError(f"fold_s_per_byte is one finite number of seconds, at least 0, for each of {size} ranks")
    return values
