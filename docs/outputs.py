"""Output of commands in built pages: ``<!-- output: kfcomm bench --help -->`` becomes the command with its output.

A command that writes a picture, such as ``<!-- output: kfcomm topology show ring -n 8 -o ring.svg -->``, becomes the
picture. MkDocs runs this as a hook. Pages that show a command and what it prints in their source are run by the tests
instead.
"""

from __future__ import annotations

import base64
import re
import shlex
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from click.testing import CliRunner

from kfcomm.cli import main

_MARK = re.compile(r"^<!-- output: kfcomm (.+?)(?: \| head -(\d+))? -->$", re.MULTILINE)


def shown(arguments: str, num_lines: int | None = None) -> str:
    """Return the first lines that ``kfcomm`` prints, or its picture, as Markdown; raises ValueError if it fails."""
    words = shlex.split(arguments)
    with TemporaryDirectory() as folder:
        picture = Path(folder, words[-1]) if words[-1].endswith(".svg") else None
        given = [*words[:-1], str(picture)] if picture else words
        done = CliRunner().invoke(main, given, prog_name="kfcomm", terminal_width=100)
        if done.exit_code != 0:
            raise ValueError(f"kfcomm {arguments} ended with {done.exit_code}: {done.output}")
        if picture:
            data = base64.b64encode(picture.read_bytes()).decode()
            return f'<img alt="{arguments.rpartition(" -o ")[0]}" src="data:image/svg+xml;base64,{data}">'
    lines = done.stdout.splitlines()[:num_lines]
    return "\n".join(["```text", f"$ kfcomm {arguments}", *lines, "```"])


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each mark; called by MkDocs with each page."""
    return _MARK.sub(lambda mark: shown(mark[1], int(mark[2]) if mark[2] else None), markdown)
