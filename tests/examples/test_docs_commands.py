"""Every command of kfcomm that the documentation shows exists, with its options and their values."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from kfcomm.cli import main
from kfcomm.cli.commands.bench import bench, topologies
from tests.examples.pages import PAGES_OF_PACKAGE, lines, module_of_docs, name_of, spans
from tests.launch.launched import ROOT

PAGES = [*PAGES_OF_PACKAGE, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
STARTERS = {"-m", "&&", ";", "|", "&", "kfcomm"}


def words_of(line: str) -> list[str]:
    """As a shell would have them, operators by themselves."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lexer.commenters = "#"
    try:
        return list(lexer)
    except ValueError:  # an apostrophe in words that are no command
        return line.split()


def commands(words: list[str]) -> Iterator[list[str]]:
    """Each call of kfcomm among these words, without its own name."""
    for at, word in enumerate(words):
        begins = at == 0 or words[at - 1] in STARTERS or re.match(r"\w+=", words[at - 1])
        if word == "kfcomm" and begins and at + 1 < len(words):
            rest = words[at + 1 :]
            ends = [place for place, one in enumerate(rest) if set(one) <= set("|&;()<>")]
            yield rest[: ends[0]] if ends else rest


def wrong(words: list[str]) -> str | None:
    """Fault of a call of kfcomm, if any."""
    command: click.Command = main
    context = click.Context(main)
    said = "kfcomm"
    while isinstance(command, click.Group) and words:
        found = command.get_command(context, words[0])
        if found is None:
            if words[0].startswith("-") or words[0].isupper() or command is not main:
                break
            return f"{said} has no command {words[0]}"
        said, command, words = f"{said} {words[0]}", found, words[1:]
    if isinstance(command, type(bench)) and words[:1] == ["topologies"]:
        said, command, words = f"{said} topologies", topologies, words[1:]
    context = click.Context(command, **command.context_settings)
    try:
        given, rest, _ = command.make_parser(context).parse_args(list(words))
    except click.NoSuchOption as error:
        return f"{said}: {error.message}"
    except click.UsageError as error:
        is_last = words[-1].startswith("-")  # the option is named, without a value
        return None if is_last else f"{said}: {error.message}"
    for one in command.params:
        value = given.get(one.name or "")
        if isinstance(one.type, click.Choice) and isinstance(value, str) and value not in one.type.choices:
            return f"{said}: unknown {one.name} {value}"
    if said == "kfcomm run" or not rest:
        inner = given.get("command") or ()
        nested = list(commands(list(inner) if isinstance(inner, tuple | list) else [str(inner)]))
        return next((fault for one in nested if (fault := wrong(one))), None)
    return None


@cache
def options() -> set[str]:
    """All options of all commands."""

    def of(command: click.Command) -> Iterator[str]:
        for one in command.params:
            if isinstance(one, click.Option):
                yield from (*one.opts, *one.secondary_opts)
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                found = command.get_command(context, name)
                assert found is not None
                yield from of(found)

    return {*of(main), *of(topologies), "--help", "--version"}


@cache
def options_of_programs() -> set[str]:
    """Command lines in examples, benchmarks and tests."""
    texts = [
        path.read_text("utf-8") for folder in ("bench", "examples", "tests") for path in (ROOT / folder).rglob("*.py")
    ]
    return set(re.findall(r"\"(--[a-z][a-z-]+)\"", "\n".join(texts)))


def test_all_commands_and_settings_are_in_the_reference() -> None:
    from kfcomm.rendezvous.settings import Arguments

    reference = ROOT / "docs" / "reference"
    headings = " ".join(re.findall(r"^## (.*)$", (reference / "commands.md").read_text("utf-8"), re.MULTILINE))
    listed = (reference / "index.md").read_text("utf-8")
    for name in main.list_commands(click.Context(main)):
        assert f"kfcomm {name}" in headings
        assert re.search(rf"`(kfcomm )?{name}`", listed), name
    settings = (reference / "settings.md").read_text("utf-8")
    assert {name for name in Arguments.__annotations__ if f"`{name}`" not in settings} == set()


def test_built_pages_show_what_commands_print() -> None:
    outputs = module_of_docs("outputs")
    marked = [page for page in PAGES_OF_PACKAGE if "<!-- output: " in page.read_text("utf-8")]
    built = {page.stem: outputs.on_page_markdown(page.read_text("utf-8")) for page in marked}
    assert all("<!-- output" not in page for page in built.values())
    for name in sorted(set(main.list_commands(click.Context(main))) - {"timeline", "tls", "topology"}):
        assert f"Usage: kfcomm {name} " in built["commands"]
    assert '<img alt="topology show ring -n 8 --hosts 2" src="data:image/svg+xml;base64,' in built["algorithms"]
    with pytest.raises(ValueError, match="kfcomm runn --help ended with 2"):
        outputs.on_page_markdown("<!-- output: kfcomm runn --help -->")


def test_diagrams_are_those_that_the_script_draws() -> None:
    pictures = module_of_docs("pictures")
    for name, (boxes, arrows) in pictures.PICTURES.items():
        drawn = (ROOT / "docs" / "style" / f"{name}.svg").read_text("utf-8")
        assert drawn == pictures.as_svg(boxes, arrows), "run python docs/pictures.py"


OTHERS_OPTIONS = {
    "--build-arg": "Docker's",
    "--host-discovery-script": "Horovod's",
    "--ipc": "Docker's",
    "--kill-on-bad-exit": "srun's",
    "--mpi": "srun's",
    "--shm-size": "Docker's",
    "--strict": "MkDocs'",
}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_options_exist(page: Path) -> None:
    said = [*lines(page), *spans(page)]
    faults = [(line, fault) for line in said for one in commands(words_of(line)) if (fault := wrong(one))]
    assert faults == []
    alone = {one.split()[0].partition("=")[0].partition("/")[0] for one in spans(page) if one.startswith("--")}
    assert alone - options() - options_of_programs() - OTHERS_OPTIONS.keys() == set()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kfcomm status --store http://h", "No such option"),
        ("kfcomm stat", "no command stat"),
        ("KFCOMM_X=1 kfcomm run -n 2 kfcomm bench --no-such", "No such option"),
        ("torchrun -m kfcomm bench --htm x", "No such option"),
        ("kfcomm run -n 2 --transport ftp python train.py", "unknown transport ftp"),
    ],
)
def test_a_command_that_does_not_exist_is_found(line: str, words: str) -> None:
    (fault, *_) = [fault for one in commands(words_of(line)) if (fault := wrong(one))]
    assert words in fault
