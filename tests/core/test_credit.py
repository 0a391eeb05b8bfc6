from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.links import ALL_CREDIT_NBYTES, DEFAULT_CREDIT, Credit, ReceiveWindow, SendWindow, credit_of

amounts = st.builds(Credit, nbytes=st.integers(0, 100), headers=st.integers(0, 10))


def test_a_window_is_spent_in_bytes_and_in_headers():
    window = SendWindow(Credit(nbytes=10, headers=2))
    assert not window.take(11)
    assert window.take(10)
    assert not window.take(1)
    assert window.take(0)
    assert not window.take(0)
    window.give(4, 1)
    assert window.take(4)


def test_a_peer_is_held_to_its_window():
    window = ReceiveWindow(Credit(nbytes=10, headers=2))
    assert window.charge(10)
    assert window.charge(0)
    assert not window.charge(0)
    assert not ReceiveWindow(Credit(10, 2)).charge(11)
    assert not ReceiveWindow(Credit(0, 0)).charge(0)


def test_credit_comes_back_by_the_quarter():
    window = ReceiveWindow(Credit(nbytes=100, headers=100))
    assert window.settle() is None
    for _ in range(3):
        window.charge(8)
        window.matched(8)
    assert window.settle() is None
    window.charge(1)
    window.matched(1)
    assert window.settle() == Credit(25, 4)
    assert window.settle() is None


def test_headers_alone_bring_credit_back():
    window = ReceiveWindow(Credit(nbytes=100, headers=4))
    window.charge(0)
    window.matched(0)
    assert window.settle() == Credit(0, 1)


def test_no_window_is_never_settled():
    assert ReceiveWindow(Credit(0, 0)).settle() is None


@given(credit=amounts, steps=st.lists(st.tuples(st.sampled_from(["send", "match", "settle"]), st.integers(0, 60))))
def test_an_honest_sender_is_never_taken_for_another_and_no_credit_is_lost(credit, steps):
    sender, receiver = SendWindow(credit), ReceiveWindow(credit)
    under_way: list[int] = []
    for step, nbytes in steps:
        if step == "send" and sender.take(nbytes):
            assert receiver.charge(nbytes)
            under_way.append(nbytes)
        elif step == "match" and under_way:
            receiver.matched(under_way.pop())
        elif step == "settle" and (owed := receiver.settle()) is not None:
            sender.give(owed.nbytes, owed.headers)
    while under_way:
        receiver.matched(under_way.pop())
    if (owed := receiver.settle()) is not None:
        sender.give(owed.nbytes, owed.headers)
    assert credit.nbytes - sender.nbytes <= credit.nbytes / 4
    assert credit.headers - sender.headers <= credit.headers / 4


def test_few_peers_share_what_may_pile_up_and_many_have_the_default_each():
    for size in (1, 2, 3, 4, 17):
        assert credit_of(size).nbytes * max(1, size - 1) <= ALL_CREDIT_NBYTES
    assert credit_of(1) == credit_of(2)
    assert credit_of(17) == credit_of(1000) == DEFAULT_CREDIT
