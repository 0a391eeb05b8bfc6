"""Data-parallel training by hooks: a model and an optimizer whose ranks agree, by any algorithm.

The program's loop stays as it is, and gets, with synchronous SGD, the result of one process with the whole batch. An
attachment composes the *method* by which ranks agree: `averaging` of gradients during the backward pass, or an
algorithm of ``kfcomm.train`` in the optimizer's step (`optimizers`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kfcomm.common.arguments import checked_name
from kfcomm.errors import ConfigError
from kfcomm.sync.adapter import Adapter
from kfcomm.sync.driver import before_close
from kfcomm.torch.alike import Comparison, described_optimizer, parameters_of
from kfcomm.torch.averaging import BUCKET_NBYTES, GradientAveraging, Method, Parts, Traffic, buckets_of, shares
from kfcomm.torch.compression import Given, by_parameter_of
from kfcomm.torch.reductions import is_elastic
from kfcomm.torch.state import broadcast_parameters, check_alike, described

if TYPE_CHECKING:
    from kfcomm.adapt import Policy
    from kfcomm.elastic import ElasticSampler
    from kfcomm.sync import Communicator
    from kfcomm.torch.exchange import GradientExchange


def attach(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, *, name: str = "grad",
    algorithm: Any = "ssgd", monitor: Any = False, policies: Sequence[Policy] = (),
    elastic: ElasticSampler | Mapping[str, Any] | None = None, batch_size: int | None = None, defer: bool = False,
    bucket_nbytes: int = BUCKET_NBYTES, wire_dtype: Any = None, compression: Given = None,
) -> Attached:  # fmt: skip
    """Average the gradients of a model over all ranks from now on, by hooks; the training loop stays as it is.

    Every rank calls it, with the same model. Parameters and buffers, those with ``persistent=False`` too, become those
    of rank 0. Buffers become rank 0's again at the end of each backward pass that exchanges gradients.

    Args:
        model: in host memory. Its gradients are those of the parameters that ``optimizer`` has.
        optimizer: one of torch's, or one like these, with the same state on every rank.
        comm: blocking, of ``kfcomm.sync``.
        name: of the collectives; another one for each model that is attached to one communicator.
        algorithm: by which ranks agree: ``"ssgd"``, the mean of their gradients.
        monitor: whether to measure the noise of the gradients.
        policies: of ``kfcomm.adapt``.
        elastic: sampler for ``steps``, or a mapping of it (``"sampler"``) and of options of an ``Elastic``.
        batch_size: samples of a step, over all ranks.
        defer: False: when ``backward()`` returns, every ``parameter.grad`` is the average. True: gradients are under
            way until the program reads them, and a parameter is updated when the program uses it after
            ``optimizer.step()``. The numbers are the same, and more of the communication is hidden. An average that
            fails raises where it is used. Call ``wait()`` before uses that torch does not see: of a tensor or NumPy
            array made earlier that shares memory with a parameter, of ``optimizer.state``, or by code that is not
            Python (TorchScript, an extension). Only optimizers whose ``step`` is torch's own, without a closure, are
            deferred; others update at once.
        bucket_nbytes: gradients smaller than this travel together up to so many bytes; larger ones by themselves.
        wire_dtype: see ``Communicator.all_reduce``.
        compression: a kind by name, or a ``Compression`` with options, for all gradients; or by patterns of parameters'
            names, where the first match holds: ``{"*.bias": None, "*": "powersgd"}``.

    Returns:
        The attachment, which lasts until ``detach`` is called.

    Raises:
        ConfigError: on all ranks, naming the difference and the ranks: their models, optimizers or options differ; or
            one of them cannot be attached: the optimizer's parameters are not those of the model; a parameter is not in
            host memory; a compression is unknown, or for names that no parameter has.

    Cost:
        Memory for one gradient of each parameter, and for another of each that has a bucket to itself; a broadcast of
        the model. In a backward pass 2(n−1)/n times the bytes of the gradients, a byte for each, a broadcast of the
        buffers if there are any, and a copy of gradients that share a bucket within the rank's own memory.
    """
    if not isinstance(comm, Adapter):
        raise ConfigError(f"attach needs a communicator of kfcomm.sync, not a {type(comm).__name__}")
    if algorithm != "ssgd" or monitor or policies or elastic is not None or batch_size is not None:
        raise ConfigError("algorithm, monitor, policies, elastic and batch_size of attach are not there yet")
    parts = Parts(model, optimizer, comm, checked_name(name))
    traffic = Traffic(defer, bucket_nbytes, wire_dtype, compression)
    about: dict[str, str] = {"bucket_nbytes": str(bucket_nbytes), "wire_dtype": str(wire_dtype), "defer": str(defer)}
    problem, tensors = None, dict[str, torch.Tensor]()
    try:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        parameters = parameters_of(model, optimizer)
        chosen = by_parameter_of(model, compression, [one for one, _ in parameters])
        shared = shares(parameters, traffic, chosen)
        about |= {f"compression of {one}": str(kind) for one, kind in chosen.items() if kind is not None}
        about |= described(tensors)[0] | described_optimizer(optimizer, {one: own for own, one in parameters})
    except Exception as error:  # noqa: BLE001  any error is reported to the other ranks
        problem = str(error)
    if is_elastic(comm):
        # Without a word to the others, who may be amid their steps; an Elastic gives all ranks one state.
        if problem is not None:
            raise ConfigError(f"{name!r} cannot work: {problem}")
    else:
        # Before the broadcast, to which unlike models would give unlike tensors.
        check_alike(comm, name, about, problem)
        broadcast_parameters(tensors, comm, name=f"{name}/state")
    met = Comparison(comm, name, about).look
    return Attached(parts, GradientAveraging(parts, traffic, buckets_of(parts, traffic, shared), met))


class Attached:
    """A model and an optimizer whose ranks agree, made by `attach`.

    ::

        attached = kfcomm.torch.attach(model, optimizer, comm)
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model(x), y).backward()
            optimizer.step()

    A backward pass that raises on one rank makes ``backward()`` of the others raise ``CollectiveAborted``; no rank has
    gradients then, and all may continue with the next pass. An error before the first gradient of a pass is not
    noticed: the others wait for the next pass of that rank.
    """

    def __init__(self, parts: Parts, method: Method) -> None:
        self._parts = parts
        self._method = method
        before_close(parts.comm, self._finish)

    def __repr__(self) -> str:
        return f"<Attached, {self._method!r}>"

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Exchange nothing in backward passes of this block: for all micro-batches of a step but the last.

        ::

            with attached.no_sync():
                loss_of(model(first)).backward()
            loss_of(model(second)).backward()
            optimizer.step()

        The last pass averages the sum. Without it the result is the same, with an exchange for each pass.
        """
        before, self._method.syncs = self._method.syncs, False
        try:
            yield
        finally:
            self._method.syncs = before

    def wait(self) -> None:
        """Wait until nothing is under way, and every ``parameter.grad`` is the average, on all ranks.

        It also averages what passes in ``no_sync`` have accumulated, and gradients that the program has assigned to
        ``parameter.grad``; then every rank has to call it. With ``defer=True`` all parameters are updated.

        Raises:
            CollectiveError: an average has failed, as where a peer has died, or the backward pass of another rank has.
        """
        self._method.wait()

    def detach(self) -> None:
        """Wait, and remove all hooks. Gradients are no longer averaged."""
        try:
            self.wait()
        finally:
            self._method.remove()

    def _finish(self) -> None:
        self._method.finish()

    @property
    def _exchange(self) -> GradientExchange:
        method: Any = self._method
        return method.exchange  # type: ignore[no-any-return]
