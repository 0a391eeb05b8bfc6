"""Elastic training: it continues when ranks die, join or leave."""

from kfcomm.elastic.communicator import ElasticCommunicator
from kfcomm.elastic.course import Step
from kfcomm.elastic.loop import Elastic
from kfcomm.elastic.sampler import ElasticSampler
from kfcomm.elastic.state import PerRank, State

__all__ = ["Elastic", "ElasticCommunicator", "ElasticSampler", "PerRank", "State", "Step"]
