"""Shapes that name the same elements in the same order."""

from __future__ import annotations

from functools import lru_cache

from kfcomm.errors import ConfigError


@lru_cache(1024)
def fits(given: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether an array of shape ``given`` can take a result of shape ``wanted``, row by row, without any doubt.

    So it is if one shape becomes the other by joining neighbouring axes: ``(4, 3)`` takes a result of ``(12,)`` or of
    ``(2, 2, 3)``, and ``(3,)`` one of ``(1, 3)``. Not ``(3, 4)``, whose rows are others: that is more likely a mistake.

    Cost: one look-up for a pair that was asked for before.
    """
    if 0 in given or 0 in wanted:
        return 0 in given and 0 in wanted
    left = [[n for n in shape if n != 1] for shape in (given, wanted)]
    while all(left):
        joined = [[axes.pop()] for axes in left]  # axes of each that hold the same elements
        sizes = [group[0] for group in joined]
        while sizes[0] != sizes[1]:
            short = int(sizes[1] < sizes[0])
            if not left[short]:
                return False
            joined[short].append(left[short].pop())
            sizes[short] *= joined[short][-1]
        if min(map(len, joined)) > 1:
            return False
    return not any(left)


def check_out_shape(given: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Refuse an ``out`` that does not take the result.

    Raises:
        ConfigError: it does not fit.
    """
    if given != wanted and not fits(given, wanted):
        raise ConfigError(
            f"out has shape {given}, the result has {wanted}; expected this shape, or one that joins or splits its axes"
        )
