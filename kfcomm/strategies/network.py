"""Constants of the time model of networks; see `kfcomm.strategies.auto`."""

from __future__ import annotations

from dataclasses import dataclass

from kfcomm.types import Costs, Rates


@dataclass(frozen=True, slots=True)
class NetworkModel:
    """The constants of the time model, for edges inside a host and between hosts.

    The defaults are those of shared memory on a small server, measured (see "Performance"), and of TCP over 10 Gbit/s
    Ethernet.

    Attributes:
        local_alpha_s: latency of an edge inside a host, in seconds.
        local_beta_s_per_byte: seconds for each byte on such an edge.
        cross_alpha_s: latency of an edge between hosts, in seconds.
        cross_beta_s_per_byte: seconds for each byte through a host's network port.
        overhead_s: time a rank spends on each message that it sends or receives.
        gamma_s_per_byte: time a rank spends on folding one byte into its own.
        chunk_nbytes: the largest part of a message that travels as one.
        rates: of hosts that are unlike, in the place of ``cross_beta_s_per_byte``, and of ``cross_alpha_s`` if it has
            latencies; None where all are alike.
    """

    local_alpha_s: float = 1.5e-5
    local_beta_s_per_byte: float = 2e-10
    cross_alpha_s: float = 5e-5
    cross_beta_s_per_byte: float = 8e-10
    overhead_s: float = 1e-5
    gamma_s_per_byte: float = 1e-10
    chunk_nbytes: int = 1 << 19
    rates: Rates | None = None

    @classmethod
    def of(cls, costs: Costs) -> NetworkModel:
        """The measured constants, and the defaults for the rest."""
        return cls(**{name: value for name, value in costs._asdict().items() if value is not None})
