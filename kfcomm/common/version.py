"""Versions of this package and of its protocol: the one place where they are written; and how two of them differ."""

__version__ = "0.2.0"
PROTOCOL_VERSION = 12
HOW_TO_AGREE = "Install the same version on all hosts: kfcomm env tells which one a process finds"


def versions() -> tuple[str, int]:
    """Version of kfcomm, and the number of its protocol."""
    return __version__, PROTOCOL_VERSION


def difference(theirs: object, whose: str = "the job runs") -> str:
    """Line on a job of another version of kfcomm, for terminals of 80 columns; empty if it runs this one.

    Args:
        theirs: its `versions`, also after a JSON round trip; None if it does not tell them, as up to kfcomm 0.2.0.
        whose: how the line begins.
    """
    match theirs:
        case (str(version), int(protocol)) if version.isprintable():
            if (version, protocol) == versions():
                return ""
            told, here = version[:64], __version__
            if told == here:
                told, here = f"{told} (protocol {protocol})", f"{here} (protocol {PROTOCOL_VERSION})"
        case _:
            told, here = "0.2.0 or earlier", __version__
    return f"{whose} kfcomm {told}, this is {here}: use the job's kfcomm"
