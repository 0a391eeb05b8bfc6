"""Report pages of commands and examples in headless Chromium: headline, fit, themes, data, no errors."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench import chromium
from kfcomm.bench.suite import Suite
from kfcomm.cli import main
from kfcomm.common.html import ReportPage, Section
from kfcomm.probe.record import Probe
from kfcomm.probe.report import page as probe_page
from kfcomm.types import Layout
from tests.bench.test_report import SUITE, report
from tests.chromium import needed
from tests.launch.launched import ROOT

SIZES = "1KiB:64MiB"
TOO_WIDE = (
    "[document.documentElement, ...document.querySelectorAll('section, section div, table')]"
    ".filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.className || one.tagName)"
)
TEXT_OF_KIND = "document.querySelector('.kind').textContent"
THEMED = (("body", "color"), ("section", "backgroundColor"))
STYLE = "getComputedStyle(document.querySelector({!r})).{}"


def from_command(path: Path, *arguments: str) -> None:
    done = CliRunner().invoke(main, [*arguments, "--html", str(path)])
    assert done.exit_code == 0, done.output


def bench(path: Path) -> None:
    path.write_text(report(SUITE).as_html(), "utf-8")


def bench_of_long_names(path: Path) -> None:
    names = ("halving_doubling", "inside: direct, between: double_tree")
    path.write_text(report(Suite(sizes=(1 << 10, 1 << 20), strategies=names)).as_html(), "utf-8")


def topologies(path: Path) -> None:
    from_command(path, "bench", "topologies", "--simulate", "4x2", "--sizes", SIZES)


def simulate(path: Path) -> None:
    from_command(path, "simulate", "--strategy", "ring,halving_doubling", "--hosts", "4x1,8x1", "--sizes", SIZES)


def simulate_workload(path: Path) -> None:
    layers = ", ".join(f"compute 1ms, 64KiB as layer{number}" for number in range(40))
    from_command(path, "simulate", "--strategy", "ring,tree", "--hosts", "2x1,4x2", "--workload", layers)


def probe(path: Path) -> None:
    latency = np.array([[1e-6 * (1 + abs(a - b)) for b in range(16)] for a in range(16)])
    path.write_text(probe_page(Probe(Layout.even(16, 4), latency, 1e3 / latency)), "utf-8")


def elastic(path: Path) -> None:
    example: Any = importlib.import_module("elastic")
    began_s = time.time()
    rows = [[number, began_s + number / 10, list(range(2 + number // 3)), 8, 1 / (1 + number)] for number in range(9)]
    example.draw(example.State(rows=rows, used=np.full(3, 20.0)), path)


def adaptive(path: Path) -> None:
    example: Any = importlib.import_module("adaptive_page")
    rows = [example.Row(n, 4 - n, 50.0 + n, 24 << n, 100.0, 3 + n // 2) for n in range(4)]
    why = "slowest link 2 -> 0, its MB/s 77.03, median MB/s 80.87, predicted gain 1.671; " * 3
    decisions = [example.Decided(2.0, "AvoidSlowLinks", "strategy star -> ring", why)]
    still = [example.Row(n, 4.0, 60.0, 24, 50.0, 3) for n in range(4)]
    example.draw([example.Run("adaptive", rows, decisions, slow_s=1.0), example.Run("batch of 24", still)], path)


MAKERS = (bench, bench_of_long_names, topologies, simulate, simulate_workload, probe, elastic, adaptive)


@pytest.mark.asyncio
@pytest.mark.parametrize("make", MAKERS)
async def test_page_has_a_headline_and_fits_in_both_themes(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed()
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    path = tmp_path / "page.html"
    make(path)
    colours = []
    for is_dark in (False, True):
        async with chromium.page(path.as_uri(), (1000, 800), dark=is_dark) as page:
            headline = await page.until(
                "document.readyState === 'complete' && document.querySelector('h1').textContent"
            )
            assert headline.endswith(".")
            assert await page.value("document.title") == f"{await page.value(TEXT_OF_KIND)}: {headline}"
            assert await page.value(TOO_WIDE) == []
            assert await page.value("document.querySelectorAll('pre, script').length") == 0
            colours.append(
                [await page.value(STYLE.format(*one)) for one in (("body", "color"), ("section", "backgroundColor"))]
            )
            assert page.errors == []
    assert len({one[0] for one in colours}) == len({one[1] for one in colours}) == 2


@pytest.mark.asyncio
async def test_charts_have_the_colours_of_the_theme_and_data_can_be_downloaded(tmp_path: Path) -> None:
    needed()
    path = tmp_path / "page.html"
    simulate(path)
    found = []
    for is_dark in (False, True):
        async with chromium.page(path.as_uri(), (1400, 800), dark=is_dark) as page:
            await page.until("document.querySelector('footer a')")
            found.append(await page.value(STYLE.format("svg text", "fill")))
            link = "document.querySelector('footer a')"
            data = await page.value(f"fetch({link}.href).then((told) => told.json())")
            assert await page.value(f"{link}.download") == "kfcomm-simulate.json"
            assert {one["strategy"] for one in data["results"]} == {"ring", "halving_doubling"}
            await page.call("Emulation.setEmulatedMedia", media="print")
            assert await page.value(STYLE.format("footer a", "display")) == "none"
            assert await page.value(STYLE.format(".numbers", "overflowY")) == "visible"  # all rows are printed
    assert len(set(found)) == 2


@pytest.mark.asyncio
async def test_markup_is_shown_as_text(tmp_path: Path) -> None:
    needed()
    path, markup = tmp_path / "page.html", "<b onclick='x'>&amp;</b>"
    text = ReportPage(markup, markup, [markup], [Section(markup, "<p>content</p>")], markup, {"a": markup}).as_html()
    path.write_text(text, "utf-8")
    async with chromium.page(path.as_uri()) as page:
        assert await page.until("document.querySelector('h1').textContent") == markup
        assert await page.value("document.querySelectorAll('b').length") == 0
        assert await page.value("document.querySelector('h2').textContent") == markup
        assert page.errors == []
