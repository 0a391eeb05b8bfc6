"""Search with damaged checkpoints: each is read correctly, or refused with a ``ConfigError``.

python -m tests.search.damaged --count 100 --seed 1

Bits flip, bytes change, the file is cut off, pages are zeros or those of an older checkpoint, pieces are swapped, lost
and doubled: anywhere, or in the directory of the file. A failed read leaves the state unchanged.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from kfcomm.collectives.objects import packed
from kfcomm.elastic import State
from kfcomm.elastic.checkpoint import ENTRY, Checkpoint
from kfcomm.elastic.state import arrays_of, plan_of, small_of
from kfcomm.errors import ConfigError
from tests.search import driver

PAGE = 64
"""Of bytes that are lost or stale together."""


def state_of(fill: int) -> State:
    """A state of all kinds of arrays and values."""
    import ml_dtypes

    return State(
        weights=np.full((5, 7), fill, np.float64), half=np.full(9, fill).astype(ml_dtypes.bfloat16),
        none=np.zeros((0, 3)), tree={"a": [np.full(3, fill, np.int32), {"b": np.full((), fill, np.uint8)}], "n": fill},
        text="x" * 40, twin=np.full((5, 7), -fill, np.float64), flags=np.full(16, bool(fill % 2)),
    )  # fmt: skip


def bytes_of(state: State) -> bytes:
    """Contents of a state as bytes."""
    arrays = b"".join(np.asarray(array).tobytes() for _, array in arrays_of(state))
    return arrays + packed(small_of(state)).tobytes()


def written(path: Path, fill: int) -> bytes:
    """A checkpoint of such a state, as a file."""

    async def write() -> None:
        checkpoint = Checkpoint(path, 1, state_of(fill))
        checkpoint.look(fill, [fill, None])
        await checkpoint.close()

    asyncio.run(write())
    return path.read_bytes()


def written_before(path: Path, fill: int) -> bytes:
    """One of before there were sums."""
    state = state_of(fill)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(ENTRY, packed([1, plan_of(state), small_of(state), [fill, None]]).tobytes())
        for name, array in arrays_of(state):
            with file.open(f"{name}.npy", "w", force_zip64=True) as entry:
                plain = array if array.dtype.kind in "biufc" else array.reshape(-1).view(np.uint8)
                np.lib.format.write_array(entry, plain, allow_pickle=False)
    return path.read_bytes()


def damaged(random: Random, good: bytes, older: bytes) -> bytes:
    """Return a damaged copy of a file."""
    data = bytearray(good)
    directory = data.index(b"PK\x01\x02")
    for _ in range(random.choice([1, 1, 1, 2, 5])):
        at = random.randrange(directory if random.random() < 0.4 else 0, max(len(data), directory + 1)) % len(data)
        page = slice(at // PAGE * PAGE, at // PAGE * PAGE + PAGE)
        other = random.randrange(len(data)) // PAGE * PAGE
        match random.randrange(8):
            case 0 | 1 | 2:
                data[at] ^= 1 << random.randrange(8)
            case 3:
                data[at] = random.randrange(256)
            case 4:
                data[page] = random.choice([bytes(PAGE), older[page]])[: len(data[page])]
            case 5:
                data[page], data[other : other + PAGE] = data[other : other + PAGE], data[page]
            case 6:
                del data[at : at + random.choice([1, 1, PAGE])]
            case 7:
                data[at:at] = data[page]
        if len(data) < 2 * PAGE:
            break
    return bytes(data[: random.randrange(len(data))]) if random.random() < 0.05 else bytes(data)


def outcome(path: Path, data: bytes, right: bytes) -> str:
    """Read the checkpoint, and return "refused" or "right".

    Raises:
        AssertionError: another error came, or the state is neither the written one nor unchanged.
    """
    path.write_bytes(data)
    state = state_of(0)
    before = bytes_of(state)

    async def read() -> Any:
        checkpoint = Checkpoint(path, 1, state)
        try:
            return await checkpoint.read()
        finally:
            await checkpoint.close()

    try:
        place = asyncio.run(read())
    except ConfigError:
        assert bytes_of(state) == before, "the state has changed"
        return "refused"
    except Exception as error:
        raise AssertionError(f"it ended with {error!r}") from error
    assert bytes_of(state) == right, "something else was read"
    assert place == [4, None], "another place was read"
    return "right"


def search(random: Random, folder: Path, count: int) -> Counter[str]:
    """Damage so many files; what came of them."""
    found: Counter[str] = Counter()
    path, right = folder / "c.npz", bytes_of(state_of(4))
    forms = [[make(path, fill) for fill in (4, 3)] for make in (written, written_before)]
    for _ in range(count):
        good, older = random.choice([forms[0], forms[0], forms[0], forms[1]])
        found[outcome(path, damaged(random, good, older), right)] += 1
    return found


def case(seed: int) -> Counter[str]:
    """Damage some files by a seed."""
    with tempfile.TemporaryDirectory() as folder:
        return search(Random(seed), Path(folder), 200)


if __name__ == "__main__":
    warnings.simplefilter("error")
    sys.exit(driver.run("damaged", case))
