from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm.collectives.plans import CHUNK_NBYTES
from kfcomm.errors import ConfigError
from kfcomm.simulate import simulate
from kfcomm.strategies import Strategy, build, names
from kfcomm.strategies.base import MAX_CHUNK_NBYTES
from kfcomm.strategies.chunks import LEAST_CHUNK_NBYTES, ChunkSizes, chunk_nbytes_of
from kfcomm.strategies.moves import goes_in_steps
from kfcomm.types import Costs, Layout
from tests.conformance import oracle
from tests.conformance.worlds import everywhere, same_bits, world
from tests.strategies.layouts import LAYOUTS

CHUNKS = [1 << bit for bit in range(LEAST_CHUNK_NBYTES.bit_length() - 1, CHUNK_NBYTES.bit_length())]
MIB = 1 << 20


def chunk_of(name: str, layout: Layout, nbytes: int) -> int:
    return chunk_nbytes_of(build(name, layout).select(nbytes), nbytes, layout)


@settings(max_examples=50)
@given(layout=LAYOUTS, name=st.sampled_from(names()), nbytes=st.integers(0, 1 << 32))
def test_chunk_is_one_of_few_sizes_and_repeats(layout: Layout, name: str, nbytes: int) -> None:
    chunk = chunk_of(name, layout, nbytes)
    assert chunk in CHUNKS
    again = Layout.of([f"host {host}" for host in layout.hosts])
    assert chunk_of(name, again, nbytes) == chunk


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("size", [2, 3, 4])
def test_shallow_graphs_on_one_host_have_the_largest_chunks(name: str, size: int) -> None:
    assert {chunk_of(name, Layout.even(size), 1 << bit) for bit in range(31)} == {CHUNK_NBYTES}


@pytest.mark.parametrize("name", names())
def test_ranks_that_share_processors_of_one_host_have_the_largest_chunks(name: str) -> None:
    assert {chunk_of(name, Layout.even(32, num_cpus=8), 1 << bit) for bit in range(31)} == {CHUNK_NBYTES}


def test_chunks_shrink_with_depth_and_latency_and_grow_with_length_and_rate() -> None:
    depths = [chunk_of("binary_tree", Layout.even(size, size), MIB) for size in (2, 8, 64, 1024)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] > depths[-1]
    lengths = [chunk_of("binary_tree", Layout.even(64, 64), nbytes) for nbytes in (MIB // 8, MIB, 16 * MIB, 512 * MIB)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]
    hosts = tuple(range(16))
    rates = [Layout(hosts, costs=Costs(cross_beta_s_per_byte=1 / rate)) for rate in (5e7, 1e9, 2e10)]
    chunks = [chunk_of("binary_tree", layout, MIB) for layout in rates]
    assert chunks == sorted(chunks)
    assert chunks[0] < chunks[-1]


@pytest.mark.parametrize("name", ["binary_tree", "star", "ring", "clique", "multi_binary_tree_star"])
@pytest.mark.parametrize("hosts", [(4, 1), (16, 1), (4, 4)])
@pytest.mark.parametrize("nbytes", [MIB // 16, MIB, 8 * MIB])
def test_chosen_chunks_are_near_the_best_in_the_simulator(name: str, hosts: tuple[int, int], nbytes: int) -> None:
    layout = Layout.even(hosts[0] * hosts[1], hosts[0])
    strategy = build(name, layout).select(nbytes)
    seconds = {size: simulate(replace(strategy, chunk_nbytes=size), layout, nbytes).seconds for size in CHUNKS[::2]}
    assert simulate(strategy, layout, nbytes).seconds <= 1.15 * min(seconds.values())


def test_deep_tree_of_many_hosts_takes_a_third_of_the_time() -> None:
    layout = Layout.even(256, 256)
    tree = build("binary_tree", layout).select(MIB)
    chosen = simulate(tree, layout, MIB).seconds
    assert chosen <= simulate(replace(tree, chunk_nbytes=CHUNK_NBYTES), layout, MIB).seconds / 2.5


@pytest.mark.asyncio
@pytest.mark.parametrize("name", [name for name in names() if name != "auto"])
async def test_results_do_not_depend_on_the_chunk_size(name: str) -> None:
    size, length = 5, 20_011
    results = []
    for chunk_nbytes in (0, 1 << 13, 1 << 16, 1 << 20):
        strategy = replace(build(name, Layout.even(size, 3)).select(4 * length), chunk_nbytes=chunk_nbytes)
        async with world(size, hosts=3, strategy=strategy) as comms:
            xs = [oracle.data("float16", length, rank) for rank in range(size)]
            results += await everywhere(comms, lambda comm, xs=xs: comm.all_reduce(xs[comm.rank], "x", op="avg"))
    assert all(same_bits(result, results[0]) for result in results)


@pytest.mark.asyncio
async def test_chunk_size_of_the_strategy_has_precedence() -> None:
    tree = build("binary_tree", Layout.even(4, 4)).select(0)
    for chunk_nbytes, num_chunks in ((4000, 100), (1 << 20, 1)):
        strategy = replace(tree, chunk_nbytes=chunk_nbytes)
        async with world(4, hosts=4, strategy=strategy) as comms:
            await everywhere(comms, lambda comm: comm.all_reduce(np.ones(100_000, np.float32), "x"))
            sent = sum(peer.sent_messages for comm in comms for peer in comm.statistics().peers)
        chunks = 2 * 3 * num_chunks
        assert chunks <= sent <= chunks + 3 * 20  # and definitions of names
        assert simulate(strategy, Layout.even(4, 4), 400_000).messages == chunks


@pytest.mark.parametrize("chunk_nbytes", [-1, MAX_CHUNK_NBYTES + 1, 1.5, True])
def test_chunk_sizes_out_of_range_are_refused(chunk_nbytes: int) -> None:
    with pytest.raises(ConfigError, match=f"expected 1 to {MAX_CHUNK_NBYTES}"):
        Strategy("mine", build("star", Layout.even(2)).select(0).pairs, chunk_nbytes=chunk_nbytes)


def test_chunk_size_is_part_of_the_digest_if_it_is_set() -> None:
    star = build("star", Layout.even(3)).select(0)
    assert len({replace(star, chunk_nbytes=size).digest for size in (0, 4096, 8192)}) == 3


def window_of(name: str, layout: Layout, nbytes: int) -> int:
    strategy = build(name, layout).select(nbytes)
    return ChunkSizes(layout).window(strategy, chunk_nbytes_of(strategy, nbytes, layout))


@pytest.mark.parametrize("name", names())
def test_windows_are_where_senders_meet_between_hosts(name: str) -> None:
    layout = Layout.even(8, 8)
    strategy = build(name, layout).select(16 * MIB)
    meet = not goes_in_steps(strategy) and any(
        len(below) > 1 for pair in strategy.pairs for below in pair.reduce.children
    )
    assert (window_of(name, layout, 16 * MIB) > 0) == meet
    assert window_of(name, Layout.even(8), 16 * MIB) == 0


def test_windows_grow_with_depth_and_with_what_latency_holds() -> None:
    depths = [window_of("binary_tree", Layout.even(size, size), 256 * MIB) for size in (4, 16, 256)]
    assert depths == sorted(depths)
    assert depths[0] < depths[-1]
    hosts = tuple(range(8))
    held = []
    for alpha_s in (1e-5, 1e-3, 1e-1):
        layout = Layout(hosts, costs=Costs(cross_alpha_s=alpha_s, cross_beta_s_per_byte=1e-9))
        chunk = chunk_of("star", layout, 256 * MIB)
        held.append(chunk * window_of("star", layout, 256 * MIB))
    assert held == sorted(held)
    assert held[-1] > 0.1 / 7e-9  # a star of eight at 1 GB/s: what one leaf sends within the latency


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["star", "binary_tree", "multi_star", "double_tree"])
@pytest.mark.parametrize("length", [5_003, 40_011])
@pytest.mark.parametrize("wire_dtype", [None, "float16"])
async def test_results_do_not_depend_on_windows(
    name: str, length: int, wire_dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 5
    strategy = replace(build(name, Layout.even(size, 3)).select(4 * length), chunk_nbytes=LEAST_CHUNK_NBYTES)
    results = []
    for window in (0, 1, 2):
        monkeypatch.setattr(ChunkSizes, "window", lambda *_, window=window: window)
        async with world(size, hosts=3, strategy=strategy) as comms:
            xs = [oracle.data("float32", length, rank) for rank in range(size)]
            results += await everywhere(
                comms, lambda comm, xs=xs: comm.all_reduce(xs[comm.rank], "x", wire_dtype=wire_dtype)
            )
    assert all(same_bits(result, results[0]) for result in results)
