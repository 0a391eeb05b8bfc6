"""Elastic steps of an attachment: an ``Elastic`` whose state is the attachment itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from kfcomm.elastic import ElasticSampler, State
from kfcomm.errors import ConfigError
from kfcomm.torch.reductions import is_elastic

if TYPE_CHECKING:
    from kfcomm.elastic import Step
    from kfcomm.sync.elastic import Elastic
    from kfcomm.torch.driver import StepDriver

Given: TypeAlias = "ElasticSampler | Mapping[str, Any] | None"


def sampler_of(given: Given) -> ElasticSampler | None:
    """The sampler among the argument ``elastic`` of `attach`."""
    found = given.get("sampler") if isinstance(given, Mapping) else given
    return found if isinstance(found, ElasticSampler) else None


class ElasticSteps:
    """Steps over a sampler.

    Args:
        comm: communicator of the attachment.
        training: the attachment.
        given: a sampler; or a mapping of ``"sampler"``, perhaps ``"state"`` (a mapping of more values and objects for
            the ``State``), and options of an ``Elastic``.
        driver: of the steps; None where nothing is measured or adapted.

    Attributes:
        elastic: the ``Elastic`` that was opened last.

    Raises:
        ConfigError: a sampler is missing; or the communicator is of a fixed world.
    """

    def __init__(self, comm: Any, training: Any, given: Given, driver: StepDriver | None = None) -> None:
        self.elastic: Elastic | None = None
        self._comm = comm
        self._driver = driver
        self._training = training
        options: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"sampler": given}
        self._sampler = options.pop("sampler", None)
        self._more = options.pop("state", {})
        self._options = options
        if given is None:
            return
        if not isinstance(self._sampler, ElasticSampler):
            raise ConfigError(
                "elastic is a kfcomm.elastic.ElasticSampler, or a mapping with one as 'sampler' and with options of an "
                f"Elastic, not {given!r:.80}"
            )
        if not is_elastic(comm):
            raise ConfigError("attach(..., elastic=...) needs a communicator of kfcomm.sync.init(elastic=True)")

    def through(self, passes: int | None) -> Iterator[Step]:
        """Open an ``Elastic``, and yield its steps."""
        if self._sampler is None:
            raise ConfigError("steps need a sampler: attach(..., elastic=kfcomm.elastic.ElasticSampler(...))")
        state = State(training=self._training, **self._more)
        self.elastic = opened = self._comm.elastic_over(state, **self._options)
        with opened:
            steps = opened.steps(self._sampler, passes=passes)
            yield from steps if self._driver is None else self._driver.through(steps, opened)
