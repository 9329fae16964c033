"""The report in a real browser: no request, no error, true numbers, nothing overlapping on a phone or a laptop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.browser import NEEDS_CHROMIUM, accessible, assert_tidy, opened
from helpers.saved import COSTS, write_run
from offramp.common.formatting import millions
from offramp.measuring.calibrate import calibrate_run
from offramp.measuring.intervals import proportion_interval
from offramp.measuring.policy import outcome
from offramp.reporting.groups import gather
from offramp.reporting.report import write_report
from offramp.reporting.shipped import find_shipped

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    for seed in (0, 1):
        write_run(root / f"runs/baseline/seed-{seed}", seed=seed, skill=0.8)
        write_run(root / f"runs/learned/seed-{seed}", "digits-learned", seed=seed, skill=1.6)
    calibrate_run(root / "runs/learned/seed-1")
    times = {"machine": "a box", "stage_ms": {str(k): {"8": 4.0 * k} for k in (1, 2, 3)}}
    (root / "times.json").write_text(json.dumps(times))
    write_report([root / "runs"], root / "report.html", times=root / "times.json")
    return root


@pytest.fixture(params=[390, 1400])
def page(request: pytest.FixtureRequest, browser: Any, folder: Path) -> Iterator[Any]:
    """The page at a phone's and a laptop's width; whatever it asks for or complains of is collected."""
    with opened(browser, (folder / "report.html").as_uri(), request.param) as page:
        page.wait_for_selector("#images .thumbs i")
        yield page


def test_it_asks_for_nothing_and_complains_of_nothing(page: Any) -> None:
    page.locator("#budget").fill("10")
    page.locator("input[value=q]").check()
    page.locator("#run").select_option("3")
    page.locator("#budget").fill("300")
    page.locator("#back").click()
    page.locator("summary").first.click()
    assert [url for url in page.requests if not url.startswith("data:")] == [page.url]
    assert page.complaints == []


def test_it_opens_on_the_policy_that_ships(page: Any, folder: Path) -> None:
    shipped = find_shipped(gather([folder / "runs"]))
    assert shipped is not None
    assert page.locator("#run option:checked").inner_text() == "learned weights, seed 1 (ships)"
    assert page.inner_text("#which") == "The policy that ships." and page.locator("#back").is_hidden()
    assert page.inner_text("#top1") == f"{100 * shipped.top1:.2f} %" and page.inner_text("#cost") == millions(
        shipped.cost
    )
    assert shipped.policy.thresholds[0] == pytest.approx(threshold(page), abs=1e-4)
    page.locator("#budget").focus()
    page.keyboard.press("Home")
    assert page.inner_text("#which") == "Another policy." and page.inner_text("#cost") == "1.00M"
    page.keyboard.press("Shift+Tab")  # back to the thresholds: everything goes by keyboard
    page.locator("#back").press("Enter")
    assert page.inner_text("#cost") == millions(shipped.cost)
    page.locator("#run").select_option("0")
    assert page.inner_text("#which") == "Another policy."  # nobody chose one for that run


def threshold(page: Any) -> float:
    return float(page.locator("#exits .from").first.inner_text().split("is at least ")[1].split(",")[0])


def test_the_slider_shows_the_numbers_that_python_computes(page: Any, folder: Path) -> None:
    every = [run for group in gather([folder / "runs"]) for run in group.runs]
    assert page.locator("input[value=searched]").is_checked()  # the lines show this rule
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
        assert page.inner_text("#saved") == f"{100 * (1 - own.cost / COSTS[-1]):.1f} % saved"
        assert page.inner_text("#budget-text") == f"{millions(budget)} mul-adds"
        low, high = proportion_interval(round(500 * own.top1), 500)
        assert page.inner_text("#interval") == f"95 %: {100 * low:.1f} to {100 * high:.1f}"
        milliseconds = np.dot(own.shares, np.cumsum([4, 8, 12]) / 8)
        assert page.inner_text("#ms") == f"{float(f'{milliseconds:.3g}'):g} ms"
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
    frame = page.locator("#figure-accuracy svg").bounding_box()
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
    "h1, h2, h3, p:not(.unseen), figure, table, select, label, input, .numbers div, .exit > *, .thumbs i, th, td, "
    "summary, figcaption, footer, button, .hardest > li, .hardest img"
)


def test_nothing_overlaps_and_nothing_is_cut_off(page: Any) -> None:
    assert_tidy(page, PARTS)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert_tidy(page, PARTS)


def test_reading_needs_no_script_and_no_colour(page: Any) -> None:
    """The answer and the tables are there for a screen reader, and every figure has a title and says what it shows."""
    assert page.inner_text("#answer").startswith("Leaving early (learned weights, the policy that ships) saves")
    figures = page.locator("figure").all()
    assert len(figures) > 5
    for figure in figures:
        title = (
            figure.locator("h3").inner_text(timeout=100) if figure.is_visible() else figure.locator("h3").text_content()
        )
        words = figure.locator("[role=img]").get_attribute("aria-label")
        assert title and words.startswith(f"{title}. ") and len(words) > len(title) + 20
    assert page.locator("table").count() >= 8
    assert page.locator("table").count() == page.locator("table > caption").count()
    assert "mul-adds per image" in page.locator("#budget").get_attribute("aria-valuetext")


def test_changes_are_announced_once_the_slider_rests(page: Any) -> None:
    assert page.locator("#said").get_attribute("role") == "status" and page.locator("#said").text_content() == ""
    page.locator("#budget").fill("400")
    page.locator("#budget").fill("0")
    from playwright.sync_api import expect

    expect(page.locator("#said")).to_contain_text("right at 1.00M mul-adds per image, 80.0 % saved, 0.5 ms.")


def test_images_are_looked_at_by_keyboard(page: Any) -> None:
    every = page.locator("#images .thumbs i")
    assert page.locator("#images .thumbs i[tabindex='0']").count() == 1
    every.first.focus()
    first = page.inner_text("#looked-at")
    assert first == f"Here {every.first.get_attribute('title')}."
    page.keyboard.press("ArrowRight")
    assert every.nth(1).evaluate("image => image === document.activeElement")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#looked-at") == first


def test_wide_tables_say_that_they_scroll(page: Any) -> None:
    for box in page.locator(".scroll").all():
        if box.is_visible():
            wide = box.evaluate("box => box.scrollWidth > box.clientWidth + 1")
            assert box.evaluate("box => !box.nextElementSibling.hidden") == wide
            assert box.get_attribute("tabindex") == "0" and box.get_attribute("aria-label")
    if page.viewport_size["width"] == 390:
        assert page.locator(".hint:visible").count() > 2


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    assert accessible(page) == []
