"""Elastic training: it continues when ranks die, join or leave."""

from kfcomm.elastic.communicator import ElasticCommunicator
from kfcomm.elastic.loop import Elastic
from kfcomm.elastic.sampler import ElasticSampler
from kfcomm.elastic.state import State
from kfcomm.elastic.steps import Step

__all__ = ["Elastic", "ElasticCommunicator", "ElasticSampler", "State", "Step"]
