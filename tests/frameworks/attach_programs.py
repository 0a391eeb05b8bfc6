"""Random training programs of an attached model, beside the same program in one process that has the whole batch.

    python -m tests.frameworks.attach_programs --count 2000 --seed 1

A program is a list of acts, drawn from a seed: backward passes, steps and skipped steps, all kinds of reads and writes
of parameters and gradients, saves, loads, copies, scalers, schedules. It is run by two or three ranks, whose speeds
differ, and by one process. The results of a program must have the same bits on all ranks, and equal those of one
process up to rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import pickle
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import kfcomm.torch
from kfcomm import testing
from kfcomm.adapt import GuardSteps
from kfcomm.errors import CollectiveAborted
from tests.frameworks.attach_models import OPTIMIZERS, WIDTH, Model, Settings

ROWS = 12
ALL_ROWS = slice(None)


class Program:
    """One run of a program: of a rank, or of one process without a communicator."""

    def __init__(self, settings: Settings, comm: Any) -> None:
        self.settings, self.comm = settings, comm
        rank = 0 if comm is None else comm.rank
        self.model = Model(1 + rank)
        self.optimizer = OPTIMIZERS[settings.optimizer](self.model)
        self.rows = ALL_ROWS if comm is None else slice(rank, None, settings.size)
        self.average: dict[str, Any] = {}
        self.optimizer.register_step_post_hook(lambda *_: self.averaged())  # older than what attach adds
        self.attached: Any = None
        if comm is not None:
            options = dict(settings.options)
            if settings.is_watched:
                options |= {"monitor": {"every": 1}, "batch_size": ROWS, "policies": [GuardSteps(warmup=1000)]}
            self.attached = kfcomm.torch.attach(self.model, self.optimizer, comm, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.7)
        self.saved: list[Any] = []
        self.seen: list[Any] = []
        """What the program has read, with copies."""
        self.kept: list[Any] = []
        """Gradients of an earlier step, without copies."""
        self.busy = random.Random(rank)
        self.chance = random.Random(0)

    def run(self) -> dict[str, Any]:
        """Run all acts."""
        for name, seed in self.settings.acts:
            if self.comm is not None:
                for _ in range(self.busy.choice([0, 0, 1, 20])):
                    torch.ones(60, 60).matmul(torch.ones(60, 60))
            self.chance = random.Random(seed)
            getattr(self, name)()
        return {}

    def found(self) -> dict[str, Any]:
        """Results after its end, from its state alone."""
        found = {f"model/{name}": one for name, one in self.model.state_dict().items()}
        found |= {f"buffer/{name}": one for name, one in self.model.named_buffers()}
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"state/{number}/{key}": one for key, one in state.items() if isinstance(one, torch.Tensor)}
        found |= {f"average/{name}": one for name, one in self.average.items()}
        found |= {f"seen/{number}": one for number, one in enumerate(self.seen)}
        for name, one in self.model.named_parameters():
            if one.grad is not None:
                found[f"gradient/{name}"] = one.grad
        found["count"] = torch.tensor(getattr(self.optimizer, "count", 0))
        return {name: one.detach().clone() for name, one in found.items()}

    # ---------------------------------------------------------------- parts

    def data(self, rows: slice = ALL_ROWS) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(self.chance.randrange(1 << 30))
        x, y = torch.randn(2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
        return x[self.rows], y[self.rows]

    def loss(self, hows: Sequence[bool | None] = (None, None, True, False)) -> Any:
        x, y = self.data()
        how = self.chance.choice(hows)
        return (self.model(x, branch=self.chance.random() < 0.5, how=how) - y).square().mean()

    def quiet(self) -> Any:
        return contextlib.nullcontext() if self.attached is None else self.attached.no_sync()

    def zero(self) -> None:
        match self.chance.randrange(4):
            case 0:
                self.optimizer.zero_grad()
            case 1:
                self.optimizer.zero_grad(set_to_none=False)
            case 2:
                self.model.zero_grad()
            case 3:
                for one in self.model.parameters():
                    one.grad = None

    def averaged(self) -> None:
        for name, one in self.model.named_parameters():
            before = self.average.get(name)
            self.average[name] = one.detach().clone() if before is None else torch.lerp(before, one.detach(), 0.3)

    def note(self, *tensors: Any) -> None:
        self.seen += [one.detach().clone() for one in tensors]

    def gradients(self) -> list[Any]:
        return [one.grad for one in self.model.parameters() if one.grad is not None]

    # ---------------------------------------------------------------- acts: gradients and steps

    def plain(self) -> None:
        self.zero()
        self.loss().backward()
        self.optimizer.step()

    def zeroed_after(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.zero()

    def accumulated(self) -> None:
        self.zero()
        count = self.chance.randint(2, 3)
        with self.quiet() if self.chance.random() < 0.5 else contextlib.nullcontext():
            for _ in range(count - 1):
                (self.loss() / count).backward()
        (self.loss() / count).backward()
        self.optimizer.step()

    def gathered(self) -> None:
        """In no_sync alone, and averaged by hand."""
        self.zero()
        with self.quiet():
            self.loss().backward()
            self.loss().backward()
        if self.attached is not None:
            self.attached.wait()
        self.optimizer.step()

    def over_the_step(self) -> None:
        """Gradients that no one zeroes add up."""
        self.loss().backward()
        self.optimizer.step()

    def retained(self) -> None:
        self.zero()
        loss = (self.model(self.data()[0]) ** 2).mean()
        loss.backward(retain_graph=True)
        loss.backward()
        self.optimizer.step()

    def discarded(self) -> None:
        self.zero()
        self.loss().backward()
        self.zero()
        self.loss().backward()
        self.optimizer.step()

    def skipped(self) -> None:
        self.zero()
        self.loss().backward()
        if self.chance.random() < 0.5:
            self.zero()

    def clipped(self) -> None:
        self.zero()
        self.loss().backward()
        if self.chance.random() < 0.5:
            self.note(nn.utils.clip_grad_norm_(self.model.parameters(), 0.1))
        else:
            nn.utils.clip_grad_value_(self.model.parameters(), 0.05)
        self.optimizer.step()

    def scaled(self) -> None:
        self.zero()
        loss = self.loss()
        if self.chance.random() < 0.3:  # on the first row of all, which is rank 0's
            loss = loss * (float("inf") if self.comm is None or self.comm.rank == 0 else 1.0)
        self.scaler.scale(loss).backward()
        if self.chance.random() < 0.5:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.seen.append(torch.tensor(self.scaler.get_scale()))

    def not_finite(self) -> None:
        self.zero()
        (self.loss() * (float("nan") if self.comm is None or self.comm.rank == 0 else 1.0)).backward()
        if all(bool(one.isfinite().all()) for one in self.gradients()):
            self.optimizer.step()
        self.zero()

    def penalty(self) -> None:
        self.zero()
        penalty = 0.01 * sum(one.square().sum() for one in self.model.parameters())
        (self.loss() + penalty).backward()
        self.optimizer.step()

    def by_hand(self) -> None:
        self.zero()
        self.loss().backward()
        with torch.no_grad():
            for one in self.model.parameters():
                if one.grad is not None:
                    one -= 0.01 * one.grad

    def put(self) -> None:
        """Gradients that autograd gives, and the program puts in their places."""
        self.zero()
        own = [one for one in self.model.parameters() if one.requires_grad]
        found = torch.autograd.grad(self.loss((None, False)), own, allow_unused=True)
        for one, gradient in zip(own, found, strict=True):
            one.grad = gradient
        if self.attached is not None:
            self.attached.wait()
        self.optimizer.step()

    def replaced(self) -> None:
        self.zero()
        self.loss().backward()
        for one in self.model.parameters():
            if one.grad is not None:
                one.grad = one.grad * 0.5
        self.optimizer.step()

    def closed(self) -> None:
        seed = self.chance.randrange(1 << 30)

        def closure() -> Any:
            self.chance = random.Random(seed)
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        self.note(self.optimizer.step(closure))

    def kept_gradients(self) -> None:
        """Of one step, in the next: torch makes new ones where they are set to None."""
        for one, gradient in self.kept:
            with torch.no_grad():
                one.sub_(gradient, alpha=0.01)
        self.optimizer.zero_grad()
        self.loss().backward()
        self.kept = [(one, one.grad) for one in self.model.parameters() if one.grad is not None]
        self.optimizer.zero_grad()

    def failed(self) -> None:
        """A pass that raises on one rank, or in one process, and is left out."""
        self.optimizer.zero_grad()
        x, y = self.data()
        raises = self.comm is None or self.comm.rank == self.chance.randrange(self.settings.size)
        hidden = self.model.first(x)
        if raises:
            hidden.register_hook(_raise)
        try:
            (self.model.last(hidden.tanh()) - y).square().mean().backward()
            self.attached.wait()  # of deferred updates
        except (RuntimeError, CollectiveAborted):
            self.optimizer.zero_grad()
            return
        raise AssertionError("the pass has not failed")

    # ---------------------------------------------------------------- acts: parameters

    def read(self) -> None:
        self.note(nn.utils.parameters_to_vector(self.model.parameters()), *(one.norm() for one in self.gradients()))

    def average_in(self) -> None:
        if self.average:
            with torch.no_grad():
                for name, one in self.model.named_parameters():
                    one.copy_(self.average[name])

    def written(self) -> None:
        own = list(self.model.parameters())
        with torch.no_grad():
            match self.chance.randrange(6):
                case 0:
                    self.model.first.weight.clamp_(-0.3, 0.3)
                case 1:
                    for one in own:
                        one.data.clamp_(-0.4, 0.4)
                case 2:
                    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(own) * 0.9, own)
                case 3:
                    torch._foreach_mul_(own, 0.95)
                case 4:
                    self.model.last.bias.data = self.model.last.bias.data * 0.5
                case 5:
                    numbers = self.model.first.weight.detach().numpy()
                    numbers.clip(-0.4, 0.4, out=numbers)

    def save(self) -> None:
        self.saved.append(copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict())))

    def load(self) -> None:
        if self.saved:
            model, optimizer = self.chance.choice(self.saved)
            self.model.load_state_dict(model)
            if self.chance.random() < 0.7:
                self.optimizer.load_state_dict(copy.deepcopy(optimizer))

    def copied(self) -> None:
        if self.chance.random() < 0.5:
            other = copy.deepcopy(self.model)
        else:
            other = pickle.loads(pickle.dumps(self.model))
        other(self.data()[0]).sum().backward()  # of a copy nothing is exchanged
        self.note(*other.parameters())

    def torch_saved(self) -> None:
        """On one rank alone; nothing of what is read is attached."""
        if self.comm is None or self.comm.rank == 0:
            file = io.BytesIO()
            torch.save(self.model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
            other(self.data()[0]).sum().backward()
            assert all(map(torch.equal, other.parameters(), self.model.parameters()))
            assert (
                copy.deepcopy(self.optimizer).state_dict()["state"].keys()
                == self.optimizer.state_dict()["state"].keys()
            )

    def evaluated(self) -> None:
        """On one rank alone."""
        if self.comm is None or self.comm.rank == 0:
            self.model.eval()
            with torch.inference_mode() if self.chance.random() < 0.5 else torch.no_grad():
                self.model(self.data()[0])
            self.model.train()

    def scheduled(self) -> None:
        self.scheduler.step()

    def frozen(self) -> None:
        self.model.second.requires_grad_(self.chance.random() < 0.5)


def _raise(_: Any) -> None:
    raise RuntimeError("out of memory")


def of_rank(settings: Settings, comm: Any) -> dict[str, Any]:
    """Results of a rank, read after it has left its communicator."""
    torch.set_num_threads(1)  # it is each thread's own
    with comm:
        program = Program(settings, comm)
        program.run()
    return program.found()


def difference(seed: int) -> str | None:
    """Difference from the expected results of a program; None without a difference."""
    settings = Settings.drawn(seed)
    alone = Program(settings, None)
    alone.run()
    wanted = alone.found()
    with testing.sync_world(settings.size) as comms:
        found = testing.run_threads(comms, lambda comm: of_rank(settings, comm))
    for rank, one in enumerate(found):
        if one.keys() != wanted.keys():
            return f"rank {rank} has other things: {sorted(one.keys() ^ wanted.keys())}"
        for name, value in one.items():
            if not torch.equal(_bits(value), _bits(found[0][name])):
                return f"{name} is not the same on ranks 0 and {rank}"
            if name.endswith("seen") or "seen" in name.split("/")[-1]:
                continue  # of rank 0's rows
            if not torch.allclose(_plain(value), _plain(wanted[name]), rtol=1e-6, atol=1e-9, equal_nan=True):
                return f"{name} is {value} on rank {rank}, and {wanted[name]} in one process"
    return None


def _bits(x: Any) -> Any:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _plain(x: Any) -> Any:
    """In double precision; what is not finite is all the same: the sum of parts may be another infinity."""
    return x.double().where(x.isfinite(), float("nan"))


def main() -> int:
    """Run many; the first that is wrong ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--go-on", action="store_true", help="past programs that are wrong")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        try:
            said = difference(seed)
        except Exception as error:  # noqa: BLE001  it is what is looked for
            said = f"{type(error).__name__}: {error}"
        if said is not None:
            wrong += 1
            print(f"seed {seed}: {said[:600]}\n  {Settings.drawn(seed)}", flush=True)
            if not arguments.go_on:
                return 1
        elif seed % 100 == 99:
            print(f"{seed + 1 - arguments.seed} programs, {wrong} wrong", flush=True)
    print(f"{arguments.count} programs from seed {arguments.seed}: {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
