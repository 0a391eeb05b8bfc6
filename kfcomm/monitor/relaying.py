"""Questions of an observer for ranks of other hosts, which a rank of its host passes on; imported by the first one.

The observer's process asks for several ranks at once, ``>``, the question, and the ranks; it gets what each of them
says as it comes, and the end of the connection::

    answer ::= head newline body          for each rank
    head   ::= {"rank", "epoch", "process", "gone", "nbytes"}     in JSON; ``nbytes`` of the body

``process`` is the number of a rank's process in its job, in which ranks are numbered anew when their number changes.
"""

from __future__ import annotations

import json
import socket
from array import array
from collections.abc import Sequence
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from kfcomm.common.sockets import ask
from kfcomm.monitor.live import Question
from kfcomm.monitor.serving import PATIENCE_S, RELAY

if TYPE_CHECKING:
    from kfcomm.engine.session import Session

MAX_AT_ONCE = 8
"""Ranks of one request: so many answers are in the memory of the rank that passes them on, 2 MB each with 10,000
names."""
LOOK_AGAIN_S = 0.1
"""Between two looks whether the observer, or this rank, has gone."""


class Relayed(NamedTuple):
    """A rank of another host.

    Attributes:
        process: number in the job.
        is_gone: whether it is lost, or has left.
        answer: decoded; None if it does not answer.
    """

    epoch: int
    process: int
    is_gone: bool
    answer: Any


def pass_on(sock: socket.socket, session: Session) -> None:
    """Ask ranks for the observer at the other end, and send what they say. Raises `OSError`: it has gone."""
    request = sock.recv(1 + 4 * MAX_AT_ONCE)
    question, asked = request[:1], array("i", request[1 : len(request) // 4 * 4 + 1])
    ranks = [rank for rank in asked if 0 <= rank < session.layout.size]
    control = session.engine.control
    if control is None:  # a world of one
        return
    told: SimpleQueue[tuple[int, bytes | None]] = SimpleQueue()
    for rank in ranks:
        control.observe(rank, question, partial(_note, told, rank))
    left, until_s = set(ranks), monotonic() + PATIENCE_S
    while left and monotonic() < until_s:
        try:
            rank, answer = told.get(timeout=LOOK_AGAIN_S)
        except Empty:
            if _has_hung_up(sock):
                return
            continue
        left.discard(rank)
        body = answer or b""
        head = {
            "rank": rank, "epoch": session.epoch, "process": session.network.births[rank], "gone": answer is None,
            "nbytes": len(body),
        }  # fmt: skip
        sock.sendall(json.dumps(head).encode() + b"\n" + body)


def _note(told: SimpleQueue[tuple[int, bytes | None]], rank: int, answer: bytes | None) -> None:
    told.put((rank, answer))


def _has_hung_up(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def relayed(name: str, ranks: Sequence[int], question: Question) -> dict[int, Relayed]:
    """Answers of ranks of other hosts, asked by way of the rank that listens at ``name``.

    Without ranks that cannot be asked: the job's version of kfcomm cannot, or the one at ``name`` does not answer.
    Takes ``PATIENCE_S`` for every `MAX_AT_ONCE` at most.
    """
    found: dict[int, Relayed] = {}
    for first in range(0, len(ranks), MAX_AT_ONCE):
        request = RELAY + question.value + array("i", ranks[first : first + MAX_AT_ONCE]).tobytes()
        try:
            found |= _parsed(ask(name, request, PATIENCE_S) or b"")
        except (OSError, ValueError, KeyError, TypeError):
            break
    return found


def _parsed(answer: bytes) -> dict[int, Relayed]:
    found: dict[int, Relayed] = {}
    at = 0
    while at < len(answer):
        end = answer.index(b"\n", at)
        head: dict[str, Any] = json.loads(answer[at:end])
        at = end + 1 + head["nbytes"]
        body = answer[end + 1 : at]
        if body != b"null":  # what a rank says that has monitoring off
            found[head["rank"]] = Relayed(head["epoch"], head["process"], head["gone"], json.loads(body or b"null"))
    return found
