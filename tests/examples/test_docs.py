"""The documentation does what it says: its programs run, and print what it shows.

Comments in the Markdown, invisible when rendered, say what to do with the block that follows:

- ``<!-- file: NAME -->``: the block is written to the file NAME.
- ``<!-- run -->``: the lines that begin with ``$`` are run by a shell; what they print is the rest of the block, in
  any order, as ranks print when they do. A line ``...`` stands for any lines, ``…`` within a line for any text. Port
  29600 is replaced by one that is free.
- ``<!-- ranks: N -->``: the block is run as the body of a coroutine by each rank of a world of N in memory, as
  ``comm``, with a float array ``x`` of four elements.
- ``<!-- rows: N -->``, before a table: what is code in the last cell of a row is run by each rank of a blocking world
  of N in memory, one row after the other, as ``comm``, with arrays ``x`` and ``y`` of four elements, and with what the
  block before it has made if that is marked ``<!-- before the rows -->``.
- ``<!-- not run: WHY -->``: it is not run; Python is compiled all the same.

Every block of Python and every console has one of these marks. The blocks of one page are run in order, in one folder.
A page with the comment ``<!-- needs: FRAMEWORK -->`` is run by the tests of frameworks.
"""

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import numpy as np
import pytest

import kfcomm
import kfcomm.sync
import kfcomm.testing
from tests.launch.launched import ROOT, environ
from tests.support import free_port

pytestmark = pytest.mark.slow

NEEDS = re.compile(r"^<!-- needs: \w+ -->$", re.MULTILINE)
ALL_PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
PAGES_OF_FRAMEWORKS = [page for page in ALL_PAGES if NEEDS.search(page.read_text("utf-8"))]
PAGES = [page for page in ALL_PAGES if page not in PAGES_OF_FRAMEWORKS]
MARK, FENCE = r"(?:^<!-- (?P<mark>[^\n]*?) -->\n+)?", r"^```(?P<language>\w+)\n(?P<text>.*?)^```$"
BLOCK = re.compile(MARK + FENCE, re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^<!-- rows: (?P<size>\d+) -->\n+(?P<rows>(?:^\|.*\n)+)", re.MULTILINE)
BEFORE_ROWS = "before the rows"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    mark: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text("utf-8"))
    return [Block(one["mark"] or "", one["language"], one["text"]) for one in found if one["language"] != "text"]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.asyncio
@pytest.mark.parametrize("page", PAGES, ids=name_of)
async def test_page(page: Path, tmp_path: Path) -> None:
    await run_page(page, tmp_path)


async def run_page(page: Path, tmp_path: Path) -> None:
    before = ""
    for block in blocks(page):
        kind, _, what = block.mark.partition(": ")
        if block.language == "python":
            compiled(block)
        match kind:
            case "file":
                (tmp_path / what).write_text(block.text, "utf-8")
            case "run":
                run_console(block.text, tmp_path)
            case "ranks":
                await run_in_memory(block, int(what))
            case "not run":
                assert what
            case "before the rows":
                before = block.text
            case _:
                pytest.fail(f"a block of {name_of(page)} has no mark:\n{block.text}")

    for size, rows in tables(page):
        await asyncio.to_thread(run_rows, before, rows, size)


def tables(page: Path) -> list[tuple[int, str]]:
    """Those whose rows are run, each with the number of ranks."""
    return [(int(found["size"]), found["rows"]) for found in TABLE.finditer(page.read_text("utf-8"))]


def run_rows(before: str, table: str, size: int) -> None:
    """Run each row's own code on every rank of a blocking world."""
    rows = [line.rstrip().rstrip("|").rpartition("|")[2] for line in table.splitlines()[2:]]
    codes = [re.findall(r"`([^`]+)`", row) for row in rows]
    assert all(codes), table

    def rank(comm: kfcomm.sync.Communicator) -> None:
        space = {"comm": comm, "np": np, "kfcomm": kfcomm, "x": np.ones(4, np.float32), "y": np.ones(4, np.float32)}
        for code in [before, *(one for row in codes for one in row)]:
            exec(compile(code, f"the row {code}", "exec"), space)

    with kfcomm.testing.sync_world(size) as comms:
        kfcomm.testing.run_threads(comms, rank)


def compiled(block: Block) -> CodeType:
    return compile(block.text, "the block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def run_console(text: str, folder: Path) -> None:
    """Run each command, and compare what it prints."""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        shell_line, _, expected = part.partition("\n")
        # The user's token is kept in the runtime folder. Without buffers print() writes the end of a line by itself,
        # and two processes' lines come mixed.
        path = f"{programs(folder)}:{os.environ['PATH']}"
        env = environ(PATH=path, XDG_RUNTIME_DIR=str(folder), COLUMNS="100", PYTHONUNBUFFERED="")
        env["XDG_CACHE_HOME"] = str(folder)
        done = subprocess.run(
            ["bash", "-c", shell_line.replace(":29600", f":{free_port()}")],
            cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert_prints(shell_line, expected.splitlines(), done.stdout.splitlines())


def programs(folder: Path) -> Path:
    """A folder with ``kfcomm`` and ``python``, as an installation has them."""
    place = folder / ".bin"
    if not place.exists():
        place.mkdir()
        for name, arguments in (("kfcomm", "-m kfcomm "), ("python", "")):
            script = place / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
            script.chmod(0o755)
    return place


def assert_prints(shell_line: str, expected: list[str], printed: list[str]) -> None:
    """Each expected line was printed, and no other, unless one is ``...``."""
    left = list(printed)
    for line in expected:
        if line == "...":
            continue
        pattern = ".*".join(map(re.escape, line.split("…")))
        fitting = next((one for one in left if re.fullmatch(pattern, one)), None)
        assert fitting is not None, "\n".join([f"$ {shell_line}", *printed, "", "lacks:", line])
        left.remove(fitting)
    assert "..." in expected or not left, "\n".join([f"$ {shell_line}", *printed, "", "not in the page:", *left])


async def run_in_memory(block: Block, size: int) -> None:
    """Run a fragment on every rank of a world."""
    code = compiled(block)

    async def rank(comm: kfcomm.Communicator) -> None:
        space = {"comm": comm, "np": np, "kfcomm": kfcomm, "asyncio": asyncio, "x": np.ones(4, np.float32)}
        made = eval(code, space)  # noqa: S307  it is our own documentation
        if inspect.isawaitable(made):
            await made

    async with kfcomm.testing.world(size) as comms:
        await kfcomm.testing.run_ranks(comms, rank)


def test_a_page_that_shows_what_is_not_printed_is_found() -> None:
    assert_prints("x", ["[0] total …", "[1] b"], ["[1] b", "[0] total 4"])
    assert_prints("x", ["a", "..."], ["b", "a", "c"])
    for expected, printed in ((["a"], ["b"]), (["a"], ["a", "b"]), (["a", "a"], ["a"])):
        with pytest.raises(AssertionError):
            assert_prints("x", expected, printed)


def test_a_row_that_does_not_work_is_found() -> None:
    head = "| theirs | ours |\n|---|---|\n"
    run_rows("z = 2", head + "| `a | b` | `comm.all_reduce(x, out=y)`, `assert (y == z).all()` |\n", 2)
    for row in ("| `a` | `comm.all_reduced(x)` |\n", "| `a` | nothing |\n"):
        with pytest.raises((AssertionError, AttributeError)):
            run_rows("", head + row, 2)
    assert len(tables(ROOT / "docs" / "howto" / "from-mpi4py.md")) == 1
