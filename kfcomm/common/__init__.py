"""Small helpers that every layer may use; the smallest is here."""


def do_nothing(*_: object) -> None:
    """Default of a callback that is called without asking whether it was set."""
