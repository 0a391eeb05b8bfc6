import pytest

from kfcomm.errors import ConfigError
from kfcomm.rendezvous.nodes import first_host


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node7,node8", "node7"),
        ("node[03-05,9],other", "node03"),
        ("node[9]", "node9"),
        ("rack[1-2]n[04,06]-ib,x", "rack1n04-ib"),
        ("n[1-2].cluster.local", "n1.cluster.local"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",", "node[1-2", "node]1", "node[]"])
def test_a_malformed_list_is_refused(nodes: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST"):
        first_host(nodes)
