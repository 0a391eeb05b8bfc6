from hypothesis import given
from hypothesis import strategies as st

from kfcomm.rendezvous.authentication import (
    Authenticator,
    Ticket,
    answer_header,
    digest_of,
    is_answer_valid,
    request_header,
)

TOKEN, NONCE = b"the token of the job", b"n" * 32
CLIENT = "ab" * 16


def ticket(number: int = 1, path: str = "/v1/get", body: bytes = b"body", client: str = CLIENT) -> Ticket:
    return Ticket(client, number, path, digest_of(body), TOKEN)


def test_a_signed_request_is_let_through_once() -> None:
    gate = Authenticator(TOKEN, NONCE)
    header = request_header(NONCE, ticket())
    assert gate.admit("/v1/get", header) == ticket()
    assert gate.admit("/v1/get", header) is None


def test_for_another_path_token_or_nonce_it_is_worthless() -> None:
    assert Authenticator(TOKEN, NONCE).admit("/v1/set", request_header(NONCE, ticket())) is None
    assert (
        Authenticator(TOKEN, NONCE).admit("/v1/get", request_header(NONCE, ticket()._replace(token=b"another"))) is None
    )
    assert Authenticator(TOKEN, NONCE).admit("/v1/get", request_header(b"m" * 32, ticket())) is None


@given(st.text() | st.from_regex(r"[0-9a-f]{32}\.[0-9]{1,15}\.[0-9a-f]{64}\.[0-9a-f]{64}", fullmatch=True))
def test_anything_else_is_refused_and_remembered_nowhere(header: str) -> None:
    gate = Authenticator(TOKEN, NONCE)
    assert gate.admit("/v1/get", header) is None
    assert not gate._windows


@given(st.permutations(range(60)), st.lists(st.integers(0, 59)))
def test_numbers_may_come_in_any_order_but_only_once(order: list[int], again: list[int]) -> None:
    gate = Authenticator(TOKEN, NONCE)
    headers = [request_header(NONCE, ticket(number)) for number in range(60)]
    assert all(gate.admit("/v1/get", headers[number]) for number in order)
    assert not any(gate.admit("/v1/get", headers[number]) for number in again)


@given(st.lists(st.integers(0, 10_000), unique=True, min_size=1))
def test_numbers_too_old_to_remember_are_refused(numbers: list[int]) -> None:
    gate = Authenticator(TOKEN, NONCE)
    highest = -1
    for number in numbers:
        admitted = gate.admit("/v1/get", request_header(NONCE, ticket(number))) is not None
        assert admitted == (number > highest - 1024)
        highest = max(highest, number)


def test_clients_do_not_disturb_each_other() -> None:
    gate = Authenticator(TOKEN, NONCE)
    for client in (CLIENT, "cd" * 16):
        assert gate.admit("/v1/get", request_header(NONCE, ticket(client=client)))


def test_an_answer_is_for_one_request_status_and_body() -> None:
    header = answer_header(NONCE, ticket(), 200, b"answer")
    assert is_answer_valid(NONCE, ticket(), 200, b"answer", header)
    assert not is_answer_valid(NONCE, ticket(2), 200, b"answer", header)
    assert not is_answer_valid(NONCE, ticket(), 503, b"answer", header)
    assert not is_answer_valid(NONCE, ticket(), 200, b"another", header)
    assert not is_answer_valid(NONCE, ticket(), 200, b"answer", "")
    assert not is_answer_valid(NONCE, ticket()._replace(token=b"another"), 200, b"answer", header)
