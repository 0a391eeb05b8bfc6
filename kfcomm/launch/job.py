"""What `kfcomm run` was asked to start, and what each rank of it is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kfcomm.launch.elastic import Elasticity
from kfcomm.launch.hosts import Plan
from kfcomm.launch.options import LAUNCHER, RunOptions, rank_environ
from kfcomm.monitor import serving
from kfcomm.plugins import check
from kfcomm.rendezvous.interfaces import choose_address
from kfcomm.rendezvous.settings import Settings, detect, store_url
from kfcomm.rendezvous.worlds import DEFAULT_PORT
from kfcomm.tls import Tls, load


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
    """

    options: RunOptions
    plan: Plan
    elastic: Elasticity | None
    program: str
    token: bytes
    mark: str
    environ: Mapping[str, str]

    def environ_of(self, rank: int, place: int, store: str, launcher: str = "") -> dict[str, str]:
        """The environment of a rank, which has this place on its host."""
        own = rank_environ(
            self.environ, self.options, self.plan, rank, place=place, store=store, token=self.token, job=self.mark
        )
        return {**own, LAUNCHER: launcher}

    def ranks_of(self, host: int) -> Iterable[int]:
        """Those that a host has, or had, as far as it is known here."""
        return self.plan.ranks_of(host) if self.elastic is None else self.elastic.births_at(host)

    def check(self) -> Settings:
        """Find here, once, what every rank would find wrong."""
        # which port it will be does not matter to the check
        store = self.plan.hosts[0].address, self.options.store_port() or DEFAULT_PORT
        settings = detect(self.environ_of(self.plan.ranks.start, 0, store_url(*store)))
        choose_address(settings.interface, store)
        check(settings.strategy)
        serving.check(settings)
        tls_of(settings)
        return settings


def tls_of(settings: Settings) -> Tls | None:
    """What connections of the job are secured with; None for plain ones."""
    return None if settings.tls is None else load(settings.tls)
