"""Tokens that rank 0 hands to the other ranks: with a munge of the test's own."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.rendezvous.channels import Handing, munge
from kfcomm.rendezvous.settings import detect

STORE = "http://node1:20001"
TOKEN = secrets.token_hex(32).encode()
TASK = {
    "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "7",
}  # fmt: skip
OTHER_USER = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")


@pytest.fixture(scope="module")
def socket() -> Iterator[Path]:
    """Socket of a munge that every user of this host can reach."""
    program = shutil.which("munged", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("needs munge (Debian's munge)")
    folder = Path(tempfile.mkdtemp(prefix="kfmunge", dir="/tmp"))  # other users do not reach pytest's folders
    folder.chmod(0o755)
    (folder / "key").write_bytes(secrets.token_bytes(64))
    (folder / "key").chmod(0o600)
    files = [f"--{name}-file={folder / name}" for name in ("key", "pid", "log", "seed")]
    process = subprocess.Popen([program, "--foreground", "--force", f"--socket={folder / 'socket'}", *files], stderr=-3)
    try:
        while not (folder / "socket").exists():
            assert process.poll() is None
            time.sleep(0.01)
        yield folder / "socket"
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder)


@pytest.fixture
def environ(socket: Path, tmp_path: Path) -> dict[str, str]:
    """Variables of a task of a SLURM with this munge."""
    conf = tmp_path / "slurm.conf"
    conf.write_text(f"AuthType=auth/munge\nAuthInfo=ttl=60,socket={socket}\n")
    return TASK | {"SLURM_CONF": str(conf)}


def handing(environ: dict[str, str], shown: bytes = b"", store: str = STORE) -> Handing:
    async def look() -> bytes:
        return shown

    return Handing(environ, store, 10.0, look)


def sealed(environ: dict[str, str], store: str = STORE) -> bytes:
    return asyncio.run(munge.hand_over(handing(environ, store=store), TOKEN))


def received(environ: dict[str, str], shown: bytes) -> bytes:
    return asyncio.run(munge.receive(handing(environ, shown)))


def test_every_rank_opens_the_credential(environ: dict[str, str]) -> None:
    shown = sealed(environ)
    assert TOKEN not in shown
    assert [received(environ, shown) for _ in range(3)] == [TOKEN] * 3


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_other_user_can_neither_open_nor_make_a_credential(environ: dict[str, str], socket: Path) -> None:
    shown = sealed(environ)
    opened = subprocess.run(
        [*OTHER_USER, "unmunge", "-S", str(socket)], input=shown, capture_output=True, check=False
    )  # fmt: skip
    assert b"Unauthorized" in opened.stderr
    assert opened.returncode != 0
    text = b"kfcomm token of the store at " + STORE.encode() + b"\n" + TOKEN
    forged = subprocess.run([*OTHER_USER, "munge", "-S", str(socket)], input=text, capture_output=True, check=True)
    with pytest.raises(RendezvousError, match=r"belongs to the user 65534, not to this one \(0\).*KFCOMM_PORT"):
        received(environ, forged.stdout.strip())


def test_credential_for_another_store_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(RendezvousError, match="not for this store"):
        received(environ, sealed(environ, store="http://node1:20002"))


def test_invalid_credential_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(RendezvousError, match="does not open the credential of rank 0"):
        received(environ, b"MUNGE:garbage:")
    with pytest.raises(RendezvousError, match=r"rank 0 was given one: set KFCOMM_TOKEN"):
        received(environ, b"")


def test_task_of_several_hosts_takes_munge(environ: dict[str, str]) -> None:
    settings = detect(environ)
    assert (settings.token, settings.channel) == (None, "munge")
    assert detect(environ | {"KFCOMM_TOKEN": TOKEN.decode()}).channel is None
    with pytest.raises(ConfigError, match="needs a token: set KFCOMM_TOKEN"):
        detect(environ, serve=False)


def test_error_says_why_no_token_can_be_handed_over(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "other.conf"
    conf.write_text("AuthInfo=socket=/no/such/socket\n")
    with pytest.raises(ConfigError, match=r"set KFCOMM_TOKEN.*munge: no daemon listens at /no/such/socket"):
        detect(environ | {"SLURM_CONF": str(conf)})
    monkeypatch.setattr(munge, "LIBRARY", "libnone.so.2")
    with pytest.raises(ConfigError, match=r"munge: libnone\.so\.2 is not installed"):
        detect(environ)
