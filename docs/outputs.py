"""Output of commands in built pages: ``<!-- output: kfcomm bench --help -->`` becomes the command with its output.

MkDocs runs this as a hook. Pages that show a command and what it prints in their source are run by the tests instead.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from click.testing import CliRunner

from kfcomm.cli import main

_MARK = re.compile(r"^<!-- output: kfcomm (.+) -->$", re.MULTILINE)


def output_of(arguments: str) -> str:
    """Return what ``kfcomm`` prints with these arguments; raises ValueError if it fails."""
    done = CliRunner().invoke(main, shlex.split(arguments), prog_name="kfcomm", terminal_width=100)
    if done.exit_code != 0:
        raise ValueError(f"kfcomm {arguments} ended with {done.exit_code}: {done.output}")
    return done.stdout


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each mark; called by MkDocs with each page."""
    return _MARK.sub(lambda mark: f"```text\n$ kfcomm {mark[1]}\n{output_of(mark[1])}```", markdown)
