"""Word check: prose that a field engineer would have to read twice, counted by folder.

    python tests/plain_words.py              fails if a folder has more findings than `plain_words.json` permits
    python tests/plain_words.py --show PATH  lists the findings below a path
    python tests/plain_words.py --lower      writes the counts that have gone down; it never raises one

Looks at docstrings, messages, names of tests and Markdown, not at code: what stands in backticks or fences is a name.
A finding is a place to look at. Where it is right as it is, leave it: the permitted count says so. New ones are
rewritten: subject, verb, object; the field's noun instead of a clause; the glossary's word instead of a private one.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PERMITTED = Path(__file__).with_suffix(".json")
PLACES = ("kfcomm", "tests", "bench", "examples", "docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")

CLAUSE = re.compile(r"^(See|What|Who|Whoever|Whatever|How it is that|That|Those|Where|When|Which)\b")
"""Begins a summary with a clause, or with a reference, in the place of a noun phrase or a verb."""
PHRASE = re.compile(
    r"\b(whoever|whomever|nobody|no one else|of which|in whose|by whose|for whom|(?-i:is none|are none)|has none"
    r"|is no (?!such|longer|more|limit)[a-z]+"
    r"|is said|are said|is told|are told|tells? of|makes? of it|to be had|in vain|amid|midst|thereof|wherein"
    r"|comes? again|goes? on without|stands? for|is let in|gives? up|be it|as it was|all that|none of the)\b",
    re.IGNORECASE,
)
PRIVATE = re.compile(
    r"\b(births?|farewells?|strangers?|newcomers?|tombstones?|victims?|buddies|buddy|ledger|verdicts?|mortal|skins?"
    r"|doors?|ways? to agree|gate|board|baton|fathers?|patience|seldom|introduction|house|rooms?)\b",
    re.IGNORECASE,
)
TEST_NAME = re.compile(r"^test_(what|who|whoever|whatever|where|that|those|nobody|nothing|none)_")
CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)

Finding = tuple[int, str]
"""Number of the line, and why with the text."""


def in_text(line: int, text: str, *, is_summary: bool) -> Iterator[Finding]:
    """The findings of a paragraph: at most one of each kind."""
    prose = " ".join(CODE.sub("`", text).split())
    if is_summary and CLAUSE.search(prose):
        yield line, f"clause: {prose}"
    for kind, pattern in (("phrase", PHRASE), ("private word", PRIVATE)):
        if match := pattern.search(prose):
            yield line, f"{kind} '{match[0]}': {prose}"


def in_python(text: str) -> Iterator[Finding]:
    """The findings of a module."""
    docstrings = set()
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.body and (docstring := ast.get_docstring(node)):
                first = node.body[0]
                docstrings.add((first.lineno, first.col_offset))
                for number, part in enumerate(re.split(r"\n\s*\n", docstring)):
                    yield from in_text(first.lineno, part, is_summary=number == 0)
            if not isinstance(node, ast.Module) and TEST_NAME.match(node.name):
                yield node.lineno, f"name of a test: {node.name}"
    for node in nodes:
        match node:
            case ast.Constant(value=str(value)) if (node.lineno, node.col_offset) not in docstrings:
                if value.count(" ") >= 3 and "\nimport " not in value:  # else a key, or a program
                    yield from in_text(node.lineno, value, is_summary=False)


def in_markdown(text: str) -> Iterator[Finding]:
    """The findings of a page, outside of fences."""
    is_fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        elif not is_fenced:
            yield from in_text(number, line.lstrip("# "), is_summary=line.startswith("#"))


def findings(path: Path) -> list[Finding]:
    """All findings of a file; none of other kinds of files."""
    read = {".py": in_python, ".md": in_markdown}.get(path.suffix)
    return [] if read is None or path == Path(__file__) else list(read(path.read_text("utf-8")))


def files(place: Path) -> list[Path]:
    """The files at or below a path."""
    return [place] if place.is_file() else sorted(path for path in place.rglob("*.*") if path.suffix in (".py", ".md"))


def folder_of(path: Path) -> str:
    """The folder that a file counts in: the two uppermost; the file itself at the root."""
    return "/".join(path.relative_to(ROOT).parts[:-1][:2]) or path.name


def over_of(counts: Mapping[str, int], permitted: Mapping[str, int]) -> dict[str, int]:
    """The folders with too many; one that is not listed, as after a move, may have what the whole leaves for it."""
    if sum(counts.values()) > sum(permitted.values()):
        return {folder: count for folder, count in counts.items() if count > permitted.get(folder, 0)}
    return {folder: count for folder, count in counts.items() if folder in permitted and count > permitted[folder]}


def main() -> int:
    """Check, list or lower."""
    if sys.argv[1:2] == ["--show"]:
        for given in sys.argv[2:]:
            for path in files(Path(given).resolve()):
                for line, text in findings(path):
                    print(f"{path.relative_to(ROOT)}:{line}: {text[:160]}")
        return 0
    counts = Counter({folder_of(path): 0 for place in PLACES for path in files(ROOT / place)})
    for place in PLACES:
        for path in files(ROOT / place):
            counts[folder_of(path)] += len(findings(path))
    permitted: dict[str, int] = json.loads(PERMITTED.read_text("utf-8")) if PERMITTED.exists() else dict(counts)
    if sys.argv[1:] == ["--lower"]:
        lowered = {folder: min(count, permitted.get(folder, 0)) for folder, count in sorted(counts.items())}
        PERMITTED.write_text(json.dumps({name: count for name, count in lowered.items() if count}, indent=1) + "\n")
    over = over_of(counts, permitted)
    for folder, count in over.items():
        print(f"{folder}: {count} places to rewrite, {permitted.get(folder, 0)} are permitted; see them with")
        print(f"  python tests/plain_words.py --show {folder}")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
