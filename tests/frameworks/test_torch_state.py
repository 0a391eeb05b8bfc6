"""Parameters, optimizers and objects that become the same on all ranks."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

import kfcomm.torch
from kfcomm.errors import CollectiveAborted, CollectiveError, ConfigError
from kfcomm.torch import state
from tests.frameworks.ranks import each

torch = pytest.importorskip("torch")

nn = torch.nn

SIZE = 3


class Model(nn.Module):
    """Parameters of two dtypes, one of them shared and one transposed; buffers, and a value that is not a tensor."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3, bias=False, dtype=torch.bfloat16)
        self.tied = self.first
        self.norm = nn.BatchNorm1d(3)
        self.turned = nn.Parameter(torch.ones(4, 2).T)
        self.empty = nn.Parameter(torch.ones(0, 2))
        for one in (*self.parameters(), *self.buffers()):
            one.data.fill_(value)

    def get_extra_state(self) -> dict[str, int]:
        return {"no": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


@pytest.mark.parametrize("named", ["state_dict", "named_parameters"])
def test_parameters_become_those_of_the_root(named: str) -> None:
    def rank(comm: Any) -> Any:
        model = Model(comm.rank + 1)
        places = [one.data_ptr() for one in model.parameters()]
        kfcomm.torch.broadcast_parameters(getattr(model, named)(), comm, root=1)
        assert [one.data_ptr() for one in model.parameters()] == places
        assert all(one.requires_grad for one in model.parameters())
        return model

    for number, model in enumerate(each(rank, SIZE)):
        assert all((one == 2).all() for one in model.parameters())
        values = {float(one.double().mean()) for one in model.buffers()}
        assert values == ({2.0} if named == "state_dict" else {number + 1.0})


def test_ranks_that_give_other_tensors_are_told() -> None:
    def rank(comm: Any) -> None:
        tensors = {"a": torch.ones(2), "b" if comm.rank else "c": torch.ones(2)}
        with pytest.raises(
            ConfigError, match=r"'parameters' is not the same on all ranks: . is not there on rank 0, and"
        ):
            kfcomm.torch.broadcast_parameters(tensors, comm)
        kfcomm.torch.broadcast_parameters({}, comm)

    each(rank, SIZE)


def test_an_optimizer_becomes_that_of_the_root() -> None:
    def rank(comm: Any) -> Any:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (comm.rank + 1), betas=(0.5, 0.6))
        if comm.rank == 0:  # the others have no state yet
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        kfcomm.torch.broadcast_optimizer_state(optimizer, comm)
        return optimizer.state_dict()

    first, *others = each(rank, SIZE)
    assert first["param_groups"][0]["betas"] == (0.5, 0.6)
    for other in others:
        assert other["param_groups"] == first["param_groups"]
        for place, own in first["state"].items():
            assert all(torch.equal(one, other["state"][place][name]) for name, one in own.items())


VALUES = [
    None, 7, -0.5, "text", b"bytes", [1, [2]], (1, (2, [3])), {"a": {1: (2,)}, 3: []}, True,
    torch.arange(6).reshape(2, 3).T, torch.tensor(2.5, dtype=torch.bfloat16), torch.zeros(0, 4),
    {"x": (torch.ones(2),)},
]  # fmt: skip


def test_objects() -> None:
    def rank(comm: Any) -> tuple[Any, Any]:
        return (
            kfcomm.torch.broadcast_object(VALUES if comm.rank == 2 else object(), comm, 2),
            kfcomm.torch.all_gather_object((comm.rank, torch.full((2,), comm.rank)), comm),
        )

    def same(one: Any, other: Any) -> bool:
        if isinstance(other, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        if isinstance(other, (list, tuple)):
            return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
        if isinstance(other, dict):
            return one.keys() == other.keys() and all(same(one[key], other[key]) for key in other)
        return type(one) is type(other) and one == other

    for sent, gathered in each(rank, SIZE):
        assert same(sent, VALUES)
        assert same(gathered, [(number, torch.full((2,), number)) for number in range(SIZE)])


def test_unsupported_values_are_refused() -> None:
    def rank(comm: Any) -> None:
        for value in ({1, 2}, (torch.ones(2), object()), [torch.zeros(2, device="meta")]):
            with pytest.raises(ConfigError if comm.rank == 1 else CollectiveAborted, match="msgpack cannot carry"):
                kfcomm.torch.broadcast_object(value, comm, 1)

    each(rank, SIZE)


@pytest.mark.parametrize(
    ("code", "content"),
    [(9, []), (1, ["float32", [2], b"123"]), (1, ["float32", [3], bytes(8)]), (1, ["code", [], b""]), (2, 5)],
)
def test_malformed_objects_of_a_peer_raise_collective_error(code: int, content: Any) -> None:
    with pytest.raises(CollectiveError, match="a peer's object cannot be read"):
        state.decoded(msgpack.ExtType(code, msgpack.packb(content)))
