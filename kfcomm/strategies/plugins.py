"""Strategies of other distributions, by the entry points of ``kfcomm.strategies``.

An entry point names a function from a `Layout` to whatever ``kfcomm.strategies.build`` takes. The search begins
with the first name that is not kfcomm's own, and then only that plugin is imported. Names of kfcomm's own always mean
its own strategies.
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
        """Its entry point and distribution, in words."""
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
    """The strategies of other distributions, by name. Reads the metadata of all distributions: milliseconds.

    Of several with one name the first is taken, and none with a name of kfcomm's own: see ``overlooked``.
    """
    return _sorted_out()[0]


def overlooked() -> list[str]:
    """Plugins that cannot be used since their name is taken; a line for each."""
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
    """Build a strategy of kfcomm or of another distribution, as ``kfcomm.strategies.build`` does.

    Raises:
        ConfigError: the strategy is unknown, cannot be built, or is for another number of ranks.
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
