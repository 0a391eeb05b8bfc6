from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.token import given_token, new_token, read_token, user_token

TOKEN = new_token()


def test_a_new_token_is_new_and_valid() -> None:
    assert new_token() != TOKEN
    assert given_token({"KFCOMM_TOKEN": TOKEN}, None) == (TOKEN.encode(), "KFCOMM_TOKEN")


def test_the_argument_comes_first() -> None:
    assert given_token({"KFCOMM_TOKEN": TOKEN}, b"x" * 16) == (b"x" * 16, "token=")


def test_a_file_is_read_without_the_white_space_around_the_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    assert given_token({"KFCOMM_TOKEN_FILE": str(path)}, None) == (TOKEN.encode(), "KFCOMM_TOKEN_FILE")


@pytest.mark.parametrize("text", [b"", b"short", b"\n" * 64, b"x" * 100_000, b"x" * 16 + b"\0" + b"x" * 16])
def test_what_is_no_token_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="token file"):
        read_token(path)


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
