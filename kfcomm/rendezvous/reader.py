"""One setting by its name: the argument, else the variable, else the default."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kfcomm.common.arguments import hint, plain_text
from kfcomm.common.sizes import seconds_of
from kfcomm.errors import ConfigError


class Reader(NamedTuple):
    """Looks up one setting: the argument, else the variable, else the default."""

    environ: Mapping[str, str]
    given: Mapping[str, Any]

    def name(self, setting: str) -> str:
        """Name by which a setting was given, for messages."""
        return setting if setting in self.given else f"KFCOMM_{setting.upper()}"

    def raw(self, setting: str) -> Any:
        """Return what was given, unchecked; None if nothing was."""
        if setting in self.given:
            return self.given[setting]
        return self.environ.get(f"KFCOMM_{setting.upper()}") or None

    def optional(self, setting: str) -> str | None:
        """Return a text; None if nothing was given."""
        value = self.raw(setting)
        if value is not None and (not isinstance(value, str) or not value.strip() or not value.isprintable()):
            raise ConfigError(f"{self.name(setting)}={value!r} must be a text")
        return None if value is None else plain_text(value)

    def text(self, setting: str, default: str) -> str:
        """Return a text."""
        value = self.optional(setting)
        return default if value is None else value

    def choice(self, setting: str, allowed: tuple[str, ...]) -> str:
        """Return one of these texts, by default the first."""
        value = self.text(setting, allowed[0])
        if value not in allowed:
            near = hint(value, allowed)
            raise ConfigError(f"{self.name(setting)}={value!r} must be one of {', '.join(allowed)}{near}")
        return value

    def flag(self, setting: str, *, default: bool) -> bool:
        """Return whether it is on."""
        value = self.raw(setting)
        if value is None:
            return default
        if value not in (True, False, "0", "1"):
            raise ConfigError(f"{self.name(setting)}={value!r} must be 0 or 1")
        return value in (True, "1")

    def port(self, setting: str) -> int | None:
        """Return a port; None if nothing was given."""
        value = self.raw(setting)
        try:
            port = None if value is None else int(value)
        except (TypeError, ValueError):
            port = 0
        if port is not None and (isinstance(value, (bool, float)) or not 0 < port < 1 << 16):
            raise ConfigError(f"{self.name(setting)}={value!r} must be a port, from 1 to 65535")
        return port

    def ports(self, setting: str) -> tuple[int, int] | None:
        """Return the first and the last port of a range; None if nothing was given."""
        value = self.optional(setting)
        if value is None:
            return None
        match = re.fullmatch(r"([0-9]{1,5})(?::([0-9]{1,5}))?", value)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 0 < first <= last < 1 << 16:
            raise ConfigError(f"{self.name(setting)}={value!r} must be FIRST:LAST, ports from 1 to 65535")
        return first, last

    def seconds(self, setting: str, default: float) -> float:
        """Return a number of seconds above 0."""
        value = self.raw(setting)
        try:
            given = float(value) if isinstance(value, str) else value
            seconds = default if given is None else seconds_of(given)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise ConfigError(f"{self.name(setting)}={value!r} must be a number of seconds above 0")
        return seconds
