"""Drawings are read back: what they show must be the graphs."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfcomm.core.graph import Graph, GraphPair
from kfcomm.errors import ConfigError
from kfcomm.strategies import Strategy, build, from_edges, names
from kfcomm.strategies.draw import as_svg, as_text
from kfcomm.strategies.placement import RADIUS, Placement, in_boxes, on_circle
from kfcomm.types import Layout
from tests.strategies.layouts import LAYOUTS, trees

SVG = "{http://www.w3.org/2000/svg}"


def read_outline(lines: list[str]) -> dict[int, int]:
    """The parent of every rank of a drawn tree."""
    parents: dict[int, int] = {}
    above: dict[int, int] = {}
    for line in lines:
        found = re.match(r"^(?P<indent>[ │]*)(?P<branch>[├└][─═]{2} )?(?P<ranks>\d+(, \d+)*)(  host \d+)?$", line)
        assert found, line
        level = len(found["indent"]) // 4 + 1 if found["branch"] else 0
        for rank in map(int, found["ranks"].split(", ")):
            parents[rank] = above[level - 1] if level else rank
            above[level] = rank
    return parents


@given(trees(max_size=24), st.data())
def test_an_outline_shows_the_tree_and_its_hosts(tree: Graph, data: st.DataObject) -> None:
    layout = Layout.of(data.draw(st.lists(st.integers(0, 3), min_size=tree.size, max_size=tree.size)))
    text = as_text(Strategy("any", (GraphPair.of(tree),)), layout)
    outline = text.split("same way down\n")[-1].splitlines()
    if "reduce    " in text:
        assert all(len(below) <= 1 for below in tree.children)
        return
    assert read_outline(outline) == dict(enumerate(tree.parents))
    crossings = sum(layout.hosts[a] != layout.hosts[b] for a, b in tree.edges)
    assert text.count("══") <= crossings
    assert (crossings == 0) == ("══" not in text)


def test_a_tree_over_two_hosts() -> None:
    layout = Layout.even(8, 2)
    assert as_text(build("tree", layout), layout).splitlines() == [
        "tree: 8 ranks on 2 hosts, 1 graph pair",
        "all_reduce: 4 steps; per byte of message the busiest rank moves 4, the busiest host 1",
        "host 0: 0-3  host 1: 4-7",
        "",
        "root 0",
        "  reduce: up to the root; broadcast: the same way down",
        "  0  host 0",
        "  ├── 1, 2, 3",
        "  └══ 4  host 1",
        "      └── 5, 6, 7",
    ]


def test_a_ring_over_two_hosts() -> None:
    layout = Layout.even(4, 2)
    lines = as_text(build("ring", layout), layout).splitlines()
    assert lines[4:] == [
        "pair 0 of 0..3, root 0",
        "  reduce    1 ⇒ 2 → 3 ⇒ 0",
        "  broadcast 0 → 1 ⇒ 2 → 3",
        "the others: this one, all ranks shifted round; roots 1-3",
    ]
    asked = as_text(build("ring", layout), layout, pair=2).splitlines()
    assert asked[4:] == ["pair 2 of 0..3, root 2", "  reduce    3 ⇒ 0 → 1 ⇒ 2", "  broadcast 2 → 3 ⇒ 0 → 1"]


def test_long_chains_are_wrapped() -> None:
    layout = Layout.even(64)
    lines = as_text(build("ring", layout), layout).splitlines()
    assert max(map(len, lines)) <= 100
    assert [int(rank) for rank in re.findall(r"\d+", " ".join(lines).partition("broadcast ")[2])[:64]] == list(
        range(64)
    )


@pytest.mark.parametrize(
    ("name", "size", "hosts", "words"),
    [
        ("clique", 8, 1, "this one, all ranks shifted round; roots 1-7"),
        ("multi_star", 12, 3, "this one, all ranks shifted round; roots 4, 8"),
        ("multi_star", 8, 2, "this one, all ranks shifted round; root 4"),
        ("binomial", 8, 1, "this one, seen from another root; roots 1-7"),
        ("binomial", 12, 1, "this one, seen from another root; roots 1-11"),
        ("multi_binary_tree_star", 7, 3, "other trees; roots 3, 5"),
    ],
)
def test_how_the_other_pairs_differ(name: str, size: int, hosts: int, words: str) -> None:
    layout = Layout.even(size, hosts)
    assert as_text(build(name, layout), layout).splitlines()[-1] == f"the others: {words}"


def test_graphs_that_differ_are_both_drawn() -> None:
    up, down = Graph.from_edges(4, [(0, 1), (1, 2), (1, 3)]), Graph.from_edges(4, [(0, 3), (3, 2), (2, 1)])
    text = as_text(Strategy("odd", (GraphPair(up, down),)), Layout.even(4))
    assert "  reduce: up to the root\n  0  host 0\n  └── 1\n      └── 2, 3\n  broadcast 0 → 3 → 2 → 1\n" in text
    other = as_text(Strategy("odd", (GraphPair(down, up),)), Layout.even(4))
    assert "  reduce    1 → 2 → 3 → 0\n  broadcast: down from the root\n" in other


def test_shares_are_said() -> None:
    layout = Layout.even(3)
    shared = replace(build("clique", layout).select(0), shares=(2, 1, 3))
    assert "pair 1 of 0..2, root 1, 1/6 of a message" in as_text(shared, layout, 1)
    assert "the others: this one, all ranks shifted round; roots 1-2; shares 2:1:3" in as_text(shared, layout)


def test_another_order_of_children_is_said() -> None:
    layout = Layout.even(4)
    assert "the broadcast sends in another order" in as_text(build("binomial", layout), layout)
    assert "another order" not in as_text(build("star", layout), layout)


def test_a_sized_strategy_is_drawn_for_each_size() -> None:
    layout = Layout.even(4, 2)
    auto = build("auto", layout)
    text = as_text(auto, layout)
    assert re.search(r"^auto, 0 to \d+ bytes:\nclique: 4 ranks", text)
    assert re.search(r"\nauto, from \d+ bytes:\ninside: binomial, between: ring: 4 ranks", text)


def test_steps_of_an_exchange_are_drawn() -> None:
    layout = Layout.even(4, 2)
    text = as_text(build("halving_doubling", layout), layout)
    assert "  step 1: 2 parts → 1\n  step 2: 1 part ⇒ 2\n  step 3: 1 part ⇒ 2\n  step 4: 2 parts → 1\n" in text
    assert "  step 1: 1 contribution ⇒ 3\n" in as_text(build("dissemination", layout), layout)


def test_of_a_direct_strategy_it_is_said_that_long_messages_go_elsewhere() -> None:
    layout = Layout.even(4)
    short, long = (as_text(build("direct", layout).select(nbytes), layout) for nbytes in (0, 1 << 30))
    assert "nothing comes down" in short
    assert "messages of more than 1 MiB go along other graphs" in short
    assert "broadcast" in long
    assert "other graphs" not in long


@pytest.mark.parametrize("pair", [-1, 1])
def test_pairs_and_sizes_that_are_not_there(pair: int) -> None:
    layout = Layout.even(4)
    star = build("star", layout).select(0)
    for draw in (as_text, as_svg):
        with pytest.raises(ConfigError, match=rf"'star' has graph pairs 0\.\.0, no pair {pair}"):
            draw(star, layout, pair)
        with pytest.raises(ConfigError, match="'star' is for 4 ranks, not for 5"):
            draw(star, Layout.even(5), 0)


@given(LAYOUTS, st.sampled_from(names()), st.data())
def test_a_picture_has_every_rank_and_every_send(layout: Layout, name: str, data: st.DataObject) -> None:
    strategy = build(name, layout).select(1 << 20)
    pair = data.draw(st.integers(0, len(strategy.pairs) - 1))
    picture = ElementTree.fromstring(as_svg(strategy, layout, pair))
    assert len(picture.findall(f"{SVG}circle")) == layout.size
    labels = [text.text for text in picture.findall(f"{SVG}text")]
    assert {str(rank) for rank in range(layout.size)} <= set(labels)
    arrows = [path for path in picture.findall(f"{SVG}path") if path.get("marker-end")]
    for phase in ("reduce",) if strategy.direct else ("reduce", "broadcast"):
        in_legend = 1
        assert sum(path.get("marker-end") == f"url(#{phase})" for path in arrows) == layout.size - 1 + in_legend
    _, _, width, height = map(float, (picture.get("viewBox") or "").split())
    assert max(width, height) <= 700 + 150 * layout.size  # a chain of hosts is the longest: a box and an arrow each


def test_names_are_escaped() -> None:
    assert "&lt;b&gt;" in as_svg(from_edges(2, [(0, 1)], name="<b>"), Layout.even(2))


def test_hosts_are_boxes_or_bands() -> None:
    layout = Layout.even(12, 3)
    boxes = ElementTree.fromstring(as_svg(build("tree", layout).select(0), layout)).findall(f"{SVG}rect")
    assert len(boxes) == 1 + 3
    for other, bands in ((layout, 3), (Layout.of([0, 1] * 10), 20)):
        ring = ElementTree.fromstring(as_svg(build("ring", other).select(0), other))
        assert len([path for path in ring.findall(f"{SVG}path") if path.get("stroke-opacity")]) == bands
    assert len(ring.findall(f"{SVG}rect")) == 1


def assert_apart(placement: Placement) -> None:
    for (x0, y0), (x1, y1) in itertools.combinations(placement.points, 2):
        assert math.hypot(x1 - x0, y1 - y0) > 2 * RADIUS


@given(LAYOUTS)
def test_ranks_on_a_circle_do_not_touch(layout: Layout) -> None:
    placement = on_circle(range(layout.size), layout)
    assert_apart(placement)
    assert all(math.isclose(math.hypot(x, y), placement.radius) for x, y in placement.points)


@given(LAYOUTS, st.sampled_from(names()))
def test_ranks_lie_apart_in_their_hosts_boxes_and_boxes_apart(layout: Layout, name: str) -> None:
    placement = in_boxes(build(name, layout).select(1 << 20).pairs[-1].reduce, layout)
    assert_apart(placement)
    boxes = {box.host: box for box in placement.boxes}
    assert sorted(boxes) == list(range(layout.num_hosts))
    for host, (x, y) in zip(layout.hosts, placement.points, strict=True):
        box = boxes[host]
        assert box.x + RADIUS <= x <= box.x + box.width - RADIUS
        assert box.y + RADIUS <= y <= box.y + box.height - RADIUS
    for one, two in itertools.combinations(placement.boxes, 2):
        beside = one.x + one.width <= two.x or two.x + two.width <= one.x
        assert beside or one.y + one.height <= two.y or two.y + two.height <= one.y


def test_too_many_hosts_for_one_row_take_several() -> None:
    layout = Layout.even(64, 32)
    placement = in_boxes(build("tree", layout).select(0).pairs[0].reduce, layout)
    assert len({box.y for box in placement.boxes}) > 2


def curves(picture: ElementTree.Element) -> list[tuple[str, list[float]]]:
    """The phase of each arrow, and its six coordinates."""
    found = []
    for path in picture.findall(f"{SVG}path"):
        numbers = [float(one) for one in re.findall(r"-?\d+\.\d", path.get("d") or "")]
        if path.get("marker-end") and len(numbers) == 6:
            found.append((str(path.get("marker-end")), numbers))
    return found


@pytest.mark.parametrize(("name", "hosts"), [("direct", 1), ("tree", 4), ("star", 1), ("chain_star", 4)])
def test_arrows_pass_circles_by(name: str, hosts: int) -> None:
    layout = Layout.even(12, hosts)
    picture = ElementTree.fromstring(as_svg(build(name, layout).select(1 << 30), layout))
    centres = [(float(one.get("cx") or 0), float(one.get("cy") or 0)) for one in picture.findall(f"{SVG}circle")]
    for _, (x0, y0, x1, y1, x2, y2) in curves(picture):
        ends = [min(centres, key=lambda one: math.dist(one, end)) for end in ((x0, y0), (x2, y2))]
        for part in (0.25, 0.5, 0.75):
            x = (1 - part) ** 2 * x0 + 2 * part * (1 - part) * x1 + part**2 * x2
            y = (1 - part) ** 2 * y0 + 2 * part * (1 - part) * y1 + part**2 * y2
            assert all(math.dist((x, y), one) > RADIUS for one in centres if one not in ends)


def test_heads_of_many_arrows_have_room() -> None:
    layout = Layout.even(16, 1)
    picture = ElementTree.fromstring(as_svg(build("star", layout).select(0), layout))
    heads = [(x2, y2) for phase, (*_, x2, y2) in curves(picture) if "reduce" in phase]
    assert len(heads) == 15
    assert all(math.dist(one, two) > 7 for one, two in itertools.combinations(heads, 2))


def test_many_ranks_are_drawn_without_detours() -> None:
    layout = Layout.even(130, 1)
    assert len(curves(ElementTree.fromstring(as_svg(build("star", layout).select(0), layout)))) == 2 * 129
