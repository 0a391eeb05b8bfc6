"""The pages of the documentation: their blocks, and what they say is to be installed."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launch.launched import ROOT

ALL_PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
COPIED = re.compile(r"^<!-- copy: (\w+) -->$", re.MULTILINE)
PAGES_OF_PACKAGE = [page for page in ALL_PAGES if not COPIED.search(page.read_text("utf-8"))]
"""Pages that name nothing but what the package has; the others are checked by running them."""
_MARK, _FENCE = r"(?:^<!-- (?P<mark>[^\n]*?) -->\n+)?", r"^```(?P<language>\w+)\n(?P<text>.*?)^```$"
BLOCK = re.compile(_MARK + _FENCE, re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^<!-- rows: (?P<size>\d+) -->\n+(?P<rows>(?:^\|.*\n)+)", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
INSTALL = re.compile(r"\bpip install (?P<what>[^`\n#&|]+)")
HERE = re.compile(r"\.(?=\[|$)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        above: text of the page up to the end of the block.
    """

    mark: str
    language: str
    text: str
    above: str


def module_of_docs(name: str) -> Any:
    """Return a module of the folder ``docs``, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_docs", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def blocks(page: Path) -> list[Block]:
    """All of a page, in order."""
    text = page.read_text("utf-8")
    return [Block(one["mark"] or "", one["language"], one["text"], text[: one.end()]) for one in BLOCK.finditer(text)]


def tables(page: Path) -> list[tuple[int, str, str]]:
    """Tables whose rows are run, each with the number of ranks and the text of the page up to its end."""
    text = page.read_text("utf-8")
    return [(int(one["size"]), one["rows"], text[: one.end()]) for one in TABLE.finditer(text)]


def installed(text: str) -> list[str]:
    """Requirements that a text tells the reader to install; ``.`` is kfcomm itself from a checkout."""
    words = [word for one in INSTALL.finditer(text) for word in shlex.split(one["what"].rstrip(".,;:)"))]
    return sorted({HERE.sub("kfcomm", word) for word in words if not word.startswith("-")} - {"kfcomm"})


def name_of(page: Path) -> str:
    """As people call it."""
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def spans(page: Path) -> list[str]:
    """Code spans outside of blocks."""
    return [" ".join(one.split()) for one in SPAN.findall(FENCE.sub("", page.read_text("utf-8")))]


def lines(page: Path) -> Iterator[str]:
    """Command lines in blocks."""
    for language, text in FENCE.findall(page.read_text("utf-8")):
        for line in text.replace("\\\n", " ").splitlines():
            if language == "console" and line.startswith("$ "):
                yield line[2:]
            elif language == "text" and re.match(r"(\w+=\S+ )*(kfcomm|python|make) ", line):
                yield line
