import asyncio
import os
import ssl
import sys
from pathlib import Path

import pytest

from kfcomm.common.sockets import readable
from kfcomm.core.handshake import Identity, Purpose
from kfcomm.errors import ConfigError, ProtocolError, RendezvousError, TransportError
from kfcomm.rendezvous.client import StoreClient
from kfcomm.rendezvous.store import StoreServer
from kfcomm.transports.handshake import HandshakeOptions, answer, dial
from kfcomm.transports.sockets import DialRefused, Listener
from kfcomm.transports.tls import AUTHORITY, CERTIFICATE, KEY, Tls, load, make
from tests.launch.launched import finished
from tests.support import on_every_loop

TOKEN = b"0123456789abcdef0123456789abcdef"
ME, PEER = Identity(0, "uid-0"), Identity(1, "uid-1")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make(folder)
    return folder


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another job."""
    folder = tmp_path_factory.mktemp("another")
    make(folder)
    return folder


def test_made_certificates_are_private_and_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "tls"
    make(folder)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {AUTHORITY: 0o600, CERTIFICATE: 0o600, KEY: 0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    before = (folder / KEY).read_bytes()
    with pytest.raises(ConfigError, match="is there already"):
        make(folder)
    assert (folder / KEY).read_bytes() == before


def test_the_files_can_be_named_one_by_one(made: Path) -> None:
    assert isinstance(load(f"{made / CERTIFICATE},{made / KEY},{made / AUTHORITY}"), Tls)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("nowhere", r"file nowhere/cert\.pem does not exist"),
        ("a,b", "names 2 files"),
        ("a,b,c", "file a does not exist;"),
        ("{made}/key.pem,{made}/key.pem,{made}/ca.pem", "cannot be used"),
        ("{made}/cert.pem,{another}/key.pem,{made}/ca.pem", "cannot be used: .*KEY_VALUES_MISMATCH"),
        ("{made}/cert.pem,{made}/key.pem,{made}/key.pem", "cannot be used"),
    ],
)
def test_invalid_tls_setting_is_named(given: str, why: str, made: Path, another: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        load(given.format(made=made, another=another))


def test_a_key_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path / "x")
    os.chmod(tmp_path / "x" / KEY, 0o640)
    load(str(tmp_path / "x"))
    assert "can be read by others" in caplog.text


def test_without_the_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"kfcomm\[tls\]"):
        make(tmp_path / "x")


async def meeting(client: Tls | None, server: Tls | None) -> object:
    """Result of dialling: a connection, or the error."""
    listener = Listener("127.0.0.1")

    async def greeted() -> None:
        await readable(listener.sockets[0].fileno())
        sock, _ = listener.sockets[0].accept()
        try:
            connection, _ = await answer(sock, lambda _: None, HandshakeOptions(PEER, 0, TOKEN, tls=server))
        except (TransportError, ProtocolError):
            return
        connection.close()

    task = asyncio.create_task(greeted())
    try:
        address = [("127.0.0.1", listener.port)]
        connection = await dial(address, PEER, Purpose.DATA, HandshakeOptions(ME, 0, TOKEN, tls=client))
    except DialRefused as error:
        return str(error)
    else:
        connection.close()
        return connection.sock
    finally:
        await task
        listener.close()


@on_every_loop
async def test_two_of_one_job_meet_inside_tls(made: Path) -> None:
    both = load(str(made))
    sock = await meeting(both, both)
    assert not isinstance(sock, str)


@on_every_loop
@pytest.mark.parametrize("who", ["the dialler", "the answerer"])
async def test_one_of_another_job_is_turned_down(who: str, made: Path, another: Path) -> None:
    ours, theirs = load(str(made)), load(str(another))
    why = await meeting(*((theirs, ours) if who == "the dialler" else (ours, theirs)))
    assert "TLS" in str(why) or "closed the connection" in str(why) or "lost during" in str(why)


@on_every_loop
@pytest.mark.parametrize("who", ["the dialler", "the answerer"])
async def test_one_without_tls_is_turned_down(who: str, made: Path) -> None:
    ours = load(str(made))
    assert isinstance(await meeting(*((None, ours) if who == "the dialler" else (ours, None))), str)


@pytest.mark.asyncio
async def test_a_store_speaks_tls_and_with_nobody_else(made: Path, another: Path) -> None:
    ours = load(str(made))
    store = await StoreServer.start("127.0.0.1", token=TOKEN, tls=ours)
    try:
        client = StoreClient(store.url, TOKEN, timeout_s=60, tls=ours)
        await client.set("key", b"value")
        assert await client.find("key") == b"value"
        await client.close()
        for tls, why in (
            (load(str(another)), r"no TLS with the store at .*: its certificate is not valid here: self-signed"),
            (None, "it speaks TLS|it may be for TLS"),
        ):
            stranger = StoreClient(store.url, TOKEN, timeout_s=0.1, tls=tls)
            with pytest.raises(RendezvousError, match=why):
                await stranger.find("key")
            await stranger.close()
    finally:
        await store.close()
    plain = await StoreServer.start("127.0.0.1", token=TOKEN)
    client = StoreClient(plain.url, TOKEN, timeout_s=60, tls=ours)
    with pytest.raises(RendezvousError, match=r"no TLS with the store at .*: it does not speak TLS"):
        await client.find("key")
    await client.close()
    await plain.close()


def test_contexts_take_nothing_older_and_ask_both_sides(made: Path) -> None:
    for context in load(str(made)):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED


def python(program: str) -> list[str]:
    return [sys.executable, "-c", f"import os, kfcomm, numpy as np\n{program}"]


SUM = "with kfcomm.sync.init() as comm: assert comm.all_reduce(np.ones(100_000))[0] == 3; print(comm.rank)"


@pytest.mark.parametrize("more", [(), ("--checksum",)])
def test_a_job_runs_inside_tls_from_one_command(more: tuple[str, ...], tmp_path: Path) -> None:
    folder = str(tmp_path / "job")
    assert finished("tls", "make", folder).returncode == 0
    again = finished("tls", "make", folder)
    assert (again.returncode, "is there already" in again.stderr) == (2, True)
    done = finished("run", "-n", "3", "--transport", "tcp", "--tls", folder, *more, *python(SUM))
    assert (done.returncode, done.stderr) == (0, "")
    wrong = finished("run", "-n", "3", "--tls", "nowhere", *python("print('never')"))
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "file nowhere/cert.pem does not exist" in wrong.stderr


def test_a_job_with_checksums_gives_the_same_sums_and_ranks_agree_on_it() -> None:
    done = finished("run", "-n", "3", "--transport", "tcp", "--checksum", *python(SUM))
    assert (done.returncode, done.stderr) == (0, "")
    some = "os.environ['KFCOMM_CHECKSUM'] = str(int(os.environ['KFCOMM_RANK']) % 2); kfcomm.sync.init()"
    done = finished("run", "-n", "3", *python(some))
    assert done.returncode == 1
    assert "checksum is on for rank 1 and off for rank 0: it has to be the same" in done.stderr
