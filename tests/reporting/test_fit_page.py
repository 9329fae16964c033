"""The report of `offramp fit` in a real browser: what was chosen comes first, and everybody can read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import NEEDS_CHROMIUM, accessible, assert_tidy, opened
from helpers.saved import COSTS, write_run
from offramp.measuring.calibrate import PolicyRequest, calibrate_run
from offramp.reporting.fitted import _against
from offramp.reporting.report import write_report

pytestmark = NEEDS_CHROMIUM

SENTENCE = "fitted/bundle, a cascade (lite0 at 96 px, then lite2 at 192 px), has 90.0 % of 500 test images right."
CHOSEN = "lite0 at 96 px, then lite2 at 192 px, logits summed"


def family(kind: str, name: str, run: str, *known: tuple[float, float]) -> dict[str, Any]:
    points = [{"mul_adds": m, "ms": None, "top1": top1, "interval": [top1 - 0.03, top1 + 0.02]} for m, top1 in known]
    return {"family": kind, "name": name, "run": run, "points": points}


FIT = {
    "schema": 1,
    "folder": "My <photos>",
    "asked": "the cheapest network within 0.5 points of the single network",
    "unit": "mul_adds",
    "families": [
        family("single", "lite2 at 192 px", "large", (5e6, 0.91)),
        family("single", "lite0 at 96 px", "small", (1e6, 0.85)),
        family("cascade", CHOSEN, "networks/both", (1e6, 0.85), (2e6, 0.9), (4e6, 0.92), (6e6, 0.921)),
        family("exits", "exits on lite2 at 192 px", "exits", (2e6, 0.84), (5e6, 0.9)),
    ],
    "chosen": {"family": "cascade", "name": CHOSEN, "run": "networks/both", "point": 1},
    "held_out": {"samples": 614, "folds": 0},
    "drop": {"points": 0.25, "interval": [-0.1, 0.6]},
    "reference": {"name": "lite2 at 192 px", "run": "large", "mul_adds": 5e6, "ms": 4.0, "top1": 0.91},
    "test": {
        "top1": 0.9,
        "interval": [0.87, 0.92],
        "samples": 500,
        "mul_adds": 2e6,
        "drop": 1.0,
        "drop_interval": [-0.4, 2.4],
        "ms": 2.0,
        "reference_ms": 4.0,
        "timed_with": "onnx on a CPU, 1 image at a time",
    },
    "sentence": SENTENCE,
    "warnings": ["3 of 10 classes have fewer than 20 images to train on (hat, skirt, belt)"],
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fitted")
    run = write_run(root / "networks/both", skill=1.2)
    calibrate_run(run, PolicyRequest(budget_mul_adds=2e6))
    table = {"machine": "a box", "stage_ms": {str(k): {"1": 0.5 * k} for k in range(1, len(COSTS) + 1)}}
    (root / "times.json").write_text(json.dumps(table | {"policy_ms": {"leaving_early": 2.0, "whole_network": 4.0}}))
    (root / "fit.json").write_text(json.dumps(FIT))
    return write_report([run], root / "report.html", times=root / "times.json").page


@pytest.fixture(params=[390, 1400])
def page(request: pytest.FixtureRequest, browser: Any, report: Path) -> Iterator[Any]:
    """The page at a phone's and a laptop's width."""
    with opened(browser, report.as_uri(), request.param) as page:
        page.wait_for_selector("#figure-families svg")
        yield page


def test_it_opens_on_what_was_chosen(page: Any) -> None:
    assert page.inner_text("h1") == "My <photos>" and page.inner_text("#answer") == SENTENCE
    more = page.locator("p.more").all_inner_texts()
    assert any(
        "0.25 points fewer right (95 %: 0.10 more to 0.60 fewer) than the single network" in text for text in more
    )
    assert any("fewer than 20 images" in text for text in more)
    assert page.locator("h2").first.inner_text() == "What was tried, and what was chosen"
    words = page.locator("#figure-families [role=img]").get_attribute("aria-label")
    assert f"Chosen: {CHOSEN}, 90.0 % (87.0 to 92.0 %) at 2.00M mul-adds per image." in words


def test_its_table_says_what_is_lost_and_how_sure_that_is(page: Any) -> None:
    table = page.locator("table", has_text="What ships, beside the single network").first
    assert "500 test images" in table.locator("caption").inner_text()
    rows = [row.locator("th, td").all_inner_texts() for row in table.locator("tbody tr").all()]
    assert "-1.00 (-2.40 to +0.40)" in rows[0] and rows[1][0] == "lite2 at 192 px"
    assert rows[0][-1] == "2.00" and rows[1][-1] == "1.00"
    if page.viewport_size["width"] == 1400:
        assert table.evaluate("(table) => table.scrollWidth <= table.parentElement.clientWidth")


def test_no_difference_has_no_minus() -> None:
    assert _against(0.0, (-10.8, 10.8)) == "+0.00 (-10.80 to +10.80)"


def test_it_asks_for_nothing_and_complains_of_nothing(page: Any) -> None:
    assert [url for url in page.requests if not url.startswith("data:")] == [page.url]
    assert page.complaints == []


def test_nothing_overlaps_and_nothing_is_cut_off(page: Any) -> None:
    parts = "h1, h2, h3, p:not(.unseen), figure, table, th, td, summary, figcaption, footer"
    assert_tidy(page, parts)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert_tidy(page, parts)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert accessible(page) == []
