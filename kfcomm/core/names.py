"""Names of one rank: the keys it has met, and the small numbers of keys and signatures on links.

Invariants: no two keys in flight have the same number, so an answer about a number is about one key. Numbers are
reused; both ends of a link remember the meaning of a number, so it can change at any time. Keys (about 1 KiB each) are
not forgotten while their group is used, since their sequence numbers count their uses. Those of groups that this rank
has left stay for a while, so that late peers can ask what was posted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kfcomm.core.collective import MAX_LEFT, AnySignature, GroupView, ItemSizes, Key, Series
from kfcomm.core.frame import MAX_ID
from kfcomm.core.program import Program
from kfcomm.core.signature import Signature
from kfcomm.errors import LocalProtocolError

MAX_SIGNATURES = 1 << 12
"""Signatures are numbered below this. A new one takes the number of the oldest, so memory stays bounded."""

UNNUMBERED = -1


class Names:
    """Names of one rank in one epoch."""

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
        self.version = 0  # changes whenever a number gets another meaning

    def __iter__(self) -> Iterator[Key]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, group_id: bytes, name: str) -> Key | None:
        """Return the key of this name, if it was met before. Safe on any thread."""
        return self._by_name.get((group_id, name))

    def key(self, group_id: bytes, name: str) -> Key:
        """Return the key of this name, made when it is first met."""
        key = self._by_name.get((group_id, name))
        if key is None:
            key = self._by_name[group_id, name] = Key(UNNUMBERED, group_id, name)
            key.has_ended = group_id in self._left
            self._of_group.setdefault(group_id, []).append(key)
        return key

    def renew(self) -> None:
        """Make every name take its full path once, whatever was prepared for its next use."""
        self.version += 1

    def of_group(self, group_id: bytes) -> Sequence[Key]:
        """Return the keys of one group."""
        return self._of_group.get(group_id, ())

    def leave(self, group_id: bytes) -> None:
        """Free the numbers of the names of a group that this rank has left with nothing in flight."""
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
        """Return the key of a name that is about to be used; it owns its number."""
        key = self._by_name.get((group_id, name))
        if key is None:
            key = self.key(group_id, name)
        if self._owners.get(key.id) is not key:
            self._number(key)
        return key

    def _number(self, key: Key) -> None:
        """Give a key a number that no other in flight has. Amortized O(1)."""
        for number in range(self._next_id, self._next_id + MAX_ID):
            owner = self._owners.get(number % MAX_ID)
            # A key in flight keeps its number: a late POSTED about it must not be taken for another key's.
            if owner is None or not (owner.live or owner.begun):
                if owner is not None:
                    self.version += 1
                key.id = number % MAX_ID
                self._owners[key.id] = key
                self._next_id = key.id + 1
                return
        raise LocalProtocolError(f"more than {MAX_ID} names in flight")

    def signature(self, signature: Signature) -> tuple[int, Signature]:
        """Return the number of a signature, and the one value that represents all equal ones."""
        # The representative is found by its address: 0.1 µs, where hashing a signature takes 0.5.
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
        """Return the common record of the uses of a key with this signature, made at the first use."""
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
        """Return the representative of this signature, or itself if this rank has not used it (lately)."""
        # Chunks are then compared by identity. A peer's value may be unhashable: the TypeError is for the caller.
        known = self._signatures.get(signature)
        return signature if known is None else known[1]
