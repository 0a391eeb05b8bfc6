"""The pytest plugin, in a pytest of its own: meaning of the mark, errors of a wrong one, cost."""

from __future__ import annotations

import pytest

from tests.test_imports import loaded, own

INI = "[pytest]\nasyncio_default_fixture_loop_scope = function\naddopts = --strict-markers -p no:cacheprovider"


def outcomes(pytester: pytest.Pytester, test: str, *arguments: str) -> pytest.RunResult:
    pytester.makeini(INI)
    pytester.makepyfile(test)
    return pytester.runpytest_subprocess(*arguments)


def test_the_mark_says_what_the_world_is(pytester: pytest.Pytester) -> None:
    test = """
        import asyncio
        import pytest
        from hypothesis import HealthCheck, given, settings, strategies as st

        @pytest.mark.kfcomm(ranks=3, hosts=3)
        async def test_tasks(kfcomm_world):
            assert [comm.size for comm in kfcomm_world] == [3, 3, 3]
            assert asyncio.get_running_loop()

        @pytest.mark.kfcomm
        def test_threads(kfcomm_world):
            assert len(kfcomm_world) == 2

        def test_without_a_mark(kfcomm_world):
            assert len(kfcomm_world) == 2

        @pytest.mark.kfcomm(ranks=2)
        @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=5)
        @given(number=st.integers(0, 100))
        async def test_searched(kfcomm_world, number):
            assert await kfcomm_world.run(lambda comm: comm.all_reduce(number)) == [2 * number] * 2

        @pytest.mark.kfcomm(ranks=2)
        class TestClass:
            async def test_method(self, kfcomm_world):
                assert len(kfcomm_world) == 2
        """
    outcomes(pytester, test).assert_outcomes(passed=5)


def test_a_wrong_mark_is_explained(pytester: pytest.Pytester) -> None:
    test = """
        import pytest

        @pytest.mark.kfcomm(4)
        def test_positional(kfcomm_world): ...

        @pytest.mark.kfcomm(rank=4)
        def test_misspelt(kfcomm_world): ...
        """
    result = outcomes(pytester, test)
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines_random(["*takes keywords only, as in kfcomm(ranks=4)*", "*'rank'*"])


def test_an_asynchronous_test_says_what_it_lacks(pytester: pytest.Pytester) -> None:
    test = """
        import pytest

        @pytest.mark.kfcomm(ranks=2)
        async def test_it(kfcomm_world): ...
        """
    pytester.makepyfile(test)
    result = pytester.runpytest_subprocess("-p", "no:asyncio", "-p", "no:cacheprovider")
    result.stdout.fnmatch_lines(["*an asynchronous test with kfcomm_world needs pytest-asyncio*"])


def test_the_mark_is_among_those_that_pytest_knows(pytester: pytest.Pytester) -> None:
    outcomes(pytester, "", "--markers").stdout.fnmatch_lines(["@pytest.mark.kfcomm(ranks=2, *"])


def test_unused_plugin_loads_few_small_modules() -> None:
    modules = loaded("import kfcomm.testing.pytest_plugin", beyond="import sys, pytest")
    of_kfcomm = {
        "kfcomm",
        "kfcomm.errors",
        "kfcomm.common",
        "kfcomm.common.imports",
        "kfcomm.common.version",
        "kfcomm.types",
    }
    assert own(modules) <= {*of_kfcomm, "kfcomm.testing", "kfcomm.testing.pytest_plugin"}
    assert "numpy" not in modules
