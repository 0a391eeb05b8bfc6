"""Errors that kfcomm raises.

::

    KfcommError
    ├── ConfigError              a setting or argument that cannot work (also a ValueError)
    ├── RendezvousError          the peers could not find each other, or refused each other
    ├── SessionClosed            the communicator is closed, or belongs to another process (after fork)
    ├── WouldDeadlock            a blocking call on the thread that has to complete it (also a RuntimeError)
    ├── CollectiveError          one collective failed; the communicator stays usable
    │   ├── CollectiveMismatch   ranks disagree on verb, op, root, dtype, shape or another property
    │   ├── CollectiveTimeout    it did not finish in time (also a TimeoutError)
    │   ├── CollectiveAborted    another rank cancelled it or failed its local checks
    │   ├── PeerLost             a participating rank has ended or is unreachable (also a ConnectionError)
    │   ├── EpochChanged         the membership changed while it was under way
    │   └── Partitioned          too few ranks are reachable to continue; the others may be alive
    ├── StepVoid                 a guarded step is void on all ranks; ends the block of the step
    ├── GuardFailed              too many guarded steps were void
    ├── TransportError           a link could not be opened, or broke (also a ConnectionError)
    ├── ProtocolError
    │   ├── LocalProtocolError   this side would break the protocol: a misuse of the core
    │   └── RemoteProtocolError  the peer broke the protocol; its connection is closed
    └── InternalError            a defect of kfcomm; lists the last events of the key
"""

from __future__ import annotations

from collections.abc import Sequence


class KfcommError(Exception):
    """Base of all errors of this package."""


class ConfigError(KfcommError, ValueError):
    """An invalid setting or argument; the message names it and the valid values."""


class RendezvousError(KfcommError):
    """The peers of the job did not find or accept each other.

    Attributes:
        rank: the rank that ended before the world was complete; None if it failed for another reason.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class SessionClosed(KfcommError):
    """The communicator is closed, or was inherited through a fork."""


class WouldDeadlock(KfcommError, RuntimeError):
    """A blocking call of ``kfcomm.sync`` on the I/O thread, which has to complete it. The call was not begun."""


class CollectiveError(KfcommError):
    """One collective failed. ``key`` is its name; the communicator stays usable."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(message)
        self.key = key


class CollectiveMismatch(CollectiveError):
    """The ranks disagree on verb, op, root, dtype, shape or another property; the message shows both sides."""


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
    """A participating rank has ended or is unreachable. ``rank`` is its rank in the world."""

    def __init__(self, message: str, *, key: str = "", rank: int = -1) -> None:
        super().__init__(message, key=key)
        self.rank = rank


class EpochChanged(CollectiveError):
    """The epoch of the collective is over.

    Attributes:
        epoch: number of the next epoch.
        members: the ranks that continue, by their former numbers, in the order of their ranks in the next epoch.
    """

    def __init__(self, message: str, *, key: str = "", epoch: int = 0, members: Sequence[int] = ()) -> None:
        super().__init__(message, key=key)
        self.epoch = epoch
        self.members = tuple(members)


class Partitioned(CollectiveError):
    """Too few ranks are reachable to continue. The others may be alive, and continue without these.

    Attributes:
        members: the ranks on this side.
    """

    def __init__(self, message: str, *, key: str = "", members: Sequence[int] = ()) -> None:
        super().__init__(message, key=key)
        self.members = tuple(members)


class StepVoid(KfcommError):
    """A guarded step is void on all ranks: this ends the block of the step, and the program continues."""


class GuardFailed(KfcommError):
    """Too many guarded steps were void, on all ranks: the model or the data may be damaged."""


class TransportError(KfcommError, ConnectionError):
    """A link could not be opened, or broke."""


class ProtocolError(KfcommError):
    """The protocol between peers was broken."""


class LocalProtocolError(ProtocolError):
    """An invalid call of the core on this side."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol; only its connection is closed."""


class InternalError(KfcommError):
    """A defect of kfcomm. ``story`` lists the last events of the key."""

    def __init__(self, message: str, *, story: Sequence[str] = ()) -> None:
        super().__init__(message if not story else message + "\n  " + "\n  ".join(story))
        self.story = tuple(story)
