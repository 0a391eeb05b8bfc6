"""Which inputs lie in the memory of results at other places."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.arrays import Span, overwritten, span_of

SPANS = st.none() | st.builds(lambda begin, nbytes: (begin, begin + nbytes), st.integers(0, 30), st.integers(1, 9))


@given(st.lists(st.tuples(SPANS, SPANS), max_size=7))
def test_as_each_pair_tells(pairs: list[tuple[Span | None, Span | None]]) -> None:
    def meet(one: Span | None, other: Span | None) -> bool:
        return bool(one and other and one[0] < other[1] and other[0] < one[1])

    wanted = [
        place
        for place, (given_, _) in enumerate(pairs)
        if any(meet(given_, result) for other, (_, result) in enumerate(pairs) if other != place)
    ]
    assert overwritten((one for one, _ in pairs), (one for _, one in pairs)) == wanted


def test_spans_of_arrays_with_gaps_turned_around_and_empty() -> None:
    x = np.zeros(12, np.float32)
    begin, end = span_of(x)
    assert end - begin == x.nbytes
    assert span_of(x[::-1]) == (begin, end)
    assert span_of(x[4::3]) == (begin + 16, begin + 16 + 2 * 12 + 4)
    empty = span_of(x[3:3])
    assert empty[0] == empty[1]
    assert overwritten([(begin, end), empty], [None, empty]) == []
