"""Which gradients travel in fewer bytes, and how: by a name, for a model or for parameters whose names match."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol, TypeAlias

from kfcomm.common.spelling import hint
from kfcomm.compression import PowerSGD, TopK
from kfcomm.compression.feedback import Averaging
from kfcomm.errors import ConfigError

WIRE_DTYPES = ("float16", "bfloat16")
MAKERS: dict[str, Any] = {"powersgd": PowerSGD, "topk": TopK}
KINDS = (*WIRE_DTYPES, *MAKERS)


class Compressor(Protocol):
    """Averages gradients in fewer bytes than they have: ``PowerSGD``, ``TopK``, or one of the program's own."""

    def average(self, comm: Averaging, gradients: Mapping[str, Any], *, name: str) -> dict[str, Any]:
        """What stands for the mean of all ranks' gradients; see ``kfcomm.compression``."""


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
    ======== =========================================================== ==============================================

    e is what was left out in the step before (error feedback): e' = g + e − what stood for it.

    Args:
        kind: one of these.
        begin_after: so many steps exchange the gradients as they are, while these change most; 0 for none.
        options: of ``kfcomm.compression.PowerSGD`` (``rank``, ``min_rate``) or ``TopK`` (``share``).

    Raises:
        ConfigError: there is no such kind, or it has no such option.
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
        """The dtype on the wire, if that is all."""
        return self.kind if self.kind in WIRE_DTYPES else None

    def made(self, name: str) -> Compressor | None:
        """One with a state of its own, for the gradients of this name, alike on all ranks; None if none is needed.

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
"""For all parameters, or by patterns of names (``fnmatch``), of which the first that matches holds."""


def of(given: str | Compression | None) -> Compression | None:
    """By its name, or as it is."""
    return Compression(given) if isinstance(given, str) else given


def by_parameter(given: Given, names: Iterable[str]) -> dict[str, Compression | None]:
    """How the gradient of each parameter travels.

    Raises:
        ConfigError: a kind is not known, or a pattern matches none of the names.
    """
    if not isinstance(given, Mapping):
        one = of(given)
        return dict.fromkeys(names, one)
    patterns = {pattern: of(value) for pattern, value in given.items()}
    found = {name: next((one for one in patterns if fnmatchcase(name, one)), None) for name in names}
    unused = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in found)]
    if unused:
        near = hint(unused[0], found)
        raise ConfigError(
            f"compression for {unused[0]!r}: no parameter has such a name; there are {list(found)[:8]}{near}"
        )
    return {name: None if pattern is None else patterns[pattern] for name, pattern in found.items()}
