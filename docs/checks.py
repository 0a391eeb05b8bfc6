"""Checks of built pages, run by MkDocs as a hook: with ``--strict`` a finding fails the build.

MkDocs and the handler of docstrings are lenient: they render text that they misread without a warning.
"""

from __future__ import annotations

import logging
import re
from html.parser import HTMLParser
from typing import Any

_LOG = logging.getLogger("mkdocs.hooks.checks")
_VOID = frozenset(("area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"))


class _Docstrings(HTMLParser):
    """Parser that finds docstrings rendered differently from their source."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self._open: list[tuple[str, bool]] = []
        self._summary: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One more element is open."""
        if tag in _VOID:
            return
        is_docstring = self._is_in_docstring() or "doc-contents" in (dict(attrs).get("class") or "").split()
        self._open.append((tag, is_docstring))
        if is_docstring and tag == "strong":
            self.faults.append(f"line {self.getpos()[0]}: two '**' were taken for bold: write powers as code")
        if is_docstring and tag == "summary":
            self._summary = ""

    def handle_endtag(self, tag: str) -> None:
        """An element is over, and with it what was left open inside."""
        if self._summary is not None and tag == "summary":
            if not re.fullmatch(r"[A-Z]\w*|Source code in .*", self._summary.strip()):
                self.faults.append(
                    f"line {self.getpos()[0]}: a section is cut, its first line is its title: {self._summary!r:.60}; "
                    "write the title on a line of its own, and the text indented below it"
                )
            self._summary = None
        if any(tag == one for one, _ in self._open):
            while self._open.pop()[0] != tag:
                pass

    def handle_data(self, data: str) -> None:
        """Text."""
        if self._summary is not None:
            self._summary += data

    def _is_in_docstring(self) -> bool:
        return bool(self._open) and self._open[-1][1]


def faults(html: str) -> list[str]:
    """List the faults of a page."""
    parser = _Docstrings()
    parser.feed(html)
    return parser.faults


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """Warn of each fault; called by MkDocs with each page."""
    for fault in faults(output):
        _LOG.warning("%s: %s", page.file.src_uri, fault)
    return output
