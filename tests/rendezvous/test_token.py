from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kfcomm.core import auth
from kfcomm.errors import ConfigError
from kfcomm.rendezvous import authentication as tokens
from kfcomm.rendezvous.authentication import (
    as_text,
    bits_of,
    conceal,
    concealed_token,
    given_token,
    new_token,
    read_token,
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
    with pytest.raises(ConfigError, match=r"can be written by others.*chmod 600"):
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
