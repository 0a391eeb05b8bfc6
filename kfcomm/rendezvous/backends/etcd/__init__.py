"""Store in etcd (3.4 or later), through its JSON gateway."""

from __future__ import annotations

from kfcomm.rendezvous.backends import Backend, LocalStore, Opening
from kfcomm.rendezvous.backends.etcd.address import EXAMPLE, PASSWORD, SCHEMES, parse


async def _open(address: str, opening: Opening) -> LocalStore:
    from kfcomm.rendezvous.backends.etcd.mirror import EtcdStore  # and the library of HTTP

    found = parse(address, opening.environ)
    return await EtcdStore.begin(found, is_first=opening.is_first, within_s=opening.within_s)


BACKEND = Backend(tuple(SCHEMES), EXAMPLE, _open, is_shared=True, secrets=(PASSWORD,))
