"""A rank that joins its world, says so, and then does what its argument says."""

import asyncio
import os
import sys

from kfcomm.errors import RendezvousError
from kfcomm.rendezvous.client import StoreClient
from kfcomm.rendezvous.identity import PeerInfo
from kfcomm.rendezvous.join import JobStore, address_towards, join
from kfcomm.rendezvous.settings import Settings, detect


async def main(then: str) -> int:
    settings = detect(os.environ)
    store = await JobStore.open(settings)
    address = await address_towards(settings.interface, settings)
    me = PeerInfo.here(rank=settings.rank, address=address, port=1 + settings.rank)
    try:
        peers = await join(settings, me, store.client)
        say("joined", *(f"{peer.rank}@{peer.address}" for peer in peers))
        return await act(settings, store.client, then)
    except RendezvousError as error:
        say(error)
        return 9
    finally:
        await store.leave(settings, me)
        await store.close()


async def act(settings: Settings, client: StoreClient, then: str) -> int:
    match then.split(":"):
        case [_, rank, code] if int(rank) == settings.rank:
            return int(code)
        case ["fail", _, _]:
            await asyncio.Event().wait()
        case ["watch", _, _]:
            say("exit", *(await anext(aiter(client.watch_exits())))[:2])
    return 0


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
