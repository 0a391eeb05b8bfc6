"""Every error that kfcomm raises on purpose.

::

    KfcommError
    ├── ConfigError              a setting or argument that cannot work (also a ValueError)
    ├── RendezvousError          the peers could not find each other, or refused each other
    ├── SessionClosed            the communicator is closed, or belongs to another process (after fork)
    ├── WouldDeadlock            a blocking call on the thread that would have to end it (also a RuntimeError)
    ├── CollectiveError          one collective failed; the communicator stays usable
    │   ├── CollectiveMismatch   ranks disagree on what the collective is
    │   ├── CollectiveTimeout    it did not finish in time (also a TimeoutError)
    │   ├── CollectiveAborted    another rank cancelled it or failed its local checks
    │   ├── PeerLost             a rank that takes part is gone (also a ConnectionError)
    │   └── EpochChanged         the membership changed under it
    ├── StepVoid                 a guarded step counts for nothing on any rank; ends the block of the step
    ├── GuardFailed              guarded steps have found no good step for long
    ├── TransportError           a link could not be opened, or broke (also a ConnectionError)
    ├── ProtocolError
    │   ├── LocalProtocolError   this side was about to break the protocol: a misuse of the core
    │   └── RemoteProtocolError  the other side broke it: never trusted, that connection is closed
    └── InternalError            a defect of kfcomm; carries the story of the key
"""

from __future__ import annotations

from collections.abc import Sequence


class KfcommError(Exception):
    """Base of all errors of this package."""


class ConfigError(KfcommError, ValueError):
    """A setting or an argument that cannot work; the message names it and what would."""


class RendezvousError(KfcommError):
    """The peers of the job could not find, or did not accept, each other.

    Attributes:
        rank: the rank that ended before the world was complete; None if it failed for another reason.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class SessionClosed(KfcommError):
    """The communicator is closed, or was inherited through a fork."""


class WouldDeadlock(KfcommError, RuntimeError):
    """A blocking call of ``kfcomm.sync`` on the I/O thread, which would have to end it. Nothing was begun."""


class CollectiveError(KfcommError):
    """One collective failed. ``key`` is its name; the communicator stays usable."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class CollectiveMismatch(CollectiveError):
    """The ranks do not agree on what the collective is; the message shows both sides."""


class CollectiveTimeout(CollectiveError, TimeoutError):
    """A collective did not finish in time.

    Attributes:
        arrived: ranks of the group known to have posted the collective.
        missing: ranks not known to have posted it.
    """

    def __init__(
        self, message: str, *, key: str = "", arrived: Sequence[int] = (), missing: Sequence[int] = ()
    ) -> None:
        super().__init__(message, key=key)
        self.arrived = tuple(arrived)
        self.missing = tuple(missing)


class CollectiveAborted(CollectiveError):
    """Another rank cancelled the collective, or refused it before it began there."""


class PeerLost(CollectiveError, ConnectionError):
    """A rank that takes part is gone. ``rank`` is its rank in the world."""

    def __init__(self, message: str, *, key: str = "", rank: int = -1) -> None:
        super().__init__(message, key=key)
        self.rank = rank


class EpochChanged(CollectiveError):
    """The epoch of the collective is over.

    Attributes:
        epoch: the one that follows.
        members: the ranks that go on, by the numbers that they had; in this order they are the ranks of the next epoch.
    """

    def __init__(self, message: str, *, key: str = "", epoch: int = 0, members: Sequence[int] = ()) -> None:
        super().__init__(message, key=key)
        self.epoch = epoch
        self.members = tuple(members)


class Partitioned(CollectiveError):
    """Too few ranks can be reached to go on, and the others may live: they go on, not these.

    Attributes:
        members: the ranks on this side.
    """

    def __init__(self, message: str, *, key: str = "", members: Sequence[int] = ()) -> None:
        super().__init__(message, key=key)
        self.members = tuple(members)


class StepVoid(KfcommError):
    """A guarded step counts for nothing, on any rank: it ends the block of the step, and the program goes on."""


class GuardFailed(KfcommError):
    """Guarded steps have found no good step for long: the model may be damaged, or the data. On all ranks."""


class TransportError(KfcommError, ConnectionError):
    """A link could not be opened, or broke."""


class ProtocolError(KfcommError):
    """The protocol between peers was broken."""


class LocalProtocolError(ProtocolError):
    """This side called the core in a way that it does not allow."""


class RemoteProtocolError(ProtocolError):
    """The other side sent what it must not; only its connection is closed."""


class InternalError(KfcommError):
    """A defect of kfcomm. ``story`` holds the last events of the key concerned."""

    def __init__(self, message: str, *, story: Sequence[str] = ()) -> None:
        super().__init__(message if not story else message + "\n  " + "\n  ".join(story))
        self.story = tuple(story)
