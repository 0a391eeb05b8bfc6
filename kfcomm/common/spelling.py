"""Suggestions for unknown words."""

from __future__ import annotations

from collections.abc import Iterable

_LIKE = 0.6
"""Of two words, from 0 to 1: 'tpc' and 'tcp' have 0.67."""
_MOST = 3


def meant(given: object, known: Iterable[str], *, like: float = _LIKE) -> list[str]:
    """The known words that are most like what was given, the likeliest first; small letters, ``_`` and ``-`` are alike.

    Costs some milliseconds when it is first called.
    """
    from difflib import get_close_matches  # for a word that is wrong, and no other

    by_plain = {_plain(word): word for word in known}
    word = _plain(str(given)[:100])
    begun = [one for one in by_plain if len(word) > 1 and one.startswith(word)]
    near = get_close_matches(word, by_plain, n=_MOST, cutoff=like)
    return [by_plain[one] for one in dict.fromkeys([*begun, *near])][:_MOST]


def hint(given: object, known: Iterable[str]) -> str:
    """``; did you mean 'ring'?``, to follow an error; empty if no word is similar."""
    found = meant(given, known)
    return f"; did you mean {' or '.join(map(repr, found))}?" if found else ""


def _plain(word: str) -> str:
    return word.strip().lower().replace("_", "-")
