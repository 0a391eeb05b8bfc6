"""Tokens that rank 0 hands to the other ranks: with a munge of the test's own."""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import shutil
import socket as socketlib
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kfcomm.errors import ConfigError, RendezvousError
from kfcomm.rendezvous.channels import Handing, munge, pmi, torchrun
from kfcomm.rendezvous.settings import detect

STORE = "http://node1:20001"
TOKEN = secrets.token_hex(32).encode()
TASK = {
    "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "7",
}  # fmt: skip
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "KFCOMM_STORE": "http://10.0.0.1:29600"}
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


def handing(environ: dict[str, str], rank: int, shown: bytes = b"", store: str = STORE) -> Handing:
    async def look() -> bytes:
        return shown

    return Handing(environ, rank, store, 10.0, look)


def sealed(environ: dict[str, str], store: str = STORE) -> tuple[bytes, bytes]:
    """The token, and what the store of rank 0 shows."""
    return asyncio.run(munge.agree(handing(environ, 0, store=store)))


def received(environ: dict[str, str], shown: bytes) -> bytes:
    token, shows = asyncio.run(munge.agree(handing(environ, 1, shown)))
    assert not shows
    return token


def test_every_rank_opens_the_credential(environ: dict[str, str]) -> None:
    token, shown = sealed(environ)
    assert len(token) == 64
    assert token not in shown
    assert [received(environ, shown) for _ in range(3)] == [token] * 3


def test_programs_of_one_task_have_one_token_and_other_stores_another(environ: dict[str, str]) -> None:
    assert sealed(environ)[0] == sealed(environ)[0]
    assert sealed(environ)[0] != sealed(environ, store="http://node1:20002")[0]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_other_user_can_neither_open_nor_make_a_credential(environ: dict[str, str], socket: Path) -> None:
    _, shown = sealed(environ)
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
        received(environ, sealed(environ, store="http://node1:20002")[1])


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


HYDRA = {
    "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1", "PMI_FD": "7",
    "KFCOMM_STORE": "http://10.0.0.1:29600",
}  # fmt: skip


def hydra(servers: list[socketlib.socket], finalized: list[str]) -> None:
    """Serve the key-value store of PMI-1 to all ranks until their ends."""
    values: dict[str, str] = {}
    files = [server.makefile("rw") for server in servers]
    waiting = len(files)
    barrier = threading.Barrier(waiting)

    def serve(file: Any) -> None:
        for line in file:
            fields = dict(word.split("=", 1) for word in line.split())
            match fields["cmd"]:
                case "get_my_kvsname":
                    answer = "my_kvsname rc=0 kvsname=kvs_1"
                case "put":
                    assert fields["kvsname"] == "kvs_1"
                    assert fields["key"] not in values  # hydra would end the job
                    values[fields["key"]] = fields["value"]
                    answer = "put_result rc=0"
                case "barrier_in":
                    barrier.wait()
                    answer = "barrier_out rc=0"
                case "get":
                    value = values.get(fields["key"])
                    answer = "get_result rc=-1" if value is None else f"get_result rc=0 value={value}"
                case "finalize":
                    answer = "finalize_ack rc=0"
                    finalized.append(fields["cmd"])
            file.write(f"cmd={answer}\n")
            file.flush()

    threads = [threading.Thread(target=serve, args=(file,)) for file in files]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for file in files:
        file.close()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Functions registered for the end of this process, which goes on."""
    registered: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", registered.append)
    pmi._finalize_at_exit.cache_clear()
    return registered


def test_ranks_of_hydra_share_a_token_by_its_store(ends: list[Callable[[], None]]) -> None:
    ours, theirs = zip(*(socketlib.socketpair() for _ in range(3)), strict=True)
    finalized: list[str] = []
    serving = threading.Thread(target=hydra, args=(list(theirs), finalized))
    serving.start()

    async def all_ranks() -> list[tuple[bytes, bytes]]:
        environs = [HYDRA | {"PMI_FD": str(one.fileno())} for one in ours]
        return await asyncio.gather(*(pmi.agree(handing(one, rank)) for rank, one in enumerate(environs)))

    twice = [asyncio.run(all_ranks()) for _ in range(2)]
    assert len(ends) == len(ours)  # once each, however often it joins
    for end in ends:
        end()
    for one in (*ours, *theirs):
        one.shutdown(socketlib.SHUT_RDWR)
    serving.join()
    for one in (*ours, *theirs):
        one.close()
    [(token, shown)] = {result for results in twice for result in results}
    assert len(token) == 64
    assert not shown
    assert len(finalized) == len(ours)


def test_hydra_that_does_not_know_the_protocol_is_an_error() -> None:
    ours, theirs = socketlib.socketpair()
    environ = HYDRA | {"PMI_FD": str(ours.fileno())}
    with ours, theirs:
        theirs.sendall(b"cmd=error rc=-1\n")
        with pytest.raises(RendezvousError, match=r"hydra refuses get_my_kvsname of PMI.*set KFCOMM_TOKEN"):
            asyncio.run(pmi.agree(handing(environ, 1)))
        theirs.shutdown(socketlib.SHUT_WR)
        with pytest.raises(RendezvousError, match="hydra has closed the connection"):
            asyncio.run(pmi.agree(handing(environ, 1)))


@pytest.mark.parametrize(
    ("environ", "channel"),
    [
        (HYDRA, "pmi"),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "torchrun"),
    ],
)
def test_launcher_with_a_channel_needs_no_token(
    environ: dict[str, str], channel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(munge, "SOCKET", "/no/such/socket")
    monkeypatch.setattr(torchrun, "is_installed", lambda name: name == "torch")
    assert detect(environ).channel == channel


@pytest.mark.parametrize(
    ("environ", "why"),
    [
        ({name: value for name, value in HYDRA.items() if name != "PMI_FD"}, "PMI: PMI_FD is not set"),
        (TORCHRUN, "torchrun: its agent serves no store"),
        (OPENMPI, "PMI: mpiexec of MPICH or Intel MPI has not started this process"),
    ],
)
def test_launcher_without_a_channel_needs_a_token(
    environ: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(munge, "SOCKET", "/no/such/socket")
    with pytest.raises(ConfigError, match=f"set KFCOMM_TOKEN.*{why}"):
        detect(environ)
