"""Failures of single calls: who hears of them, and what is taken back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from kfcomm.core.cause import Cause, CauseKind, error_of
from kfcomm.core.collective import Collective, GroupView, Post
from kfcomm.core.links import Incoming
from kfcomm.core.machine import Effects

if TYPE_CHECKING:
    from kfcomm.engine.engine import Engine
    from kfcomm.engine.operation import Operation

logger = logging.getLogger("kfcomm")


class CallFailures:
    """Ends the calls of an engine that have failed, and the links on which peers broke the protocol."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def broke(self, collective: Collective | None, error: Exception) -> None:
        """Fail a collective everywhere after an error in its own work; called while the error is handled."""
        if collective is None:
            raise error
        rank = self._engine.rank
        logger.error("rank %d could not carry out %s", rank, collective.title, exc_info=error)
        self._engine.abort(
            collective, Cause(CauseKind.INTERNAL, rank, f"{type(error).__name__} on rank {rank}: {error}")
        )

    def aborted_elsewhere(self, group_id: bytes, name: str, seq: int, cause: Cause) -> None:
        """Fail a collective that another rank has aborted."""
        effects: Effects = []
        self._engine.router.on_abort(group_id, name, seq, cause, effects)
        self._engine.perform(effects)

    def rejected(self, operation: Operation, post: Post, cause: Cause) -> None:
        """End a call that was refused when it was posted."""
        engine, group, name = self._engine, post.group, post.name
        for observer in engine.all_observers():
            observer.refused(group, name, cause.message, is_local=False)
        operation.reject(error_of(cause, name, group.titled(name)))
        self._tell_mismatch(group, name, engine.router.num_uses(group.id, name) - 1, cause)

    def failed(self, collective: Collective, cause: Cause) -> None:
        """End a call in flight: reject it, and take back what links hold of it."""
        engine, operation = self._engine, cast("Operation", collective.driver)
        engine.deadlines.inquiries.pop(operation, None)
        is_last = not (engine.router.live or engine.slots.pending)
        for observer in engine.all_observers():
            observer.failed(operation, cause.message, is_last=is_last)
        for sender in engine.links.by_peer.values():
            for header in sender.withdraw(operation):
                if header[7] & 1:  # it was charged to the credit, and never leaves
                    sender.state.window.give(collective.nbytes_sent(header[4], header[6], header[5]), 1)
        engine.links.disown(operation)
        story = engine.recorder.story(collective.name) if cause.kind is CauseKind.INTERNAL else ()
        operation.reject(error_of(cause, collective.name, collective.title, story))
        del collective.driver  # as at completion: one that has failed is in no cycle
        self._tell_mismatch(collective.group, collective.name, collective.seq, cause)

    def violated(self, incoming: Incoming, reason: str) -> None:
        """Close a link on which a peer sent what it must not."""
        engine = self._engine
        link = engine.links.back(incoming)
        if link is not None:
            logger.warning("rank %d closes a link from rank %d, which sent %s", engine.rank, link.peer, reason)
            link.abort()
            engine.recovery.incoming_broke(incoming, f"rank {link.peer} sent {reason}")

    def _tell_mismatch(self, group: GroupView, name: str, seq: int, cause: Cause) -> None:
        listener = self._engine.mismatch_listeners.get(group.id)
        if listener is not None and cause.kind is CauseKind.MISMATCH:
            listener(name, seq)
