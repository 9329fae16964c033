"""The server's page in a real browser: an image goes in, the answer shows; nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.browser import NEEDS_CHROMIUM, accessible, assert_tidy, opened
from helpers.server import Running, picture
from offramp.serve import ServeConfig

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[bool, Running]]:
    """One server that reveals exits and one that does not; both have seen some images."""
    made = {reveal: Running(ServeConfig(reveal_exit=reveal)) for reveal in (True, False)}
    for server in made.values():
        for _ in range(2):
            server.send(*[picture(1, 1)] * 30, *[picture(1, 2)] * 15, *[picture(1, 3)] * 15)
    yield made
    for server in made.values():
        server.stop()


@pytest.fixture(params=[(390, True), (1400, True), (1400, False)], ids=str)
def page(request: pytest.FixtureRequest, browser: Any, servers: dict[bool, Running]) -> Iterator[Any]:
    """The page at a phone's and a laptop's width, with exits revealed or not."""
    width, reveal = request.param
    with opened(browser, servers[reveal].url, width) as page:
        page.reveal, page.server = reveal, servers[reveal]
        page.wait_for_selector("#exits .exit")
        yield page


def choose(page: Any, name: str, content: bytes) -> None:
    page.set_input_files("#file", [{"name": name, "mimeType": "image/png", "buffer": content}])


DROP = """([name, bytes]) => {
  const files = new DataTransfer();
  files.items.add(new File([new Uint8Array(bytes)], name, { type: "image/png" }));
  document.getElementById("drop").dispatchEvent(
    new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true }));
}"""


def test_choosing_and_dropping_show_the_answer(page: Any) -> None:
    choose(page, "first.png", picture(3, 2, side=40))
    page.wait_for_selector("text='class <3>'")
    page.evaluate(DROP, ["second.png", list(picture(7, 3, side=200))])
    page.wait_for_selector(".result .label:text-is('class <7>')")
    first = page.locator(".result").first
    assert first.locator(".label").inner_text() == "class <7>"
    assert first.locator(".sure .share").inner_text() == "90.0 %"
    assert first.locator(".file").inner_text() == "second.png"
    assert first.locator("img").evaluate("image => image.naturalWidth") == 200
    wide = first.locator(".sure .bar").bounding_box()["width"]
    page.wait_for_timeout(400)  # the bar grows
    assert first.locator(".sure .fill").bounding_box()["width"] == pytest.approx(0.9 * wide, abs=1)
    own = {page.server.url + path for path in ("/", "/predict", "/shares")}
    assert {url for url in page.requests if not url.startswith(("blob:", "data:"))} == own
    assert page.complaints == []


def test_exits_show_only_where_they_are_revealed(page: Any) -> None:
    choose(page, "image.png", picture(5, 2))
    page.wait_for_selector("text='class <5>'")
    rows = page.locator(".guess")
    if not page.reveal:
        assert rows.count() == 0 and "exit" not in page.locator("#results").inner_text()
        return
    assert [text.split("\n") for text in rows.all_inner_texts()] == [
        ["exit 1", "class <6>", "10.0 %"],
        ["exit 2", "class <5>", "90.0 %"],
    ]
    assert page.locator(".guess.taken").inner_text().startswith("exit 2")
    assert page.locator(".why").inner_text() == "It left at exit 2 of 3, after 2.50M mul-adds: 50 % saved."


def test_the_live_shares_follow_the_server(page: Any) -> None:
    shares = page.server.http.get("/shares").json()
    assert page.locator("#exits .share").all_inner_texts() == [f"{100 * share:.0f} %" for share in shares["shares"]]
    assert f"last {shares['images']} images" in page.inner_text("#seen")
    page.server.send(picture(1, 1))
    page.wait_for_selector(f"text=last {shares['images'] + 1} images", timeout=5000)


def test_what_is_refused_is_said(page: Any) -> None:
    choose(page, "notes.txt", b"no image")
    page.wait_for_selector(".result.failed")
    assert "image 1 cannot be read" in page.locator(".result.failed b").inner_text()
    page.wait_for_selector(".result.failed .blank")


PARTS = "h1, h2, p:not(.unseen), .drop > b, .drop > span, .drop svg, img, .said > *, .guess > *, .exit > *, footer"


def test_nothing_overlaps_and_nothing_is_cut_off(page: Any) -> None:
    choose(page, "a-name-without-any-place-to-break-it-" * 4 + ".png", picture(2, 3, side=300))
    page.wait_for_selector("text='class <2>'")
    choose(page, "notes.txt", b"no image")
    page.wait_for_selector(".result.failed")
    assert_tidy(page, PARTS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    assert accessible(page) == []
    choose(page, "good.png", picture(2, 3, side=300))
    page.wait_for_selector("text='class <2>'")
    choose(page, "notes.txt", b"no image")
    page.wait_for_selector(".result.failed .blank")
    assert accessible(page) == []


def test_answers_are_announced_and_the_keyboard_reaches_the_file(page: Any) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "file"
    choose(page, "mine.png", picture(4, 1))
    from playwright.sync_api import expect

    expect(page.locator("#said")).to_have_text("mine.png: class <4>, confidence 90.0 %")
    assert page.locator("#said").get_attribute("role") == "status"
    rows = page.locator("#exits [role=listitem]").all_inner_texts()
    assert "expected 50 %, now" in rows[0] and len(rows) == 3
