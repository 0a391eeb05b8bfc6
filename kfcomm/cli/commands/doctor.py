"""`kfcomm doctor`: diagnosis from dumps."""

from __future__ import annotations

import sys

import click

from kfcomm.cli.options import reported_errors, warn


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Write it for machines.")
def doctor(files: tuple[str, ...], as_json: bool) -> None:
    """Report which ranks wait for which other ranks, from the dumps of several ranks.

    FILEs are dumps, written by `kill -USR1` of the ranks or by kfcomm.dump(path), or patterns of them. The exit code
    is 0 if nothing waits, 1 if something does, 2 if a file cannot be read.

    \b
      kfcomm doctor kfcomm-rank*.json
    """  # noqa: D301  click wants the character, not its name
    import json

    from kfcomm.common.version import difference
    from kfcomm.monitor.doctor import diagnose, read
    from kfcomm.monitor.findings import as_json as for_machines
    from kfcomm.monitor.findings import as_text

    with reported_errors():
        records = read(files)
    told = {tuple(record["versions"]) for record in records if "versions" in record}
    for one in sorted(told, key=str):
        warn(difference(one, "a dump is of"))
    diagnosis = diagnose(records)
    click.echo(json.dumps(for_machines(diagnosis), indent=1) if as_json else as_text(diagnosis))
    sys.exit(1 if diagnosis.waits else 0)
