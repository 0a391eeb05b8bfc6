"""Tokens of jobs and the signatures made with them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core import auth
from kfcomm.errors import ConfigError
from kfcomm.rendezvous import authentication as tokens
from kfcomm.rendezvous.authentication import (
    Authenticator,
    Ticket,
    answer_header,
    as_text,
    bits_of,
    conceal,
    concealed_token,
    digest_of,
    given_token,
    is_answer_valid,
    new_token,
    read_token,
    request_header,
    user_token,
)

TOKEN = "6f1d2a9c80b34e57c1e8f09a7b5d3264"  # not a new one: it is part of names of tests


def test_a_new_token_is_new_and_valid() -> None:
    assert new_token() != TOKEN
    assert given_token({"KFCOMM_TOKEN": TOKEN}, None) == (TOKEN.encode(), "KFCOMM_TOKEN")


def test_the_argument_comes_first() -> None:
    other = bytes(range(1, 17))
    assert given_token({"KFCOMM_TOKEN": TOKEN}, other) == (other, "token=")


def test_a_file_is_read_without_the_white_space_around_the_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    assert given_token({"KFCOMM_TOKEN_FILE": str(path)}, None) == (TOKEN.encode(), "KFCOMM_TOKEN_FILE")


@pytest.mark.parametrize("text", [b"", b"short", b"\n" * 64, b"x" * 100_000, b"x" * 16 + b"\0" + b"x" * 16])
def test_invalid_token_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="token file"):
        read_token(path)


@pytest.mark.parametrize(
    ("text", "bits"),
    [("0123456789abcdef" * 2, 128), ("1234567890" * 4, 132), ("aZ9" * 8, 142), ("correct horse battery", 139)],
)
def test_how_much_can_be_in_a_token(text: str, bits: int) -> None:
    assert int(bits_of(text.encode())) == bits


@pytest.mark.parametrize("text", ["0123456789abcdef" * 2, TOKEN, "correct horse battery staple"])
def test_token_of_128_bits_is_accepted(text: str) -> None:
    assert given_token({}, text) == (text.encode(), "token=")


@pytest.mark.parametrize("text", ["0123456789abcdef", "12345678901234567890", "x" * 64, "abab" * 16, TOKEN[:31], ""])
def test_guessable_token_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="128 random ones"):
        given_token({}, text)


@pytest.mark.parametrize("mode", [0o660, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"can be written by other users.*chmod 600"):
        read_token(path)


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_a_file_that_others_can_read_is_warned_of(
    tmp_path: Path, mode: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(mode)
    assert read_token(path) == TOKEN.encode()
    assert ("can be read by others" in caplog.text) is warns


def test_several_tokens_one_a_line() -> None:
    new = new_token()
    found, _ = given_token({"KFCOMM_TOKEN": f"{new}\n {TOKEN}\n"}, None) or (b"", "")
    assert auth.tokens(found) == [new.encode(), TOKEN.encode()]
    assert as_text(found) == f"{new}\n{TOKEN}"
    with pytest.raises(ConfigError, match="can be guessed"):
        given_token({"KFCOMM_TOKEN": f"{new}\nshort"}, None)


def test_a_concealed_token_is_gone_from_the_environment_and_known_for_its_store_alone() -> None:
    environ = {"KFCOMM_TOKEN": TOKEN, "OTHER": "x"}
    conceal(environ, "http://127.0.0.1:7", TOKEN.encode())
    assert environ == {"OTHER": "x"}
    assert concealed_token("http://127.0.0.1:8") is None
    token, origin = concealed_token("http://127.0.0.1:7") or (b"", "")
    assert (token, "first" in origin) == (TOKEN.encode(), True)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*No such file"):
        read_token(tmp_path / "nowhere")


def test_all_ranks_of_a_user_get_one_token_that_others_cannot_read(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: user_token(environ), range(32)))
    ((token, where),) = found
    assert read_token(Path(where)) == token
    assert Path(where).stat().st_mode & 0o077 == 0
    assert Path(where).parent.stat().st_mode & 0o077 == 0
    assert [each.name for each in Path(where).parent.iterdir()] == ["token"]


def test_a_directory_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kfcomm").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="this user alone"):
        user_token({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_link_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "kfcomm").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="this user alone"):
        user_token({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_without_a_temporary_folder_the_token_lies_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "TEMPORARY", (str(tmp_path / "none"), str(tmp_path)))
    token, where = user_token({"TMPDIR": str(tmp_path / "nowhere")})
    assert Path(where).parent.parent == tmp_path
    assert read_token(Path(where)) == token


def test_unwritable_folders_raise_an_error_that_names_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "TEMPORARY", ())
    with pytest.raises(ConfigError, match=r"none of TMPDIR=.*nowhere can be written; set KFCOMM_TOKEN.*set TMPDIR"):
        user_token({"TMPDIR": str(tmp_path / "nowhere")})


SECRET, NONCE = b"the token of the job", b"n" * 32
CLIENT = "ab" * 16


def ticket(number: int = 1, path: str = "/v1/get", body: bytes = b"body", client: str = CLIENT) -> Ticket:
    return Ticket(client, number, path, digest_of(body), SECRET)


def test_a_signed_request_is_let_through_once() -> None:
    gate = Authenticator(SECRET, NONCE)
    header = request_header(NONCE, ticket())
    assert gate.admit("/v1/get", header) == ticket()
    assert gate.admit("/v1/get", header) is None


def test_for_another_path_token_or_nonce_it_is_worthless() -> None:
    assert Authenticator(SECRET, NONCE).admit("/v1/set", request_header(NONCE, ticket())) is None
    assert (
        Authenticator(SECRET, NONCE).admit("/v1/get", request_header(NONCE, ticket()._replace(token=b"another")))
        is None
    )
    assert Authenticator(SECRET, NONCE).admit("/v1/get", request_header(b"m" * 32, ticket())) is None


@given(st.text() | st.from_regex(r"[0-9a-f]{32}\.[0-9]{1,15}\.[0-9a-f]{64}\.[0-9a-f]{64}", fullmatch=True))
def test_anything_else_is_refused_and_remembered_nowhere(header: str) -> None:
    gate = Authenticator(SECRET, NONCE)
    assert gate.admit("/v1/get", header) is None
    assert not gate._windows


@given(st.permutations(range(60)), st.lists(st.integers(0, 59)))
def test_numbers_may_come_in_any_order_but_only_once(order: list[int], again: list[int]) -> None:
    gate = Authenticator(SECRET, NONCE)
    headers = [request_header(NONCE, ticket(number)) for number in range(60)]
    assert all(gate.admit("/v1/get", headers[number]) for number in order)
    assert not any(gate.admit("/v1/get", headers[number]) for number in again)


@given(st.lists(st.integers(0, 10_000), unique=True, min_size=1))
def test_numbers_too_old_to_remember_are_refused(numbers: list[int]) -> None:
    gate = Authenticator(SECRET, NONCE)
    highest = -1
    for number in numbers:
        admitted = gate.admit("/v1/get", request_header(NONCE, ticket(number))) is not None
        assert admitted == (number > highest - 1024)
        highest = max(highest, number)


def test_clients_do_not_disturb_each_other() -> None:
    gate = Authenticator(SECRET, NONCE)
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
