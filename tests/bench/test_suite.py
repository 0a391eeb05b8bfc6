"""Options become cases, the same ones in every process, and times become figures; workloads are those published."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace

import pytest

from kfcomm.bench.suite import COLLECTIVES, BenchPlace, BenchResult, CallMode, Case, Suite
from kfcomm.bench.workloads import WORKLOADS, num_parameters
from kfcomm.errors import ConfigError
from kfcomm.transports.registry import LINKS
from kfcomm.types import Op, Verb

FULL = Suite(
    collectives=(Verb.ALL_REDUCE, Verb.ALL_GATHER),
    sizes=(1000, 4096),
    workloads=("resnet50",),
    modes=(CallMode.FUSED, CallMode.ONE_BY_ONE),
    strategies=("ring", "auto"),
    transports=LINKS,
    dtypes=("float32", "float64"),
    op=Op.MAX,
    iterations=7,
    warmup=1,
    blocking=True,
)


def test_every_combination_is_a_case_and_those_of_a_transport_follow_each_other() -> None:
    cases = FULL.cases(3)
    assert len(cases) == len(set(cases)) == len(LINKS) * 2 * 2 * (2 * 2 + 2)
    assert tuple(dict.fromkeys(case.transport for case in cases)) == LINKS
    changes = sum(one.transport != other.transport for one, other in zip(cases, cases[1:], strict=False))
    assert changes == len(LINKS) - 1
    assert {(case.iterations, case.warmup) for case in cases} == {(7, 1)}


def test_a_size_is_cut_to_whole_elements_and_whole_parts() -> None:
    sizes = {
        (case.collective, case.dtype): case.nbytes
        for case in FULL.cases(3)
        if case.workload is None and case.nbytes < 1001
    }
    assert sizes == {
        (Verb.ALL_REDUCE, "float32"): 1000,
        (Verb.ALL_REDUCE, "float64"): 1000,
        (Verb.ALL_GATHER, "float32"): 996,
        (Verb.ALL_GATHER, "float64"): 984,
    }


def test_only_what_reduces_has_an_op() -> None:
    assert {(case.collective, case.op) for case in FULL.cases(2)} == {
        (Verb.ALL_REDUCE, Op.MAX),
        (Verb.ALL_GATHER, None),
    }


def test_larger_messages_get_fewer_iterations() -> None:
    cases = Suite(sizes=(4, 16 << 20, 1 << 30)).cases(2)
    assert [case.iterations for case in cases] == [200, 32, 10]


def test_suites_and_cases_survive_the_way_to_another_process() -> None:
    for suite in (FULL, replace(FULL, device=BenchPlace.GPU)):
        assert Suite.from_json(suite.to_json()) == suite
    assert [Case.from_wire(asdict(case)) for case in FULL.cases(2)] == FULL.cases(2)


@pytest.mark.parametrize("size", [2, 4, 64])
def test_factors_are_those_of_nccl_tests(size: int) -> None:
    share = (size - 1) / size
    assert {verb: traits.factor(size) for verb, traits in COLLECTIVES.items()} == {
        Verb.ALL_REDUCE: 2 * share,
        Verb.REDUCE: 1,
        Verb.BROADCAST: 1,
        Verb.GATHER: share,
        Verb.ALL_GATHER: share,
        Verb.SCATTER: share,
        Verb.REDUCE_SCATTER: share,
        Verb.ALL_TO_ALL: share,
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategies": ("ringg",)}, "ringg"),
        ({"transports": ("carrier",)}, "carrier"),
        ({"transports": ("nccl",)}, "--device gpu"),
        ({"workloads": ("alexnet",)}, "alexnet"),
        ({"dtypes": ("float8",)}, "float8"),
        ({"op": Op.AVG, "dtypes": ("int32",)}, "avg"),
        ({"op": Op.XOR, "collectives": (), "workloads": ("vgg16",)}, "xor"),
        ({"sizes": (3,)}, "3 B"),
        ({"sizes": (12,)}, "each of 4 ranks"),
    ],
)
def test_impossible_option_is_refused_by_name(changes: dict[str, object], words: str) -> None:
    FULL.check(4)
    with pytest.raises(ConfigError, match=words):
        replace(FULL, **changes).check(4)  # type: ignore[arg-type]


def test_the_op_does_not_matter_where_nothing_is_reduced() -> None:
    Suite(collectives=(Verb.BROADCAST,), op=Op.AVG, dtypes=("int32",)).check(2)


def case(verb: Verb = Verb.ALL_REDUCE, nbytes: int = 1_000_000) -> Case:
    (made,) = Suite(collectives=(verb,), sizes=(nbytes,)).cases(4)
    return made


@pytest.mark.parametrize(
    ("times", "p50", "p99"),
    [
        ([3.0], 3, 3),
        ([4.0, 1.0], 2.5, 4),
        ([5.0, 1.0, 2.0], 2, 5),
        ([float(number) for number in range(1, 101)], 50.5, 99),
        ([float(number) for number in range(1, 201)], 100.5, 198),
    ],
)
def test_the_median_and_the_time_that_99_of_100_do_not_exceed(times: list[float], p50: float, p99: float) -> None:
    result = BenchResult(case(), 4, tuple(times))
    assert (result.p50_s, result.p99_s) == (p50, p99)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    result = BenchResult(case(), 4, (0.001, 0.002, 0.004))
    assert result.algbw == pytest.approx(0.5)  # 10⁶ bytes in 2 ms
    assert result.busbw == pytest.approx(0.75)
    assert result.bandwidth(result.p99_s) == pytest.approx(0.25)
    assert BenchResult(case(Verb.BROADCAST), 4, (0.002,)).busbw == pytest.approx(0.5)
    assert BenchResult(case(Verb.ALL_TO_ALL), 4, (0.002,)).busbw == pytest.approx(0.375)


@pytest.mark.parametrize(
    ("name", "tensors", "parameters"),
    [("resnet50", 214, 25_583_592), ("vgg16", 32, 138_357_544), ("bert-base", 199, 109_482_240)],
)
def test_tensors_and_parameters_are_as_published(name: str, tensors: int, parameters: int) -> None:
    shapes = WORKLOADS[name]()
    assert (len(shapes), num_parameters(shapes)) == (tensors, parameters)


def test_resnet50_has_the_convolutions_of_its_table() -> None:
    kernels = Counter(shape[0] for shape in WORKLOADS["resnet50"]() if len(shape) == 4)
    assert kernels == {7: 1, 3: 16, 1: 36}


def test_vgg16_has_most_of_its_parameters_in_one_layer() -> None:
    assert max(WORKLOADS["vgg16"](), key=lambda shape: num_parameters((shape,))) == (25088, 4096)


def test_bert_base_has_twelve_layers_alike() -> None:
    shapes = WORKLOADS["bert-base"]()
    assert shapes[:3] == ((30522, 768), (512, 768), (2, 768))
    assert {shapes[5 + 16 * layer : 21 + 16 * layer] for layer in range(12)} == {shapes[5:21]}
