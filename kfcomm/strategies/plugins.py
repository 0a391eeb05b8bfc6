"""Strategies that other distributions bring: found by name, through the entry points of ``kfcomm.strategies``.

An entry point names a function from a `Layout` to whatever ``kfcomm.strategies.build`` takes. Nothing is searched for,
nor the means to search imported, until a name is met that is none of kfcomm's own; then nothing is imported but what is
named. Names of kfcomm's own always mean its own strategies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kfcomm import strategies
from kfcomm.errors import ConfigError
from kfcomm.strategies import AnyStrategy, Builder, StrategySpec
from kfcomm.types import Layout

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "kfcomm.strategies"


@dataclass(frozen=True, slots=True)
class Plugin:
    """A strategy of another distribution.

    Attributes:
        entry: where it is.
    """

    entry: EntryPoint

    @property
    def origin(self) -> str:
        """Which distribution it is from, in words."""
        dist = self.entry.dist
        return f"{self.entry.value}, of {dist.name} {dist.version}" if dist is not None else self.entry.value

    def __call__(self, layout: Layout) -> StrategySpec:
        """Build it.

        Raises:
            ConfigError: its code cannot be imported, or fails; the cause is chained.
        """
        try:
            built: StrategySpec = self.entry.load()(layout)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(f"strategy {self.entry.name!r} ({self.origin}) failed: {what}") from error
        return built


def found() -> dict[str, Plugin]:
    """The strategies of other distributions, by name. Reads the metadata of all that is installed: milliseconds.

    Of several with one name the first is taken, and none with a name of kfcomm's own: see ``overlooked``.
    """
    return _sorted_out()[0]


def overlooked() -> list[str]:
    """What other distributions bring and nobody gets, since its name is taken; a line for each."""
    return _sorted_out()[1]


def _sorted_out() -> tuple[dict[str, Plugin], list[str]]:
    from importlib.metadata import entry_points

    plugins: dict[str, Plugin] = {}
    lines = []
    for entry in entry_points(group=ENTRY_POINTS):
        plugin = Plugin(entry)
        if entry.name in strategies.names():
            lines.append(f"strategy {entry.name!r} is kfcomm's own; {plugin.origin} is not used")
        elif entry.name in plugins:
            lines.append(f"strategy {entry.name!r} is {plugins[entry.name].origin}; {plugin.origin} is not used")
        else:
            plugins[entry.name] = plugin
    return plugins, lines


def build(spec: StrategySpec, layout: Layout) -> AnyStrategy:
    """The strategy that ``spec`` means, be it of kfcomm or of another distribution: see ``kfcomm.strategies.build``.

    Raises:
        ConfigError: there is no such strategy, it cannot be built, or it is for another number of ranks.
    """
    return strategies.build(spec, layout, found)


def check(spec: str) -> None:
    """Refuse a setting that cannot mean a strategy, before ranks and layout are known; no plugin's code is run.

    Raises:
        ConfigError: an unknown name, or rules that cannot be.
    """

    def stand_ins() -> Mapping[str, Builder]:
        return dict.fromkeys(found(), lambda layout: strategies.build("star", layout))

    strategies.build(spec, Layout((0,)), stand_ins)
