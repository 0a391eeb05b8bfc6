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
from kfcomm.torch.adapting import Adapted
from kfcomm.torch.alike import Comparison, described_optimizer, parameters_of
from kfcomm.torch.averaging import Parts, Shares, TrafficOptions, shares
from kfcomm.torch.compiling import uncompiled
from kfcomm.torch.compression import Given as Compressions
from kfcomm.torch.compression import by_parameter_of
from kfcomm.torch.driver import StepDriver
from kfcomm.torch.elastic import ElasticSteps, Given, sampler_of
from kfcomm.torch.methods import MethodChoice, MethodPlan, agree_on_model, meet, method_of, op_of, problem_of
from kfcomm.torch.reductions import is_elastic
from kfcomm.torch.snapshot import TrainedTensors, tensors_of
from kfcomm.torch.state import broadcast_parameters, check_alike, described
from kfcomm.train import Agreement, Algorithm
from kfcomm.train.composite import CompositeState

if TYPE_CHECKING:
    from kfcomm.adapt import Decision, Hyperparameters, Policy
    from kfcomm.adapt.guard import Void
    from kfcomm.elastic import Step
    from kfcomm.sync import Communicator
    from kfcomm.sync.elastic import Elastic
    from kfcomm.torch.exchange import GradientExchange
    from kfcomm.train import GradientMonitor


def attach(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, comm: Communicator, *, name: str = "grad",
    algorithm: Any = "ssgd", monitor: Any = False, policies: Sequence[Policy] = (), elastic: Given = None,
    batch_size: int | None = None, hyperparameters: Hyperparameters | None = None, defer: bool = False,
    bucket_nbytes: int | None = None, wire_dtype: Any = None, compression: Compressions = None,
) -> Attached:  # fmt: skip
    """Let the ranks' models agree from now on, by hooks; the training loop stays as it is.

    Every rank calls it, with the same model. Parameters and buffers, those with ``persistent=False`` too, become those
    of rank 0. Where gradients are averaged, buffers become rank 0's again at the end of each backward pass that
    exchanges gradients; where ranks keep replicas, buffers stay each rank's own.

    In an elastic job (``kfcomm.sync.init(elastic=True)``) nothing is exchanged here, since a rank that joins must not
    wait for the others: all ranks get one model by their ``Elastic``, and compare what they attach in its first step.
    Train in ``attached.steps()``, or in the steps of ``Elastic(comm, State(training=attached))``.

    Args:
        model: on the CPU, on one CUDA device, or partly on both; on the same kind of device on all ranks. Its gradients
            are those of the parameters that ``optimizer`` has.
        optimizer: one of torch's, or one like these, with the same state on every rank.
        comm: blocking, of ``kfcomm.sync``; of a fixed world or an elastic one.
        name: of the collectives; another one for each model that is attached to one communicator.
        algorithm: by which ranks agree, a name of ``kfcomm.train.Algorithm`` or one of these with options:
            ``Algorithm("sma", alpha=0.2)``. ``"ssgd"``: the mean of their gradients; ``"adasum"``: their adaptive sum;
            both travel during the backward pass. Others exchange models or gradients at the beginning of
            ``optimizer.step()``: SMA, EA-SGD, local SGD, DiLoCo, AdaSGD, Local AdaAlter (over plain SGD),
            PairAveraging, and algorithms of the program's own, by their class or a function.
        monitor: True: measure the gradients' statistics, as their noise scale, in as many steps as cost at most a
            hundredth of the time; or a ``GradientMonitor``, or a mapping of its options. Gradients that are compressed
            are left out, since the norm of their exact mean is not known.
        policies: of ``kfcomm.adapt``: they meet at the end of each ``optimizer.step()``. They may change the batch
            (``batch_size``, and that of the sampler), the learning rate (by a factor, so that schedulers work as ever)
            and the wire dtype. One of them may be ``GuardSteps``, which judges each step before its update.
        hyperparameters: that policies may change, with their first values; by default those. With names of algorithms
            (``agreements``) they may change between these.
        elastic: sampler for ``steps``; or a mapping with it as ``"sampler"``, with options of an ``Elastic``, and with
            more values and objects for its ``State`` as ``"state"``: ``{"sampler": sampler, "checkpoint": "train.npz",
            "state": {"scheduler": scheduler}}``.
        batch_size: samples of a step, over all ranks.
        defer: False: when ``backward()`` returns, every ``parameter.grad`` is the average. True: gradients are under
            way until the program reads them, and a parameter is updated when the program uses it after
            ``optimizer.step()``. The numbers are the same, more of the communication is hidden, and an average that
            fails raises where it is used. Call ``wait()`` before uses that torch does not see: of a tensor or array
            that shares memory with a parameter, of ``optimizer.state``, or by code that is not Python. Only steps of
            torch's own optimizers, without a closure, are deferred. Not in an elastic job, whose steps end with all
            their collectives.
        bucket_nbytes: gradients smaller than this travel together up to so many bytes; larger ones by themselves. By
            default 4 MiB in host memory; on a device 25 MiB or a sixth of all, where ranks share it 256 MiB.
        wire_dtype: see ``Communicator.all_reduce``. Gradients on a device are rounded there, and added in this type.
        compression: a kind by name, or a ``Compression`` with options, for all gradients; or by patterns of parameters'
            names, where the first match holds: ``{"*.bias": None, "*": "powersgd"}``. With means of gradients only.

    Returns:
        The attachment, which lasts until ``detach`` is called.

    Raises:
        ConfigError: on all ranks, naming the difference and the ranks: their models, optimizers or options differ; or
            one of them cannot be attached: the optimizer's parameters are not those of the model; the model is on
            several devices, or on one that is not CUDA's; the algorithm is unknown, or has no use for one of the
            options; a compression is unknown, or for names that no parameter has. In an elastic job on this rank, and
            differences in the first step.

    Cost:
        Memory for one gradient of each parameter, and for another of each that has a bucket to itself; a broadcast of
        the model. In a backward pass 2(n−1)/n times the bytes of the gradients, a byte for each, a broadcast of the
        buffers if there are any, and a copy of gradients that share a bucket within the rank's own memory. An elastic
        job has another copy of the averages. On a device all gradients are copied to buckets; the host waits for other
        ranks, and not for the device, unless averages are made in host memory. Other algorithms: see ``kfcomm.train``.
    """
    if not isinstance(comm, Adapter):
        raise ConfigError(f"attach needs a communicator of kfcomm.sync, not a {type(comm).__name__}")
    parts = Parts(model, optimizer, comm, checked_name(name))
    adapted = Adapted(monitor, tuple(policies), batch_size, sampler_of(elastic), hyperparameters)
    plan, chosen = _planned(parts, TrafficOptions(defer, bucket_nbytes, wire_dtype, compression), adapted, algorithm)
    return Attached(plan, chosen, elastic)


def _planned(parts: Parts, traffic: TrafficOptions, adapted: Adapted, algorithm: Any) -> tuple[MethodPlan, Algorithm]:
    """Make what the method needs, alike on all ranks; in a fixed world they all have rank 0's tensors then."""
    comm, name, problem = parts.comm, parts.name, None
    about = {"bucket_nbytes": str(traffic.bucket_nbytes), "wire_dtype": str(traffic.wire_dtype)}
    about["defer"] = str(traffic.defer)
    shared: Shares = []
    driver: StepDriver | None = None
    chosen, tensors = Algorithm("ssgd"), dict[str, torch.Tensor]()
    try:
        chosen, tensors = Algorithm.of(algorithm), tensors_of(parts.model)
        about["algorithm"] = str(chosen)
        parameters = parameters_of(parts.model, parts.optimizer)
        kinds = by_parameter_of(parts.model, traffic.compression, [one for one, _ in parameters])
        shared = shares(parameters, traffic, kinds, comm)
        about |= {f"compression of {one}": str(kind) for one, kind in kinds.items() if kind is not None}
        names = {own: one for one, own in parameters}
        about |= described(tensors)[0] | described_optimizer(parts.optimizer, names, with_numbers=not is_elastic(comm))
        problem = problem_of(chosen, traffic, comm)
        about |= adapted.described()
        if adapted.is_needed:
            driver = StepDriver(parts.model, parts.optimizer, comm, name, adapted)
    except Exception as error:  # noqa: BLE001  any error is reported to the other ranks
        problem = str(error)
    if not is_elastic(comm):
        # Before the broadcast, to which unlike models would give unlike tensors.
        check_alike(comm, name, about, problem)
        broadcast_parameters(tensors, comm, name=f"{name}/state")
    elif problem is not None:
        raise ConfigError(f"{name!r} cannot work: {problem}")
    return MethodPlan(parts, traffic, shared, Comparison(comm, name, about), driver), chosen


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

    def __init__(self, plan: MethodPlan, algorithm: Algorithm, elastic: Given) -> None:
        self._plan = plan
        self._choice = MethodChoice(algorithm)
        self._method = method_of(plan, algorithm)
        parts = plan.parts
        if not is_elastic(parts.comm):
            meet(self._method)
        self._training = TrainedTensors(parts.model, parts.optimizer, lambda: self._method.keeps_replicas)
        self._driver = plan.driver
        self._steps = ElasticSteps(parts.comm, self, elastic, plan.driver)
        self._hooks = [] if plan.driver is None else plan.driver.hooks(self, self._follow)
        before_close(parts.comm, self._end)

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

        The last pass averages the sum. Without it the result is the same, with an exchange for each pass. Algorithms
        that make their exchange in the optimizer's step do so once a step in any case.
        """
        before, self._method.syncs = self._method.syncs, False
        try:
            yield
        finally:
            self._method.syncs = before

    @uncompiled
    def wait(self) -> None:
        """Wait until nothing is under way, and every ``parameter.grad`` is what the step will use, on all ranks.

        It also averages what passes in ``no_sync`` have accumulated, and gradients that the program has assigned to
        ``parameter.grad``; then every rank has to call it. With ``defer=True`` all parameters are updated. An algorithm
        that makes its exchange in the optimizer's step makes it now: call it on all ranks before code that looks at
        gradients which the algorithm changes, such as clipping.

        Raises:
            CollectiveError: an average has failed, as where a peer has died, or the backward pass of another rank has.
        """
        self._method.wait()

    def detach(self) -> None:
        """Wait, and remove all hooks. The ranks agree on nothing any more."""
        try:
            self._method.close()
        finally:
            self._method.remove()
            for hook in self._hooks:
                hook.remove()
            if self._driver is not None:
                self._driver.close()

    def _end(self) -> None:
        self._method.finish()
        if self._driver is not None:
            self._driver.close()

    # ---------------------------------------------------------------- monitor, guard and policies

    @uncompiled
    def observe(self, **values: Any) -> None:
        """Report numbers of this rank's step to the guard and to the policies of all ranks, before the step is made.

        ``loss`` is what ``GuardSteps`` judges by, beside the gradient's norm; observed only after the backward pass it
        costs one more message in each step. Without policies nothing is done.

        Args:
            values: numbers, or tensors of one number, by name.

        Raises:
            ConfigError: see ``kfcomm.adapt.Adaptation.observe``.
        """
        if self._driver is not None:
            self._driver.observe(values)

    @property
    def monitor(self) -> GradientMonitor | None:
        """The monitor of ``attach(monitor=...)``; its ``values`` have the latest figures."""
        return None if self._driver is None else self._driver.monitor

    @property
    def is_over(self) -> bool:
        """Whether a policy has asked for the end of training, by ``ctx.stop``; the same on all ranks."""
        return self._driver is not None and self._driver.is_over

    @property
    def decisions(self) -> list[Decision]:
        """Decisions of the guard and of policies so far, each with its evidence; the same on every rank."""
        return [] if self._driver is None else self._driver.decisions

    @property
    def last_void(self) -> Void | None:
        """The judgement of the latest step, if that was void; None for a good one."""
        return None if self._driver is None else self._driver.last_void

    @property
    def batch_size(self) -> int | None:
        """Samples of the next step, over all ranks, as policies have set it; None if nothing follows it."""
        return None if self._driver is None else self._driver.batch_size

    @property
    def local_batch_size(self) -> int | None:
        """This rank's share of the batch; shares differ by at most one, the first ones are larger."""
        return None if self._driver is None else self._driver.local_batch_size

    # ---------------------------------------------------------------- algorithms

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in force."""
        return self._choice.algorithm

    @property
    def agreement(self) -> Agreement | None:
        """The object that runs it, see ``kfcomm.train``; None where gradients travel by buckets (ssgd, adasum)."""
        found: Agreement | None = getattr(self._method, "agreement", None)
        return found

    def use(self, algorithm: Any) -> None:
        """Agree by another algorithm from the next step on.

        All ranks call it between the same two steps. Where the former algorithm keeps replicas, all continue with their
        mean; one that shares gradients begins with rank 0's state of the optimizer, too.

        Args:
            algorithm: see `attach`.

        Raises:
            ConfigError: it is unknown, or does not go with the options of the attachment.
            CollectiveError: an exchange failed.
        """
        algorithm = self._choice.named(algorithm)
        problem = problem_of(algorithm, self._plan.traffic, self._plan.parts.comm)
        if problem is not None:
            raise ConfigError(problem)
        self._method.finish()
        self._plan.comparison.look()
        if op_of(algorithm) is not None and op_of(self.algorithm) is None:
            agree_on_model(self._plan, with_state=self._method.keeps_replicas)
        self._change(algorithm)

    def _follow(self, name: str | None, options: Mapping[str, Any]) -> None:
        """Agree by the algorithm that policies have chosen, if it is another one, with those options that it has.

        Args:
            name: of the algorithm; None for the present one.
            options: free hyperparameters; others than its options are the program's own.

        Raises:
            ConfigError, CollectiveError: see ``use``.
        """
        wanted = self._choice.named(self.algorithm if name is None or name == str(self.algorithm) else name)
        own = {one: value for one, value in options.items() if wanted.has_option(one)}
        if own:
            wanted = Algorithm(wanted.kind, **{**wanted.options, **own})
        if wanted != self.algorithm:
            self.use(wanted)

    def _change(self, algorithm: Algorithm) -> None:
        former, self._method = self._method, method_of(self._plan, algorithm)
        former.remove()
        self._method.syncs = former.syncs
        self._choice.change(algorithm)
        self._plan.comparison.about["algorithm"] = str(algorithm)

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """State between two steps: model, optimizer, algorithm, compressors. Cost: no copies.

        It is for checkpoints, and for ``kfcomm.elastic.State(training=attached)``.
        """
        if not is_elastic(self._plan.parts.comm):
            self._method.finish()  # deferred updates; in an elastic job there are none
        return {**self._choice.told(), **self._parts().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, by its algorithm. Nothing is exchanged: all ranks load the same.

        Raises:
            ConfigError: it is of another model, or of an algorithm that this program has not given.
        """
        algorithm = self._choice.of(state)
        if algorithm != self.algorithm:
            self._change(algorithm)
        self._parts().load_state_dict(state)

    def merging(self) -> dict[str, str]:
        """Keys of the state whose values differ between ranks, and how they are converted when the ranks change."""
        return self._parts().merging()

    def _parts(self) -> CompositeState:
        driver = {} if self._driver is None else {"driver": self._driver}
        return CompositeState({"training": self._training, "method": self._method, **driver})

    # ---------------------------------------------------------------- elastic training

    @property
    def elastic(self) -> Elastic | None:
        """The ``Elastic`` of the latest ``steps``; None before."""
        return self._steps.elastic

    def steps(self, *, passes: int | None = None) -> Iterator[Step]:
        """Yield the steps of an elastic job, between which ranks join and leave; see ``kfcomm.elastic.Elastic.steps``.

        ::

            for step in attached.steps(passes=3):
                optimizer.zero_grad()
                loss_of(model(x[step.indices]), y[step.indices]).backward()
                optimizer.step()

        Args:
            passes: number of complete passes of the sampler at which the loop ends.

        Raises:
            ConfigError: ``attach`` was not given ``elastic``; and as of ``Elastic``.
        """
        return self._steps.through(passes)

    @property
    def _exchange(self) -> GradientExchange:
        method: Any = self._method
        return method.exchange  # type: ignore[no-any-return]
