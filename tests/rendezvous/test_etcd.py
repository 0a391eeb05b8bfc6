"""A store that is kept in etcd: what launchers see of each other's, whatever becomes of its members."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kfcomm.errors import ConfigError, LocalProtocolError, RendezvousError
from kfcomm.rendezvous.backends import backend_of
from kfcomm.rendezvous.backends.etcd import gateway, leases, mirror, parse
from kfcomm.rendezvous.backends.etcd.mirror import EtcdStore
from kfcomm.rendezvous.keyvalue import MAX_VALUE_NBYTES, Exit, StoreClosed
from tests import etcds
from tests.cutting import cutting
from tests.support import free_port

pytestmark = pytest.mark.slow

WITHIN_S = 30.0


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[etcds.Etcd]:
    with etcds.running(tmp_path_factory.mktemp("etcd")) as made:
        yield made


@contextlib.asynccontextmanager
async def mirrored(store: str, *, is_first: bool = False, is_over: bool = True) -> AsyncIterator[EtcdStore]:
    made = await EtcdStore.begin(parse(store, {}), is_first=is_first, within_s=WITHIN_S)
    try:
        yield made
    finally:
        await made.close(is_over=is_over)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  what happens elsewhere has no event
        await asyncio.sleep(0.01)


@pytest.mark.asyncio
async def test_claim_sees_earlier_claims(one: etcds.Etcd) -> None:
    async with mirrored(one.store("see")) as first, mirrored(one.store("see"), is_over=False) as second:
        assert await first.claim("world/0/0", b"a") == b"a"
        assert await second.claim("world/0/0", b"b") == b"a"
        assert second.contents.folder("world/0") == {"0": b"a"}
        assert await second.claim("world/0/1", b"b") == b"b"
        assert await first.contents.collect("world/0", 2, None, 60) == {"0": b"a", "1": b"b"}
        await first.set("world/0/0", b"")
        await first.report_exit(Exit(3, -9))
        assert await second.contents.exits_since(0, 60, None) == [Exit(3, -9)]
        await second.report_exit(Exit(3, 1))
        assert second.contents.exits == {3: Exit(3, -9)}
        assert second.contents.held("world/0/0") == b""


@pytest.mark.asyncio
async def test_claims_of_many_at_once_have_one_winner(one: etcds.Etcd) -> None:
    async with mirrored(one.store("many")) as first, mirrored(one.store("many"), is_over=False) as second:
        both = [first, second]
        held = await asyncio.gather(*(both[at % 2].claim(f"k/{at // 8}", b"%d" % at) for at in range(160)))
        for key in range(20):
            assert len(set(held[8 * key : 8 * key + 8])) == 1
        assert first.contents.folder("k") == second.contents.folder("k")


@pytest.mark.asyncio
async def test_values_outlive_a_launcher_and_end_with_the_job(one: etcds.Etcd) -> None:
    store = one.store("kept")
    async with mirrored(store, is_first=True, is_over=False) as first:
        for at in range(mirror.PAGE + 3):
            await first.claim(f"start/{at % 3}/{at}", b"%d" % at)
        await first.report_exit(Exit(5, 0))
    async with mirrored(store, is_first=True, is_over=False) as again, mirrored(store, is_over=False) as other:
        assert dict(again.contents.items()) == dict(first.contents.items())
        assert again.contents.exits == {5: Exit(5, 0)}
        await again.clear("start")
        await until(lambda: not other.contents.exits)
        assert len(other.contents.folder("start/1")) > mirror.PAGE // 3
        await again.clear()
        assert not list(again.contents.items())
        await until(lambda: not list(other.contents.items()))
        waiting = asyncio.ensure_future(other.contents.get("x", 1e6))
        assert all(key.startswith("kept/") for key in one.held() if "kept" in key)
        await again.close(is_over=True)
        with pytest.raises(StoreClosed):
            await waiting
    assert not [key for key in one.held() if key.startswith("kept/")]


@pytest.mark.asyncio
async def test_one_job_has_one_first_launcher(one: etcds.Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    store = one.store("lock")
    async with mirrored(store, is_first=True):
        with pytest.raises(RendezvousError, match=r"is used by another launcher, process \d+ on"):
            await EtcdStore.begin(parse(store, {}), is_first=True, within_s=WITHIN_S)
    monkeypatch.setattr(leases, "_begun", lambda pid: "another")
    gone = await EtcdStore.begin(parse(store, {}), is_first=True, within_s=WITHIN_S)
    monkeypatch.undo()  # now it is one that has ended, on this machine
    async with mirrored(store, is_first=True):
        pass
    await gone.close(is_over=True)


@pytest.mark.asyncio
async def test_values_out_of_bounds_are_refused_unsent(one: etcds.Etcd) -> None:
    async with mirrored(one.store("bounds")) as made:
        with pytest.raises(LocalProtocolError):
            await made.set("a", b"x" * (MAX_VALUE_NBYTES + 1))
        assert await made.claim("a", b"x" * MAX_VALUE_NBYTES) == b"x" * MAX_VALUE_NBYTES
    assert not [key for key in one.held() if key.startswith("bounds/")]


@pytest.mark.asyncio
async def test_without_a_quorum_writes_wait_and_reads_do_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kfcomm.etcd")
    with etcds.running(tmp_path / "etcd", 3) as three:
        async with mirrored(three.store()) as made:
            await made.claim("a", b"1")
            leader = await asyncio.to_thread(three.leader)
            three.kill(leader)
            assert await made.claim("b", b"2") == b"2"
            second = await asyncio.to_thread(three.leader)
            three.kill(second)
            waiting = asyncio.ensure_future(made.claim("c", b"3"))
            await until(lambda: "does not answer: training goes on, and changes wait" in caplog.text)
            assert await made.claim("a", b"other") == b"1"
            assert made.contents.held("b") == b"2"
            assert not waiting.done()
            three.start(leader)
            assert await waiting == b"3"
            assert "answers again" in caplog.text


@pytest.mark.asyncio
async def test_before_a_job_begins_nothing_is_said_to_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kfcomm.etcd")
    monkeypatch.setattr(gateway, "SAID_AFTER_S", 0.0)
    with pytest.raises(RendezvousError, match="could not be reached within"):
        await EtcdStore.begin(parse("etcd://127.0.0.1:1/job", {}), is_first=True, within_s=0.3)
    assert "does not answer: nothing is started before it does" in caplog.text
    assert "training goes on" not in caplog.text


@pytest.mark.asyncio
async def test_a_member_that_hangs_is_left_for_another(tmp_path: Path) -> None:
    with etcds.running(tmp_path / "etcd", 3) as three:
        async with mirrored(three.store()) as made, mirrored(three.store(), is_over=False) as other:
            process = three.processes[0]  # both ask this one
            assert process is not None
            process.send_signal(19)
            try:
                assert await made.claim("a", b"1") == b"1"
                assert await other.contents.get("a", 1e6) == b"1"
            finally:
                process.send_signal(18)


@pytest.mark.asyncio
async def test_a_user_with_a_password(tmp_path: Path) -> None:
    with etcds.running(tmp_path / "etcd") as one:
        role = {"name": "jobs"}
        one.ask("/v3/auth/user/add", {"name": "root", "password": "secret"})
        one.ask("/v3/auth/user/add", {"name": "ann", "password": "p@ss:1"})
        one.ask("/v3/auth/role/add", {"name": "root"})
        one.ask("/v3/auth/role/add", role)
        bounds = {"permType": "READWRITE", "key": "am9iLw==", "range_end": "am9iMA=="}  # job/ to job0
        one.ask("/v3/auth/role/grant", {"name": "jobs", "perm": bounds})
        one.ask("/v3/auth/user/grant", {"user": "root", "role": "root"})
        one.ask("/v3/auth/user/grant", {"user": "ann", "role": "jobs"})
        one.ask("/v3/auth/enable", {})
        async with mirrored(one.store("job", "ann:p%40ss%3A1@")) as made:
            assert await made.claim("a", b"1") == b"1"
        for store, environ, said in [
            (one.store("job"), {}, "user name is empty"),
            (one.store("job", "ann@"), {"KFCOMM_ETCD_PASSWORD": "wrong"}, "refuses the user 'ann'"),
            (one.store("other", "ann@"), {"KFCOMM_ETCD_PASSWORD": "p@ss:1"}, "permission denied"),
        ]:
            with pytest.raises(RendezvousError, match=said) as caught:
                await EtcdStore.begin(parse(store, environ), is_first=True, within_s=WITHIN_S)
            assert "wrong" not in str(caught.value)


def certified(folder: Path) -> list[Path]:
    """Files for a certificate of this host, its key, and who has signed it: itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, "a test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    encoded = made.public_bytes(serialization.Encoding.PEM)
    plain = serialization.NoEncryption()
    (folder / "cert.pem").write_bytes(encoded)
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    )
    return [folder / "cert.pem", folder / "key.pem", folder / "cert.pem"]


@pytest.mark.asyncio
async def test_tls_on_both_sides(tmp_path: Path) -> None:
    certificate, key, authority = files = certified(tmp_path)
    with etcds.running(tmp_path / "etcd", tls=files) as one:
        async with mirrored(f"{one.store()}?ca={authority}&cert={certificate}&key={key}") as made:
            assert await made.claim("a", b"1") == b"1"
        with pytest.raises(RendezvousError, match="could not be reached"):
            await EtcdStore.begin(parse(f"{one.store()}?ca={authority}", {}), is_first=True, within_s=0.1)
        with pytest.raises(RendezvousError, match="certificate verify failed"):
            await EtcdStore.begin(parse(one.store(), {}), is_first=True, within_s=0.1)


@pytest.mark.asyncio
async def test_an_etcd_that_is_not_there_is_named_with_the_cause() -> None:
    with pytest.raises(RendezvousError, match=r"etcd://127\.0\.0\.1:\d+/job could not be reached within 0\.2 s"):
        await EtcdStore.begin(parse(f"etcd://127.0.0.1:{free_port()}/job", {}), is_first=True, within_s=0.2)


@pytest.mark.asyncio
async def test_another_server_is_no_etcd() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\nConnection: close\r\n\r\nnone")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(RendezvousError, match=r"it is not an etcd of version 3\.4 or later"):
        await EtcdStore.begin(parse(f"etcd://127.0.0.1:{port}/job", {}), is_first=True, within_s=0.2)
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("etcd://h1,h2", "needs a prefix"),
        ("etcd:///prefix", "names no etcd"),
        ("etcd://h1,,h2/prefix", "names no etcd"),
        ("etcd://h1:0/prefix", "expected a port from"),
        ("etcd://h1:99999/prefix", "expected a port from"),
        ("etcd://ann@h1/prefix", "KFCOMM_ETCD_PASSWORD"),
        ("etcd://h1/prefix?ca=x", "write etcds://"),
        ("etcds://h1/prefix?cert=x", "expected both cert and key"),
        ("etcds://h1/prefix?ca=/none", "TLS cannot be used"),
        ("etcds://h1/prefix?key_file=x", "got key_file"),
        ("etcd://ann:hidden@h1,h2", "needs a prefix"),
    ],
)
def test_addresses_that_do_not_work(store: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        parse(store, {})
    assert "hidden" not in str(caught.value)


def test_backend_follows_from_scheme() -> None:
    assert all(backend_of(store).is_shared for store in ("etcd://h1/job", "etcds://h1/job"))
    assert not any(backend_of(store).is_shared for store in ("folder", "/a/b:c"))
    for store in ("etdc://h1/job", "http://127.0.0.1:44/"):
        with pytest.raises(ConfigError, match=r"--store: expected a folder or etcd://.*, not (etdc|http)://"):
            backend_of(store)


def test_addresses() -> None:
    found = parse("etcd://ann:s%2Fx@h1,h2:99,[fd00::1]/a/b/", {"KFCOMM_ETCD_PASSWORD": "other"})
    assert found.endpoints == ("http://h1:2379", "http://h2:99", "http://[fd00::1]:2379")
    assert (found.prefix, found.user, found.password) == ("a/b", "ann", "s/x")
    assert "s/x" not in repr(found)
    assert str(found) == "etcd://ann@h1:2379,h2:99,[fd00::1]:2379/a/b"


async def used(store: str) -> list[object]:
    """Make the requests of a first launcher to its store, and return the answers."""
    made = await EtcdStore.begin(parse(store, {}), is_first=True, within_s=WITHIN_S)
    told: list[object] = [
        await made.claim("start/0/2", b""),
        await made.claim("start/0/2", b"other"),
        await made.claim("world/0/0", b"mine"),
        await made.set("silent/0", b""),
        await made.set("silent/0", b"x"),
        await made.report_exit(Exit(1, -9)),
        await made.claim("job", b"record"),
        await made.clear("start"),
        dict(made.contents.items()),
    ]
    await made.close(is_over=True)
    return told


@pytest.mark.asyncio
async def test_lost_answers_change_no_outcome(one: etcds.Etcd) -> None:
    async with cutting(one.ports[0], ()) as relay:
        right = await used(f"etcd://127.0.0.1:{relay.port}/whole")
    count = relay.num_requests
    assert count > 15
    for lost in range(1, count + 1):
        async with cutting(one.ports[0], {lost}) as relay:
            assert await used(f"etcd://127.0.0.1:{relay.port}/lost{lost}") == right, lost
            assert relay.num_lost == 1
        assert not [key for key in await asyncio.to_thread(one.held) if key.startswith(f"lost{lost}/")], lost


@pytest.mark.asyncio
async def test_a_lease_that_is_revoked_costs_a_job_nothing(one: etcds.Etcd, caplog: pytest.LogCaptureFixture) -> None:
    store = one.store("revoked")
    async with mirrored(store, is_first=True) as first, mirrored(store, is_over=False) as other:
        await first.claim("start/0/2", b"")
        await first.report_exit(Exit(1, -9))
        for number in range(3):
            await asyncio.to_thread(etcds.revoke_lease, one, "revoked")
            who = (first, other)[number % 2]
            assert await who.claim(f"k/{number}", b"v") == b"v"
            assert await who.claim("start/0/2", b"late") == b""
        wanted = ["start/0/2", "ends/1", "k/0", "k/1", "k/2"]
        await until(lambda: {key for key, _ in first.contents.items()} == set(wanted))
        await until(lambda: dict(other.contents.items()) == dict(first.contents.items()))
        while {f"revoked/store/{key}" for key in wanted} - {*await asyncio.to_thread(one.held)}:
            pass
        waiting = asyncio.ensure_future(other.contents.get("x", 1e6))
        await first.close(is_over=True)
        with pytest.raises(StoreClosed):
            await waiting
    assert "has ended the lease of the job: all is written anew" in caplog.text
    assert not [key for key in await asyncio.to_thread(one.held) if key.startswith("revoked/")]


@pytest.mark.asyncio
async def test_late_news_of_a_lease_include_the_next_one(one: etcds.Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message then has both: the end of the lease with all its keys, and what was written anew."""
    store, watch, goes_on = one.store("late"), gateway.Gateway.watch, asyncio.Event()

    async def late(self: gateway.Gateway, key: bytes, end: bytes, revision: int) -> AsyncIterator[dict[str, object]]:
        await goes_on.wait()
        async for told in watch(self, key, end, revision):
            yield told

    async with mirrored(store, is_first=True) as first:
        await first.claim("a", b"1")
        monkeypatch.setattr(gateway.Gateway, "watch", late)
        monkeypatch.setattr(leases, "ABANDONED_AFTER_S", 0.1)
        async with mirrored(store, is_over=False) as other:
            await asyncio.to_thread(etcds.revoke_lease, one, "late")
            await first.claim("b", b"2")
            goes_on.set()
            await other.claim("c", b"3")
            assert dict(other.contents.items()) == {"a": b"1", "b": b"2", "c": b"3"}


@pytest.mark.asyncio
async def test_a_job_whose_first_launcher_is_gone_ends_some_time_after_its_lease(
    one: etcds.Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "ABANDONED_AFTER_S", 0.1)
    async with mirrored(one.store("left"), is_over=False) as other:
        await asyncio.to_thread(etcds.revoke_lease, one, "left")
        with pytest.raises(StoreClosed):
            await other.contents.get("x", 1e6)


@pytest.mark.asyncio
async def test_authentication_that_is_switched_on_and_off_delays_what_is_written(tmp_path: Path) -> None:
    with etcds.running(tmp_path / "etcd") as one:
        async with mirrored(one.store(), is_first=True) as made:
            await made.claim("a", b"1")
            one.ask("/v3/auth/user/add", {"name": "root", "password": "secret"})
            one.ask("/v3/auth/role/add", {"name": "root"})
            one.ask("/v3/auth/user/grant", {"user": "root", "role": "root"})
            one.ask("/v3/auth/enable", {})
            writing = asyncio.ensure_future(made.claim("b", b"2"))
            await until(lambda: bool(made._gateway.trouble))
            assert not writing.done()
            token = one.ask("/v3/auth/authenticate", {"name": "root", "password": "secret"})["token"]
            await asyncio.to_thread(one.ask, "/v3/auth/disable", {}, {"Authorization": token})
            assert await writing == b"2"
            assert not made.contents.is_closed
