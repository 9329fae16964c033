"""The report in a real browser: no request, no error, true numbers, nothing overlapping on a phone or a laptop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.browser import NEEDS_CHROMIUM, assert_tidy, opened
from helpers.saved import COSTS, write_run
from offramp.common.formatting import millions
from offramp.measuring.policy import outcome
from offramp.reporting.groups import gather
from offramp.reporting.report import write_report

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    for seed in (0, 1):
        write_run(root / f"runs/baseline/seed-{seed}", seed=seed, skill=0.8)
        write_run(root / f"runs/learned/seed-{seed}", "digits-learned", seed=seed, skill=1.6)
    write_report([root / "runs"], root / "report.html")
    return root


@pytest.fixture(params=[400, 1400])
def page(request: pytest.FixtureRequest, browser: Any, folder: Path) -> Iterator[Any]:
    """The page at a phone's and a laptop's width; whatever it asks for or complains of is collected."""
    with opened(browser, (folder / "report.html").as_uri(), request.param) as page:
        page.wait_for_selector("#images .thumbs i")
        yield page


def test_it_asks_for_nothing_and_complains_of_nothing(page: Any) -> None:
    page.locator("#budget").fill("10")
    page.locator("input[value=q]").check()
    page.locator("#run").select_option("3")
    page.locator("summary").first.click()
    assert [url for url in page.requests if not url.startswith("data:")] == [page.url]
    assert page.complaints == []


def test_the_slider_shows_the_numbers_that_python_computes(page: Any, folder: Path) -> None:
    every = [run for group in gather([folder / "runs"]) for run in group.runs]
    assert page.locator("input[value=q]").is_checked()  # the lines show this rule
    for number, family, step in ((0, "searched", 0), (1, "q", 133), (2, "searched", 250), (3, "q", 400)):
        page.locator("#run").select_option(str(number))
        page.locator(f"input[value={family}]").check()
        page.locator("#budget").fill(str(step))
        run = every[number]
        assert run.policies is not None
        budget = COSTS[0] * (COSTS[-1] / COSTS[0]) ** (step / 400)
        fitting = [p for p in run.policies.family(family) if p.mul_adds <= budget * (1 + 1e-12)]
        policy = fitting[-1] if fitting else run.policies.family(family)[0]
        own = outcome(run.predictions, policy.thresholds, COSTS)
        assert page.inner_text("#top1") == f"{100 * own.top1:.2f} %"
        assert page.inner_text("#cost") == millions(own.cost)
        assert page.inner_text("#saved") == f"{100 * (1 - own.cost / COSTS[-1]):.1f} %"
        assert page.inner_text("#budget-text") == millions(budget)
        shares = page.locator("#exits .share").all_inner_texts()
        assert shares == [f"{100 * share:.1f} %" for share in own.shares]
        thresholds = page.locator("#exits .from").all_inner_texts()
        assert all(f"{t:.4f}" in text for t, text in zip(policy.thresholds, thresholds, strict=False) if t < 2)
        if family == "q":
            assert f"q = {policy.q}" in page.inner_text("#against")


def test_the_operating_point_lies_where_the_policy_does(page: Any) -> None:
    """At its largest budget the searched policy's circle is right of and above the one at the smallest."""
    places = []
    for step in ("0", "400"):
        page.locator("#budget").fill(step)
        places.append(page.locator("circle.operating").bounding_box())
    assert places[1]["x"] > places[0]["x"] and places[1]["y"] < places[0]["y"]
    frame = page.locator("#main-figure svg").bounding_box()
    for place in places:
        assert frame["x"] < place["x"] < frame["x"] + frame["width"]
        assert frame["y"] < place["y"] < frame["y"] + frame["height"]


def test_images_move_with_the_budget(page: Any) -> None:
    def first_exit() -> int:
        words = page.locator("#images .leaving").first.locator(".strip > span").all_inner_texts()
        return sum(int(text.split(": ")[1]) for text in words)

    from playwright.sync_api import expect

    title = page.locator("#images h3").first
    page.locator("input[value=searched]").check()
    page.locator("#budget").fill("0")
    expect(title).to_contain_text("100.0")
    assert first_exit() == 40
    page.locator("#budget").fill("400")
    expect(title).not_to_contain_text("100.0")
    assert first_exit() < 40


PARTS = (
    "h1, h2, h3, p, figure, table, select, label, input, .numbers div, .exit > *, .thumbs i, th, td, summary, "
    "figcaption, footer"
)


def test_nothing_overlaps_and_nothing_is_cut_off(page: Any) -> None:
    assert_tidy(page, PARTS)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_reading_needs_no_script_and_no_colour(page: Any) -> None:
    """The answer and the tables are there for a screen reader, and every figure says what it shows."""
    assert page.inner_text("#answer").startswith("At equal accuracy")
    assert page.locator("figure[role=img][aria-label]").count() == page.locator("figure").count() > 4
    assert page.locator("table").count() >= 4
    assert "mul-adds per image" in page.locator("#budget").get_attribute("aria-valuetext")
