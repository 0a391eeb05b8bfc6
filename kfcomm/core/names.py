"""What this rank calls things: the keys it has met, and the small numbers that stand for keys and signatures on links.

Invariants: no two keys in flight have the same number, so that an answer about a number is about one key.
Numbers are used again; both ends of a link keep what a number stands for, so it may be given a new meaning at any
time. Keys are not forgotten while their group is used, since their sequence numbers count how often they were used
(about 1 KiB each). Of groups that this rank has left they stay for a while, to tell who lags behind what was posted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kfcomm.core.collective import MAX_LEFT, AnySignature, GroupView, ItemSizes, Key, Series
from kfcomm.core.frame import MAX_ID
from kfcomm.core.program import Program
from kfcomm.core.signature import Signature
from kfcomm.errors import LocalProtocolError

MAX_SIGNATURES = 1 << 12
"""Signatures are numbered below this. The oldest gives up its number to a new one, so memory stays bounded."""

UNNUMBERED = -1


class Names:
    """The names of one rank in one epoch.

    Attributes:
        version: another one whenever a number was given another meaning.
    """

    __slots__ = (
        "_by_identity", "_by_name", "_left", "_next_id", "_next_signature", "_numbered", "_of_group", "_owners",
        "_signatures", "version",
    )  # fmt: skip

    def __init__(self) -> None:
        self._by_name: dict[tuple[bytes, str], Key] = {}
        self._of_group: dict[bytes, list[Key]] = {}
        self._left: dict[bytes, None] = {}
        self._owners: dict[int, Key] = {}
        self._next_id = 0
        self._signatures: dict[AnySignature, tuple[int, Signature]] = {}
        self._by_identity: dict[int, tuple[int, Signature]] = {}
        self._numbered: dict[int, Signature] = {}
        self._next_signature = 0
        self.version = 0

    def __iter__(self) -> Iterator[Key]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, group_id: bytes, name: str) -> Key | None:
        """The key of this name, if it was met before. Safe to call from any thread."""
        return self._by_name.get((group_id, name))

    def key(self, group_id: bytes, name: str) -> Key:
        """The key of this name, made when it is first met."""
        key = self._by_name.get((group_id, name))
        if key is None:
            key = self._by_name[group_id, name] = Key(UNNUMBERED, group_id, name)
            key.has_ended = group_id in self._left
            self._of_group.setdefault(group_id, []).append(key)
        return key

    def of_group(self, group_id: bytes) -> Sequence[Key]:
        """The keys of one group."""
        return self._of_group.get(group_id, ())

    def leave(self, group_id: bytes) -> None:
        """This rank has left a group, of which nothing is in flight: the numbers of its names are free again."""
        for key in self.of_group(group_id):
            key.end()
            if self._owners.get(key.id) is key:
                del self._owners[key.id]
        self._left[group_id] = None
        if len(self._left) > MAX_LEFT:
            oldest = next(iter(self._left))
            del self._left[oldest]
            for key in self._of_group.pop(oldest, ()):
                del self._by_name[key.group_id, key.name]

    def used(self, group_id: bytes, name: str) -> Key:
        """The key of this name, which is about to be used and owns its number.

        Raises:
            LocalProtocolError: every number belongs to a key in flight.
        """
        key = self._by_name.get((group_id, name))
        if key is None:
            key = self.key(group_id, name)
        if self._owners.get(key.id) is not key:
            self._number(key)
        return key

    def _number(self, key: Key) -> None:
        """Give a key a number that no other in flight has. O(1), however often numbers were used again."""
        for number in range(self._next_id, self._next_id + MAX_ID):
            owner = self._owners.get(number % MAX_ID)
            if owner is None or not (owner.live or owner.begun):
                if owner is not None:
                    self.version += 1
                key.id = number % MAX_ID
                self._owners[key.id] = key
                self._next_id = key.id + 1
                return
        raise LocalProtocolError(f"more than {MAX_ID} names in flight")

    def signature(self, signature: Signature) -> tuple[int, Signature]:
        """The number of a signature, and the one value that stands for all that are equal to it."""
        # The very object that stands for it is known by its address: 0.1 µs, where hashing a signature takes 0.5.
        known = self._by_identity.get(id(signature))
        if known is not None:
            return known
        known = self._signatures.get(signature)
        if known is None:
            number = self._next_signature
            self._next_signature = (number + 1) % MAX_SIGNATURES
            old = self._numbered.get(number)
            if old is not None:
                self.version += 1
                del self._signatures[old]
                del self._by_identity[id(old)]
            self._numbered[number] = signature
            known = self._signatures[signature] = self._by_identity[id(signature)] = (number, signature)
        return known

    def series(self, group: GroupView, key: Key, signature: Signature, program: Program, sizes: ItemSizes) -> Series:
        """What the uses of a key with this signature have in common, worked out at the first of them."""
        numbered = self.signature(signature)
        latest = known = key.series
        if known is not None and known.signature_id != numbered[0]:
            known = key.others.get(numbered[0]) if key.others else None
        if (
            known is None
            or known.key_id != key.id
            or known.signature is not numbered[1]
            or not (known.program is program or known.program == program)
            or not (known.sizes is sizes or known.sizes == sizes)
            or not (known.group is group or known.group.members == group.members)
        ):
            known = Series(group, key, numbered, program, sizes)
        if known is not latest and latest is not None and latest.signature_id != known.signature_id:
            if key.others is None:
                key.others = {}
            key.others[latest.signature_id] = latest
        key.series = known
        known.version = self.version
        return known

    def same(self, signature: AnySignature) -> AnySignature:
        """The value that stands for this signature, or itself if this rank has not used it (lately).

        Raises:
            TypeError: it is not made of plain values.
        """
        known = self._signatures.get(signature)
        return signature if known is None else known[1]
