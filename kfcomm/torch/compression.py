"""Compression of gradients: kinds by name, for all parameters or by patterns of names; how each is averaged."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from kfcomm.common.arguments import hint
from kfcomm.compression import Averaging, PowerSGD, TopK
from kfcomm.errors import ConfigError
from kfcomm.torch.factors import HybridAverage, linear_weights

if TYPE_CHECKING:
    import torch

WIRE_DTYPES = ("float16", "bfloat16")
FACTORS = "factors"
MAKERS: dict[str, Any] = {"powersgd": PowerSGD, "topk": TopK, FACTORS: HybridAverage}
KINDS = (*WIRE_DTYPES, *MAKERS)


class Compressor(Protocol):
    """Averages gradients in fewer bytes: ``PowerSGD``, ``TopK``, or a class of the program."""

    def average(self, comm: Averaging, gradients: Mapping[str, Any], *, name: str) -> dict[str, Any]:
        """Return an approximation of the mean of all ranks' gradients; see ``kfcomm.compression``."""


@dataclass(frozen=True)
class Compression:
    """How gradients travel in fewer bytes.

    ======== =========================================================== ==============================================
    kind     what travels, of a gradient g of n × m numbers              source
    ======== =========================================================== ==============================================
    float16  every number as float16; sums are made in float32           ``wire_dtype``; torch's fp16_compress_hook
    bfloat16 every number as bfloat16; sums are made in float32          ``wire_dtype``; torch's bf16_compress_hook
    topk     of g + e the ``share`` of largest numbers, and their places Lin et al., ICLR 2018, arXiv:1712.01887
    powersgd P = M·orth(Q) and Q = Mᵀ·orth(P) of M = g + e: (n + m)·rank Vogels et al., NeurIPS 2019, arXiv:1905.13727
    factors  A and B of a linear layer's gradient AᵀB over K samples,    Zhang et al., ATC 2017 (Poseidon); exact
             where K(n + m) numbers are fewer; else the gradient
    ======== =========================================================== ==============================================

    e is the error of the step before (error feedback): e' = g + e − its compressed form.

    Args:
        kind: one of these.
        begin_after: number of first steps, in which gradients change most, that exchange them uncompressed.
        options: of ``kfcomm.compression.PowerSGD`` (``rank``, ``min_rate``) or ``TopK`` (``share``).

    Raises:
        ConfigError: the kind is unknown, or has no such option.
    """

    kind: str
    begin_after: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __init__(self, kind: str, *, begin_after: int = 0, **options: Any) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "begin_after", begin_after)
        object.__setattr__(self, "options", options)
        if kind not in KINDS:
            raise ConfigError(f"compression {kind!r} is not known; known are {', '.join(KINDS)}{hint(kind, KINDS)}")
        self.made("")

    @property
    def wire_dtype(self) -> str | None:
        """The wire dtype of kinds that only round; None for others."""
        return self.kind if self.kind in WIRE_DTYPES else None

    def made(self, name: str) -> Compressor | None:
        """A compressor with its own state for gradients of this name, the same on all ranks; None if only rounded.

        Raises:
            ConfigError: it has no such option.
        """
        maker = MAKERS.get(self.kind)
        if maker is None and not self.options:
            return None
        seed = {"seed": zlib.crc32(name.encode())} if maker is PowerSGD else {}
        try:
            if maker is None:
                raise TypeError(f"it takes no options, got {', '.join(self.options)}")
            found: Compressor = maker(**seed | self.options)
        except TypeError as error:
            raise ConfigError(f"compression {self.kind!r}: {error}") from None
        return found


Given: TypeAlias = "str | Compression | Mapping[str, str | Compression | None] | None"
"""One kind for all parameters, or kinds by patterns of names (``fnmatch``), where the first match holds."""


def by_parameter_of(model: torch.nn.Module, given: Given, names: Iterable[str]) -> dict[str, Compression | None]:
    """The compression of each parameter's gradient in a model: factors are of the weights of linear layers only."""
    weights = linear_weights(model)
    return {
        name: None if kind is not None and kind.kind == FACTORS and name not in weights else kind
        for name, kind in by_parameter(given, names).items()
    }


def by_parameter(given: Given, names: Iterable[str]) -> dict[str, Compression | None]:
    """The compression of each parameter's gradient."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, Compression(given) if isinstance(given, str) else given)
    patterns = {pattern: Compression(one) if isinstance(one, str) else one for pattern, one in given.items()}
    found = {name: next((one for one in patterns if fnmatchcase(name, one)), None) for name in names}
    unused = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in found)]
    if unused:
        near = hint(unused[0], found)
        raise ConfigError(
            f"compression for {unused[0]!r}: no parameter has such a name; there are {list(found)[:8]}{near}"
        )
    return {name: None if pattern is None else patterns[pattern] for name, pattern in found.items()}


class GradientAverage:
    """Algorithm, with its state, by which the gradients of one name are averaged, for attach and for DDP."""

    def __init__(
        self, name: str, compression: Compression | Compressor | None, *, wire_dtype: Any = None, begin_after: int = 0,
        op: str = "avg",
    ) -> None:  # fmt: skip
        self.op = op
        self.compressor: Compressor | None
        if isinstance(compression, Compression):
            self.wire_dtype, self.compressor = compression.wire_dtype, compression.made(name)
        else:
            self.wire_dtype, self.compressor = wire_dtype, compression
        self._has_own = isinstance(compression, Compression)
        """Whether the wire dtype, or the compressor, is of these gradients, and not of the attachment."""
        self._left = begin_after  # number of first steps that average exactly
        self._kept: dict[str, Any] | None = None

    def watch(self, model: torch.nn.Module, names: Collection[str]) -> list[Any]:
        """Record what the gradients of these parameters are made of, if the compressor needs it; returns the hooks."""
        return self.compressor.watch(model, names) if isinstance(self.compressor, HybridAverage) else []

    def now(self) -> tuple[Any, Compressor | None]:
        """Wire dtype of the step under way, and its compressor if it has one."""
        return (None, None) if self._left > 0 else (self.wire_dtype, self.compressor)

    def set_wire_dtype(self, wire_dtype: Any) -> None:
        """Change the wire dtype of the attachment, on all ranks alike."""
        if not self._has_own:
            self.wire_dtype = wire_dtype

    def stepped(self) -> None:
        """Count a step."""
        self._left -= 1

    def state_dict(self) -> dict[str, Any]:
        """The number of first steps that are left, and the compressor's state."""
        told: Callable[[], dict[str, Any]] = getattr(self.compressor, "state_dict", dict)
        return {"exact_left": self._left, **told()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state."""
        own = dict(state)
        self._left = own.pop("exact_left")
        if own:
            self.compressor.load_state_dict(own)  # type: ignore[union-attr]

    def merging(self) -> Mapping[str, str]:
        """Conversions of the compressor's state."""
        told: Callable[[], Mapping[str, str]] = getattr(self.compressor, "merging", dict)
        return told()

    def keep(self) -> None:
        """Keep the state for `put_back`, if none is kept since the last step."""
        if self._kept is None:
            self._kept = self.state_dict()

    def forget(self) -> None:
        """Forget what is kept: the step was made."""
        self._kept = None

    def put_back(self) -> None:
        """Continue from the state that is kept."""
        if self._kept is not None:
            self.load_state_dict(self._kept)
            self._kept = None
