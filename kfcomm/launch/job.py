"""What `kfcomm run` was asked to start, and what each rank of it is given."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kfcomm.common.sockets import RESERVE, raise_limit
from kfcomm.common.tls import Tls, load
from kfcomm.errors import ConfigError
from kfcomm.launch import torch_environ
from kfcomm.launch.coming import who_launches
from kfcomm.launch.discovery import Discovery
from kfcomm.launch.elastic import Elasticity
from kfcomm.launch.hosts import Plan
from kfcomm.launch.options import JOB, LAUNCHER, RunOptions, rank_environ
from kfcomm.monitor import serving
from kfcomm.rendezvous.interfaces import choose_address
from kfcomm.rendezvous.settings import Settings, detect, store_url
from kfcomm.rendezvous.worlds import DEFAULT_PORT
from kfcomm.strategies.plugins import check

OWN, LEAST_PER_RANK, PER_RANK = 12, 5, 10
"""Descriptors of a launcher: its own, and for each rank two pipes, the process, the socket to it, and one of the store,
at least: 72 were counted of 12 ranks. More are open while they join."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is the same for all ranks of the job on this host.

    Attributes:
        options: as they were given.
        plan: who begins where.
        elastic: how many ranks there may be; None if they do not change.
        program: the file to run.
        token: the secret of the job.
        mark: the name of the job on this host.
        environ: of the launcher.
        launcher: which one this is, as it tells others.
        discovery: says which hosts there are; None if that does not change, or this is not the first host.
        arrivals: addresses of other hosts whose launchers have come after the beginning.
        torch_port: at which rank 0 of torch's group can listen; None if ranks may change.
    """

    options: RunOptions
    plan: Plan
    elastic: Elasticity | None
    program: str
    token: bytes
    mark: str
    environ: Mapping[str, str]
    launcher: bytes = field(default_factory=who_launches)
    discovery: Discovery | None = None
    arrivals: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    torch_port: int | None = None

    def at(self, position: int) -> Job:
        """As it is on a host that has this position: one that it had not at the beginning has no ranks of that."""
        is_first = position == self.plan.here and not self.plan.is_late
        return self if is_first else replace(self, plan=self.plan.with_late(self.plan.address))

    def with_torch_port(self, settings: Settings) -> Job:
        """With a port for torch's group, where ranks do not change; on the first host."""
        if self.elastic is not None:
            return self
        first = settings.metrics_port or 0
        taken = {self.options.store_port(), *range(first, first + len(self.plan.ranks))}
        return replace(self, torch_port=torch_environ.free_port(self.mark, taken))

    async def discovered(self) -> Job:
        """With the hosts that a program says there are, if it is to; on the first host.

        Raises:
            ConfigError: it cannot be run, or gives no answer that can be understood.
        """
        if self.options.discover is None or self.elastic is None:
            return self
        discovery = Discovery.of(self.options.discover, {**self.environ, JOB: self.mark})
        self.elastic.slots = await discovery.first()
        self.elastic.asked = self.elastic.most
        return replace(self, discovery=discovery)

    def environ_of(self, rank: int, place: int, store: str, launcher: str = "") -> dict[str, str]:
        """The environment of a rank, which has this place on its host."""
        own = rank_environ(
            self.environ, self.options, self.plan, rank, place=place, store=store, token=self.token, job=self.mark,
            torch_port=self.torch_port,
        )  # fmt: skip
        return {**own, LAUNCHER: launcher}

    def ranks_of(self, host: int) -> Iterable[int]:
        """Those that a host has, or had, as far as it is known here."""
        return self.plan.ranks_of(host) if self.elastic is None else self.elastic.births_at(host)

    def _check_descriptors(self) -> None:
        """This launcher, and the ranks with it, may have open what they need.

        Raises:
            ConfigError: even the hard limit is too low for the ranks with which the job begins.
        """
        here, all_ranks = len(self.plan.ranks), self.plan.size
        most = all_ranks if self.elastic is None else max(all_ranks, self.elastic.most + self.elastic.spares)
        allowed = raise_limit(RESERVE + PER_RANK * most)
        least = OWN + LEAST_PER_RANK * here
        if allowed < least:
            raise ConfigError(
                f"{here} ranks on this host need {least} open files in their launcher: the hard limit is {allowed}; "
                "raise it (ulimit -Hn, or nofile in /etc/security/limits.conf), or start fewer ranks on a host"
            )

    def check(self) -> Settings:
        """Find here, once, what every rank would find wrong."""
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
    """What connections of the job are secured with; None for plain ones."""
    return None if settings.tls is None else load(settings.tls)
