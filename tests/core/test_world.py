from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfcomm import strategies
from kfcomm.core import names
from kfcomm.core.cause import Cause, CauseKind
from kfcomm.core.graph import GraphPair
from kfcomm.core.links import DEFAULT_CREDIT, Credit
from kfcomm.types import Layout, Verb
from tests.core import specs
from tests.core.specs import VERBS, Spec
from tests.core.world import Memory, Weather, World

CREDITS = [Credit(0, 0), Credit(0, 3), Credit(40, 2), Credit(100, 1000), Credit(10_000, 5), DEFAULT_CREDIT]

weathers = st.builds(
    Weather,
    seed=st.integers(0, 2**32 - 1),
    order=st.sampled_from(Weather.ORDERS),
    credit=st.sampled_from(CREDITS),
    num_blocks=st.sampled_from([0, 1, 3, 50]),
    streamed=st.sampled_from([0.0, 0.5, 1.0]),
    settled=st.sampled_from([0.1, 1.0]),
)
sizes = st.integers(1, 16)
seeds = st.integers(0, 2**32 - 1)


def members_of(rnd: random.Random, size: int) -> tuple[int, ...]:
    """All ranks, or some of them in any order."""
    if rnd.random() < 0.6:
        return tuple(range(size))
    return tuple(rnd.sample(range(size), rnd.choice([1, min(2, size), rnd.randint(1, size)])))


def random_specs(rnd: random.Random, size: int, number: int, prefix: str = "key") -> list[Spec]:
    """Different keys, in different groups; the larger the world, the less data."""
    return [
        specs.spec(rnd, f"{prefix}{place}", members_of(rnd, size), largest=24 if size < 8 else 8)
        for place in range(number)
    ]


@settings(max_examples=80)
@given(size=sizes, number=st.integers(1, 30), seed=seeds, weather=weathers)
def test_every_collective_of_any_world_ends_with_the_right_bits(size, number, seed, weather):
    rnd = random.Random(seed)
    keys = random_specs(rnd, size, number if size < 10 else 1 + number // 3)
    world = World(size, weather)
    world.plan_all([key] for key in keys)
    world.run()
    world.check_done(keys)
    world.check_at_rest()
    assert not world.violations


@settings(max_examples=30)
@given(size=st.integers(2, 6), seed=seeds, weather=weathers)
def test_keys_are_used_again_and_again_one_use_after_the_other_or_overlapping(size, seed, weather):
    rnd = random.Random(seed)
    chains = []
    for key in random_specs(rnd, size, 4):
        kinds = [key, *(specs.spec(rnd, key.name, key.members) for _ in range(rnd.randrange(4)))]
        chains.append(
            [
                replace(rnd.choice(kinds), overlapping=bool(seed % 2), generation=rnd.randrange(3), salt=place)
                for place in range(5)
            ]
        )
    world = World(size, weather)
    world.plan_all(chains)
    world.run()
    world.check_done([use for chain in chains for use in chain])
    world.check_at_rest()


def test_whole_chunks_go_both_ways_and_most_of_a_kind_the_short_one():
    ways = (GraphPair.of(specs.tree(random.Random(0), 4, root=1)),)
    key = Spec("key", Verb.ALL_REDUCE, (0, 1, 2, 3), ways, (23,), chunk=2)
    world = World(4, Weather(order="oldest", streamed=0.0))
    chain = [replace(key, salt=place, generation=place // 3) for place in range(6)]
    world.plan_all([chain])
    world.run()
    world.check_done(chain)
    world.check_at_rest()
    assert world.short + world.long == 6 * key.cost()[0]
    assert 0 < world.long < world.short


@settings(max_examples=25)
@given(size=st.integers(2, 5), seed=seeds, weather=weathers)
def test_the_numbers_of_keys_and_signatures_are_used_again_but_not_of_those_in_flight(size, seed, weather):
    rnd = random.Random(seed)
    late = rnd.randrange(size)
    world = World(size, weather)
    long = [specs.spec(rnd, f"long{number}", tuple(range(size)), largest=8) for number in range(4)]
    batches = [random_specs(rnd, size, 4, f"batch{number}/") for number in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(names, "MAX_ID", 8)  # as many as there are keys in flight at a time
        patch.setattr(names, "MAX_SIGNATURES", 3)
        for key in long:
            for rank in range(size):
                if rank != late:
                    world.plan(rank, [key])
        for batch in batches:
            world.plan_all([[replace(key, salt=use) for use in range(2)] for key in batch])
            world.run()
            assert any(node.router.live for node in world.nodes)
        for key in long:
            world.plan(late, [key])
        world.run()
        world.plan_all([[replace(key, salt=1009)] for key in batches[0]])
        world.run()
    world.check_done(long)
    for key in (key for batch in batches for key in batch):
        world.check_done([replace(key, salt=use) for use in range(2)])
    world.check_at_rest()
    assert not world.violations


@settings(max_examples=25)
@given(size=st.integers(2, 8), seed=seeds, first=weathers, second=weathers, chunks=st.tuples(*[st.integers(1, 9)] * 2))
def test_bits_depend_neither_on_chunks_nor_on_time(size, seed, first, second, chunks):
    rnd = random.Random(seed)
    ways = specs.pairs(rnd, size)
    results = []
    for weather, chunk in zip((first, second), chunks, strict=True):
        key = Spec("grad/0", Verb.ALL_REDUCE, tuple(range(size)), ways, (23,), chunk=chunk)
        world = World(size, weather)
        world.plan_all([[key]])
        world.run()
        world.check_done([key])
        results += [outcome.result.tobytes() for outcome in world.outcomes(key) if isinstance(outcome, Memory)]
    assert len(results) == 2 * size
    assert len(set(results)) == 1


@pytest.mark.parametrize("name", strategies.names())
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_on_every_strategy_sends_what_its_formula_says(name, verb):
    rnd = random.Random(f"{name} {verb}")
    for size, hosts in ((1, 1), (2, 1), (5, 2), (8, 2)):
        ways = strategies.build(name, Layout.even(size, hosts)).select(96).pairs
        if verb is Verb.SEND:
            size, ways = 2, (GraphPair.of(specs.tree(rnd, 2, 0)),)
        key = specs.of_verb(rnd, verb, "key", tuple(range(size)), ways, 24)
        world = World(size, Weather(seed=size, order="oldest"))
        world.plan_all([[key]])
        world.run()
        world.check_done([key])
        world.check_at_rest()
        chunks, nbytes = key.cost()
        assert sum(wire.chunks for wire in world.wires) == chunks
        assert sum(wire.nbytes for wire in world.wires) == nbytes


# ---------------------------------------------------------------- ranks that disagree


def variants(rnd: random.Random, key: Spec) -> list[Spec]:
    """The same key, seen in other ways: each differs from it in a field or two of the signature, or in generation."""
    one = key.counts[:1]
    others = [
        replace(key, chunk=key.chunk + 1),
        replace(key, generation=key.generation + 1),
        replace(key, counts=(key.count + 1, *key.counts[1:])),
        replace(key, pairs=(GraphPair.of(specs.tree(rnd, key.size, rnd.randrange(key.size))),), shares=()),
        replace(key, shares=(*([1] * (len(key.pairs) - 1)), 5)),
        *(replace(key, verb=verb, counts=one) for verb in (Verb.BARRIER, Verb.ALL_REDUCE, Verb.REDUCE)),
        *(replace(key, verb=Verb.BROADCAST, counts=one, root=root) for root in range(key.size)),
    ]
    return [other for other in others if (other.signature, other.generation) != (key.signature, key.generation)]


def disagreement(rnd: random.Random, size: int, name: str = "bad") -> list[Spec]:
    """Specs of one key by rank; at least two differ."""
    key = specs.of_verb(
        rnd, rnd.choice(VERBS) if size == 2 else rnd.choice(VERBS[:-2]), name, tuple(range(size)),
        specs.pairs(rnd, size), 12,
    )  # fmt: skip
    other = rnd.choice(variants(rnd, key))
    meant = [key, other, *(rnd.choice([key, other]) for _ in range(size - 2))]
    rnd.shuffle(meant)
    return meant


@settings(max_examples=80)
@given(size=st.integers(2, 8), seed=seeds, weather=weathers)
def test_ranks_that_disagree_all_fail_and_nothing_else_does(size, seed, weather):
    rnd = random.Random(seed)
    meant = disagreement(rnd, size)
    good = random_specs(rnd, size, 6)
    world = World(size, weather)
    world.plan_all([key] for key in good)
    for rank in rnd.sample(range(size), size):
        world.plan(rank, [meant[rank]])
    world.run()
    world.wait()
    for spec in set(meant):
        for cause in world.check_failed(spec, CauseKind.MISMATCH):
            assert cause.message.startswith("'bad' differs between ranks (")
            assert cause.message.count("; rank ") == 1
    world.check_done(good)
    world.check_at_rest()
    assert not world.violations
    again = replace(meant[0], salt=1077)
    world.plan_all([[again]])
    world.run()
    world.check_done([again])


def test_two_ranks_that_both_believe_to_be_the_root_find_out():
    ways = specs.pairs(random.Random(0), 2)
    world = World(2)
    meant = [Spec("bad", Verb.BROADCAST, (0, 1), ways, (8,), root=rank) for rank in (0, 1)]
    for rank in (0, 1):
        world.plan(rank, [meant[rank]])
    world.run()
    assert all(node.router.live for node in world.nodes)
    world.wait()
    for spec in meant:
        (cause,) = world.check_failed(spec, CauseKind.MISMATCH)
        assert "(root): rank" in cause.message
        assert "root 0" in cause.message
        assert "root 1" in cause.message
    world.check_at_rest()


@settings(max_examples=20)
@given(size=st.integers(2, 6), seed=seeds, weather=weathers)
def test_announcing_an_undisputed_call_changes_nothing(size, seed, weather):
    rnd = random.Random(seed)
    keys = random_specs(rnd, size, 5)
    world = World(size, weather)
    world.plan_all([key] for key in keys)
    for _ in range(4):
        world.run(steps=rnd.randrange(100))
        for node in world.nodes:
            for collective in node.router.live:
                assert node.rank not in [collective.group.members[rank] for rank in collective.unheard()]
        world.announce()
    world.run()
    world.check_done(keys)
    world.check_at_rest()


# ---------------------------------------------------------------- aborts, losses, broken links


@settings(max_examples=60)
@given(size=st.integers(1, 8), seed=seeds, weather=weathers)
def test_a_collective_that_is_given_up_ends_everywhere_and_its_key_lives_on(size, seed, weather):
    rnd = random.Random(seed)
    chains = [[replace(key, salt=use) for use in range(3)] for key in random_specs(rnd, size, 4)]
    good = random_specs(rnd, size, 4, "good")
    world = World(size, weather)
    world.plan_all([*chains, *([key] for key in good)])
    for chain in chains:
        use = rnd.randrange(2)
        kind = rnd.choice([CauseKind.TIMEOUT, CauseKind.CANCELLED])
        for rank in rnd.sample(chain[0].members, rnd.randint(1, len(chain[0].members))):
            world.tokens.append((world.abort, rank, chain[use], use, kind))
        world.run(steps=rnd.randrange(60))
    world.run()
    world.check_done([*good, *(chain[2] for chain in chains)])
    for chain in chains:
        for use in chain[:2]:
            for outcome in world.outcomes(use):
                if isinstance(outcome, Memory) and outcome.cause is None:
                    outcome.check()
    world.check_at_rest(aborted=100 * size)  # of groups that a rank is not in
    assert not world.violations


@settings(max_examples=20)
@given(size=st.integers(2, 8), seed=seeds, weather=weathers, refusing=st.booleans())
def test_a_call_that_is_refused_or_overlaps_fails_everywhere_and_the_first_goes_on(size, seed, weather, refusing):
    rnd = random.Random(seed)
    ranks = tuple(range(size))
    first = Spec("key", Verb.ALL_REDUCE, ranks, specs.pairs(rnd, size), (10,), chunk=2)
    second, third = replace(first, salt=1), replace(first, salt=2)
    world = World(size, weather)
    culprit = rnd.randrange(size)
    world.post(culprit, first)
    if refusing:
        world.refuse(culprit, second)
    else:
        world.post(culprit, second)  # while the first is in flight
    for rank in ranks:
        world.plan(rank, [third] if rank == culprit else [first, second, third])
    # The culprit's third use comes when its first is complete.
    held, world.tokens = world.tokens, []
    for token in held:
        if token[1] != culprit:
            world.tokens.append(token)
    world.run()
    world.check_done([first])
    for cause in world.check_failed(second, CauseKind.REFUSED):
        assert cause.rank == culprit
    world.plan(culprit, [third])
    world.run()
    world.check_done([third])
    world.check_at_rest()


@settings(max_examples=40)
@given(size=st.integers(2, 8), seed=seeds, weather=weathers)
def test_a_lost_peer_ends_what_it_takes_part_in_and_nothing_else(size, seed, weather):
    rnd = random.Random(seed)
    keys = random_specs(rnd, size, 8)
    world = World(size, weather)
    world.plan_all([key] for key in keys)
    world.run(steps=rnd.randrange(400))
    victim = rnd.randrange(size)
    world.crash(victim)
    world.run()
    late = replace(keys[0], name="late")
    world.plan_all([[late]])
    world.run()
    for key in [*keys, late]:
        for outcome in world.outcomes(key):
            if isinstance(outcome, Memory) and outcome.cause is None:
                if not outcome.done:
                    assert world.nodes[key.members[outcome.rank]].dead
                    continue
                outcome.check()
            else:
                assert victim in key.members
                cause = outcome if not isinstance(outcome, Memory) else outcome.cause
                assert cause is not None
                assert cause.kind in (CauseKind.LOST, CauseKind.LINK)
    world.check_at_rest(aborted=100)


def check_only_what_breaks_may_have_carried_failed(world: World) -> None:
    """A failure by a link needs two neighbours, one of whom had posted it before noticing that its link was broken."""
    for (spec, seq, _), outcome in world.memories.items():
        cause = outcome if isinstance(outcome, Cause) else outcome.cause
        if cause is None:
            assert isinstance(outcome, Memory)
            outcome.check()
            continue
        assert cause.kind is CauseKind.LINK
        assert any(
            wire.noticed
            and {wire.incoming.peer, wire.outgoing.peer} <= set(spec.members)
            and seq < wire.posted.get((spec.group_id, spec.name), 0)
            for wire in world.wires
        )


@settings(max_examples=60)
@given(size=st.integers(2, 8), seed=seeds, weather=weathers, overlapping=st.booleans())
def test_a_broken_link_fails_what_it_may_have_carried_and_is_replaced(size, seed, weather, overlapping):
    rnd = random.Random(seed)
    chains = [
        [replace(key, salt=use, overlapping=overlapping) for use in range(3)] for key in random_specs(rnd, size, 6)
    ]
    world = World(size, weather)
    world.plan_all(chains)
    for _ in range(4):
        world.run(steps=rnd.randrange(200))
        whole = [wire for wire in world.wires if not wire.broken]
        if whole:
            world.break_wire(rnd.choice(whole))
    world.run()
    check_only_what_breaks_may_have_carried_failed(world)
    after = [replace(key, name=f"after {key.name}") for key, *_ in chains] + [
        replace(key, salt=1009) for key, *_ in chains
    ]
    world.plan_all([key] for key in after)
    world.run()
    world.check_done(after)
    world.check_at_rest(aborted=100)
    assert not world.violations


@settings(max_examples=60)
@given(size=st.integers(2, 6), seed=seeds, weather=weathers)
def test_news_of_a_break_however_late_harms_nothing_that_was_posted_when_the_senders_knew(size, seed, weather):
    rnd = random.Random(seed)
    before = [replace(key, overlapping=True) for key in random_specs(rnd, size, 6)]
    world = World(size, weather)
    world.plan_all([key] for key in before)
    world.run(steps=rnd.randrange(300))
    posts = [token for token in world.tokens if token[0] == world._post_next]
    for post in posts:  # who has not posted yet does so now: what follows comes later on every rank
        world.tokens.remove(post)
        post[0](*post[1:])
    whole = [wire for wire in world.wires if not wire.broken]
    for wire in rnd.sample(whole, rnd.randint(0, len(whole))):
        world.break_wire(wire)
        world._broken_for_sender(wire)
    after = [replace(key, salt=1009) for key in before]
    world.plan_all([key] for key in after)
    world.run()
    world.check_done(after)
    check_only_what_breaks_may_have_carried_failed(world)
    world.check_at_rest(aborted=100)


@pytest.mark.parametrize("noticed_by", ["sender", "receiver", "both"])
def test_lost_chunks_of_broken_link_fail_both_ends(noticed_by):
    ways = (GraphPair.of(specs.tree(random.Random(0), 2, root=1)),)
    first, lost = (Spec(name, Verb.ALL_REDUCE, (0, 1), ways, (3,)) for name in ("first", "lost"))
    world = World(2)
    world.plan_all([[first]])
    world.run()
    wire = world.wire(1, 0)
    world.break_wire(wire, noticed_by)
    noticing, world.tokens = world.tokens, []
    world.plan_all([[lost]])
    world.run()
    at_leaf, at_root = (world.memories[lost, 0, rank] for rank in (0, 1))
    assert isinstance(at_root, Memory)
    assert isinstance(at_leaf, Memory)
    assert not at_leaf.done
    world._let_go(wire)
    world.run()
    assert at_root.done  # it believes that all is sent
    world.tokens += noticing
    world.run()
    assert at_leaf.cause is not None
    assert at_leaf.cause.kind is CauseKind.LINK
    after = replace(lost, salt=1)
    world.plan_all([[after]])
    world.run()
    world.check_done([first, after])
    world.check_at_rest()
