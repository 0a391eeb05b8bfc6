"""Help of commands in built pages, by MkDocs as a hook: ``<!-- help: bench -->`` becomes what ``kfcomm bench --help`` prints."""

from __future__ import annotations

import re
from typing import Any

import click

from kfcomm.cli import main

_MARK = re.compile(r"^<!-- help: ([a-z ]+) -->$", re.MULTILINE)


def help_of(words: str) -> str:
    """Return the help of a command, given by its words after ``kfcomm``; raises KeyError if there is none."""
    command: click.Command = main
    context = click.Context(main, info_name="kfcomm")
    for word in words.split():
        found = command.get_command(context, word) if isinstance(command, click.Group) else None
        if found is None:
            raise KeyError(f"kfcomm has no command {words!r}")
        command, context = found, click.Context(found, info_name=word, parent=context, terminal_width=100)
    return command.get_help(context)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put each command's help in the place of its mark; called by MkDocs with each page."""
    return _MARK.sub(lambda mark: f"```text\n$ kfcomm {mark[1]} --help\n{help_of(mark[1])}\n```", markdown)
