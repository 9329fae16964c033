"""A real browser for the tests of pages: what a page asks for and complains of, what overlaps, what is cut off."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
NEEDS_CHROMIUM = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; apt-get install chromium"),
]


@contextmanager
def opened(browser: Any, url: str, width: int) -> Iterator[Any]:
    """A page at a width; `page.requests` and `page.complaints` collect what it asks for and complains of."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    page.requests, page.complaints = [], []
    page.on("request", lambda asked: page.requests.append(asked.url))
    page.on("console", lambda said: page.complaints.append(said.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.goto(url)
    yield page
    page.close()


def accessible(page: Any) -> list[str]:
    """What axe-core finds against a page, rule by rule, with the first element of each."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [f"{rule['id']} ({rule['help']}): {rule['nodes'][0]['html'][:200]}" for rule in found]


OVERLAPS = """(selector) => {
  const shown = [...document.querySelectorAll(selector)].filter((e) => e.checkVisibility());
  const bad = [];
  for (let i = 0; i < shown.length; i++) for (let j = i + 1; j < shown.length; j++) {
    const a = shown[i], b = shown[j];
    if (a.contains(b) || b.contains(a)) continue;
    const s = a.getBoundingClientRect(), t = b.getBoundingClientRect();
    const w = Math.min(s.right, t.right) - Math.max(s.left, t.left);
    const h = Math.min(s.bottom, t.bottom) - Math.max(s.top, t.top);
    const clipped = [a, b].some((e) => { const c = e.closest(".scroll"); return c && !c.contains(e === a ? b : a); });
    if (w > 1 && h > 1 && !clipped) bad.push(a.outerHTML.slice(0, 60) + " | " + b.outerHTML.slice(0, 60));
  }
  return bad;
}"""

CUT_OFF = """(selector) => [...document.querySelectorAll(selector)]
  .filter((e) => e.checkVisibility() && !e.closest(".scroll"))
  .filter((e) => { const r = e.getBoundingClientRect(); return r.left < 0 || r.right > innerWidth + 1; })
  .map((e) => e.outerHTML.slice(0, 80))"""


def assert_tidy(page: Any, selector: str) -> None:
    """Nothing that is selected overlaps or is cut off, and the page needs no scrolling sideways."""
    assert page.evaluate(OVERLAPS, selector) == []
    assert page.evaluate(CUT_OFF, selector) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
