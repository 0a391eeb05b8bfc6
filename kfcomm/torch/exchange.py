"""Exchange of the gradients of one backward pass: full buckets are sent during the pass, all others at its end.

With the last bucket each rank sends a word: a checksum of its optimizer's steps and their options, or a mark that its
backward pass has raised an error. So a rank that has skipped a step or a part of a pass causes an error on all ranks.
Without the word the replicas would silently differ.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kfcomm.common.sizes import ranks_in_words
from kfcomm.engine.meter import StepTally
from kfcomm.errors import CollectiveAborted, CollectiveError, CollectiveMismatch, ConfigError, KfcommError
from kfcomm.torch.buckets import Bucket, BucketPlace
from kfcomm.torch.marks import GradientMarks
from kfcomm.torch.reductions import aside, world_ranks
from kfcomm.torch.state import Buffers
from kfcomm.torch.watch import GradientWatch

if TYPE_CHECKING:
    import torch

    from kfcomm.sync import Communicator

FAILED = (1 << 32) - 1
"""The word of a rank whose backward pass has raised."""


class StepCount:
    """Steps that an optimizer has made, as a word that ranks compare."""

    def __init__(self) -> None:
        self.count = 0
        self.text = ""  # options of the groups at the latest step

    def made(self, optimizer: torch.optim.Optimizer) -> None:
        """Count one more step, with the options that the groups have now."""
        self.count += 1
        self.text = "; ".join(
            ", ".join(f"{name}={_number(value)}" for name, value in sorted(group.items()) if name != "params")
            for group in optimizer.param_groups
        )

    def word(self) -> int:
        """The word, which is never ``FAILED``."""
        return zlib.crc32(str(self).encode()) % FAILED

    def __str__(self) -> str:
        return f"{self.count} steps, the latest with {self.text}" if self.text else f"{self.count} steps"


class GradientExchange:
    """Exchange of all gradients of a model, once per pass."""

    is_left_out = False  # a step is made on all ranks, or on none

    def __init__(
        self, comm: Communicator, name: str, buckets: Sequence[Bucket], model: torch.nn.Module,
        watch: GradientWatch | None = None,
    ) -> None:  # fmt: skip
        self.buckets = buckets
        self.places: list[BucketPlace] = [place for bucket in buckets for place in bucket.places]
        self.has_left = False  # all gradients of a pass were sent, and the wait for them is not complete
        self.urgency: Mapping[Bucket, int] = {}  # of a bucket's collective, once known
        self.steps = StepCount()
        self._comm = comm
        self.name = name  # of the collectives
        self._watch = watch or GradientWatch(())
        self._buffers = Buffers(model, comm, aside(comm, f"{name}/buffers"))
        self._is_held = False
        """Whether all gradients wait for the end: they come in passes within passes, which may add to them later."""

        self.renew()

    def renew(self) -> None:
        """Exchange with the ranks that the communicator has now; nothing is under way."""
        self._marks = GradientMarks(
            self._comm, self.places, f"{self.name}/marks", num_numbers=self._watch.num_numbers,
            is_local=self.buckets[0].is_local,
        )  # fmt: skip
        self._parts: list[Bucket | GradientMarks | Buffers] = [*self.buckets, self._marks, self._buffers]
        self.profile = GradientProfile(self._comm, self.name)

    @property
    def means(self) -> Sequence[BucketPlace]:
        """Gradients that are averaged, and so the same on all ranks."""
        return self.places

    # ---------------------------------------------------------------- to leave

    def came(self, bucket: Bucket, place: BucketPlace, *, is_inner: bool) -> None:
        """Take a gradient of a backward pass, and send its bucket if it is full."""
        self._is_held = self._is_held or is_inner
        if bucket.is_begun:
            raise ConfigError(
                f"the gradient of {place.name} has come after it had left: the parameter is used inside and outside "
                "of a checkpoint that is re-entrant; give that use_reentrant=False"
            )
        self.profile.came()
        if bucket.came(place) and not self._is_held:
            self._begin(bucket)

    def leave(self, *, has_failed: bool = False) -> None:
        """Send the remaining gradients: ``parameter.grad`` of this rank, or zeros."""
        self.has_left = True
        self._buffers.begin(is_wanted=not has_failed)
        # The program may have set a gradient to None since, or assigned one: the marks tell what is there now.
        for place in self.places:
            place.has_come = (place.has_come or place.is_foreign) and place.parameter.grad is not None
        for bucket in self.buckets:
            if not bucket.is_begun:
                bucket.prepare()
                self._begin(bucket)
        # Last, since the contributions of this rank are final only now.
        row = self._watch.row()
        self._marks.begin(FAILED if has_failed else self.steps.word(), row)

    def _begin(self, bucket: Bucket) -> None:
        if self._watch.guards:
            bucket.average.keep()
        bucket.begin(self.urgency.get(bucket, 0), self._watch.left)
        self.profile.began(bucket)

    # ---------------------------------------------------------------- to be there

    def is_there(self, bucket: Bucket) -> bool:
        """Whether a bucket and the marks have arrived."""
        return bucket.done() and self._marks.done()

    def wait_for(self, bucket: Bucket) -> list[BucketPlace]:
        """Wait for the average of a bucket; the places for which any rank had a gradient."""
        # The marks first: they tell whether the pass has failed on a rank, before any average of it is used.
        self.wait_for_marks()
        self._wait(bucket)
        self._watch.arrived(bucket)
        return [place for place in bucket.places if place.is_used]

    def settle(self) -> None:
        """Wait for all averages. Then ``parameter.grad`` is the average on all ranks, if any rank had a gradient."""
        # If one has failed, no rank keeps gradients: some would have averages and others their own.
        try:
            for bucket in self.buckets:
                for place in self.wait_for(bucket):
                    place.show()
            self._buffers.wait()
        except BaseException:
            self.clear()
            raise
        self.close()

    def wait_for_buffers(self, *, and_marks: bool) -> None:
        """Wait until the buffers are rank 0's; with ``and_marks`` also until it is known which gradients there are."""
        try:
            self._buffers.wait()
            if and_marks:
                self.wait_for_marks()
        except BaseException:
            self.clear()
            raise

    def wait_for_marks(self) -> None:
        """Wait until it is known which gradients there are, and the rows of all ranks."""
        self._wait(self._marks)
        self._check()
        self._watch.told(self._comm.size, self._marks.ranks, self._marks.numbers)

    def wait_for_rows(self) -> None:
        """Wait for the rows of all ranks, if a pass is under way; averages may come later."""
        if self.has_left:
            self.wait_for_buffers(and_marks=True)

    def _wait(self, one: Bucket | GradientMarks) -> None:
        if one.done():
            one.wait()
            return
        with self.profile.waiting(one.name):
            one.wait()

    def close(self) -> None:
        """End the pass: everything was applied, or has failed."""
        self.has_left = False
        for bucket in self.buckets:
            bucket.reset()

    # ---------------------------------------------------------------- what goes wrong

    def fail(self) -> None:
        """Notify the others that the backward pass of this rank has raised, so that they do not wait for it."""
        for place in self.places:
            place.parameter.grad = None
        if not self.has_left:
            # a communicator that is closed, or has lost a rank, raises that in the next call of the program
            with contextlib.suppress(KfcommError):
                self.leave(has_failed=True)

    def clear(self) -> None:
        """Cancel the pass, and drop its gradients."""
        for one in self._parts:
            if not one.done():
                one.cancel()
        for place in self.places:
            place.parameter.grad = None
        self.close()

    def put_back(self) -> None:
        """Make the state of compressors what it was before the passes of a step."""
        for bucket in self.buckets:
            bucket.average.put_back()

    def begin_step(self) -> None:
        """Note that the step of the latest passes was made."""
        for bucket in self.buckets:
            bucket.average.forget()

    def drain(self) -> None:
        """Wait for the remains of a pass that has raised on this rank, whose error the program has."""
        if self.has_left:
            _wait_for(self._parts)
            self.close()

    def _check(self) -> None:
        words, world = self._marks.words, world_ranks(self._comm)
        members = [world[rank] for rank in self._marks.ranks]
        failed = [rank for rank, word in zip(members, words, strict=True) if word == FAILED]
        # All ranks read the same words, so all come here. They wait for the rest: the next pass reuses its memory.
        if failed:
            _wait_for(self._parts)
            raise CollectiveAborted(
                f"the backward pass of {ranks_in_words(failed)} has raised an error, shown there: no rank has "
                "gradients of this pass, and all ranks may continue with the next one",
                key=self.name,
            )
        if len(set(words)) > 1:
            _wait_for(self._parts)
            # of fewer ranks, after another loss
            said = self._comm.all_gather_object(str(self.steps), aside(self._comm, f"{self.name}/steps"))
            raise CollectiveMismatch(
                f"the optimizers of the ranks that attach {self.name!r} differ: "
                + "; ".join(f"{ranks_in_words([world])}: {one}" for world, one in zip(members, said, strict=False))
                + ". Replicas would differ: whether a step is made, and its learning rate, are to depend on what is "
                "the same on all ranks, such as a loss averaged by comm.all_reduce",
                key=self.name,
            )


def _wait_for(parts: Sequence[Bucket | GradientMarks | Buffers]) -> None:
    """Wait for the parts of a pass, failed ones included."""
    for one in parts:
        with contextlib.suppress(CollectiveError):
            one.wait()


def _number(value: Any) -> Any:
    """Value of an option of a group; for a tensor, its contents."""
    return value.tolist() if hasattr(value, "tolist") else value


NS = 1e-9


class GradientProfile:
    """Communication times of one attached model, for ``kfcomm.monitor.StepStatistics`` and the timeline."""

    def __init__(self, comm: Communicator, name: str) -> None:
        self._engine = comm._session.engine
        self._tally = StepTally()
        meter = self._engine.meter
        if meter is not None:
            meter.steps[comm._inner._group.view.id, name] = self._tally
        self._under_way: deque[Bucket] = deque()
        self._since_ns = self._first_ns = 0

    def came(self) -> None:
        """Note a gradient; the first begins a backward pass."""
        self._first_ns = self._first_ns or time.monotonic_ns()

    def began(self, bucket: Bucket) -> None:
        """Note a bucket that was sent."""
        self.look()
        if not self._under_way:
            self._since_ns = time.monotonic_ns()
        self._under_way.append(bucket)
        self._tally.nbytes += bucket.nbytes

    def look(self) -> None:
        """Note buckets that have arrived."""
        # Late: the oldest one under way is looked at when another is sent. A callback for each would cost more.
        if not self._under_way:
            return
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
        if not self._under_way:
            self._tally.in_flight_s += (time.monotonic_ns() - self._since_ns) * NS

    @contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Record the block as time in which the program waits for the collective of this name."""
        begun_ns = time.monotonic_ns()
        try:
            yield
        finally:
            ended_ns = time.monotonic_ns()
            taken_s = (ended_ns - begun_ns) * NS
            tally = self._tally
            tally.waited_s += taken_s
            tally.waited_for[name] = tally.waited_for.get(name, 0.0) + taken_s
            self._tell(f"waiting for {name}", begun_ns, ended_ns)
            self.look()

    def stepped(self) -> None:
        """Note a step of the optimizer."""
        self._tally.count += 1
        if self._first_ns:
            self._tell("backward", self._first_ns, time.monotonic_ns())
            self._first_ns = 0

    def _tell(self, name: str, since_ns: int, until_ns: int) -> None:
        for observer in self._engine.observers or ():
            observer.span(name, since_ns, until_ns)
