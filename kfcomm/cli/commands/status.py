"""`kfcomm status`: ranks of a running elastic job."""

from __future__ import annotations

import json

import click

from kfcomm.cli.options import reported_errors, warn


@click.command()
@click.argument("job", required=False)
@click.option("--job", "named", metavar="JOB", help="The job, by its name or how that begins; as the argument.")
@click.option("--json", "as_json", is_flag=True, help="Write it for machines.")
def status(job: str | None, named: str | None, as_json: bool) -> None:
    """Show the ranks of a running elastic job: which run, which have ended and how, how many are wanted.

    JOB is its name, or how that begins; needed if several run, unless one of them alone was started at this terminal or
    in this directory.
    """
    from kfcomm.common.version import difference
    from kfcomm.launch.requests import ask, find, titled
    from kfcomm.rendezvous.keyvalue import describe_exit

    with reported_errors():
        told = ask(find(named or job), "status")
    warn(difference(told.get("versions")))
    if as_json:
        click.echo(json.dumps(told))
        return
    running, most = len(told["running"]), f"{told['least']} to {told['most']}"
    click.echo(f"{titled(told)}: {running} of {told['size']} ranks run, {most} may")
    for address, running in told["hosts"]:
        where = f"  on {address}" if len(told["hosts"]) > 1 or told["slots"] else ""
        slots = f" of {told['slots'].get(address, 0)} slots" if told["slots"] else ""
        click.echo(f"  running{where}   {', '.join(map(str, running)) or 'none'}{slots}")
    for address in told["slots"] or ():
        if address not in dict(told["hosts"]):
            click.echo(f"  no launcher has come on {address}")
    for uid, code in told["ended"]:
        click.echo(f"  rank {uid:<4} {'ended well' if code == 0 else f'ended: {describe_exit(code)}'}")
    click.echo(f"  {told['restarts']} more may be replaced")
    if told["spares"]:
        click.echo(f"  {told['spares']} spares are wanted besides")
