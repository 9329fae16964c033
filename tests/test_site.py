"""The documentation as a site: it is complete, it agrees with the code, and it works from a folder without network."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import offramp
from helpers.browser import NEEDS_CHROMIUM, accessible, opened
from offramp.cli.app import app, take_imports, with_ray_address
from offramp.runs.config import with_settings
from offramp.runs.recipe import load_recipe

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
NAMES = [str(page.relative_to(DOCS).with_suffix("")) for page in sorted(DOCS.rglob("*.md"))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it: a warning is an error."""
    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(out / "trees")]
    done = subprocess.run([*words, str(DOCS), str(out / "site")], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return out / "site"


def test_every_page_is_there_and_asks_for_nothing_outside(site: Path) -> None:
    wanted = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")}
    assert wanted <= {page.relative_to(site) for page in site.rglob("*.html")}
    for page in site.rglob("*.html"):
        text = page.read_text()
        fetched = re.findall(r"<(?:script|img|link|source|iframe)\b[^>]*?(?:src|href)=\"([^\"]+)\"", text)
        assert fetched
        for address in fetched:
            name = address.split("?")[0].split("#")[0]
            assert not name or (page.parent / name).exists(), (page.name, address)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?https?:|@import", sheet.read_text()), sheet


def test_options_of_verbs_and_recipes_come_from_the_code(site: Path) -> None:
    assert "--max-drop-points" in (site / "verbs" / "calibrate.html").read_text()
    recipes = (site / "recipes.html").read_text()
    assert all(name in recipes for name in offramp.list_recipes())


class TestInABrowser:
    pytestmark = NEEDS_CHROMIUM

    def test_the_search_works_from_a_folder_without_network(self, site: Path, browser: Any) -> None:
        with opened(browser, (site / "index.html").as_uri(), 1400) as page:
            page.context.set_offline(True)
            page.fill(".sidebar-search", "slowdown")
            page.press(".sidebar-search", "Enter")
            page.wait_for_selector("#search-results li a")
            page.click("#search-results li a:has-text('Serving a bundle')")
            page.wait_for_url(re.compile(r"/serving\.html"))
            assert page.inner_text("h1").startswith("Serving a bundle")
            assert {address.partition(":")[0] for address in page.requests} <= {"file", "data"}
            assert page.complaints == []

    @pytest.mark.parametrize("name", [*NAMES, "search", "genindex"])
    def test_a_page_fits_a_phone_and_is_accessible_there(self, site: Path, browser: Any, name: str) -> None:
        with opened(browser, (site / f"{name}.html").as_uri(), 390) as page:
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.complaints == []
            assert accessible(page) == []

    def test_words_in_a_picture_can_be_read_on_a_phone(self, site: Path, browser: Any) -> None:
        with opened(browser, (site / "gallery.html").as_uri(), 390) as page:
            pictures = page.query_selector_all(".picture.scrolls")
            assert len(pictures) == 2
            assert all(one.evaluate("(box) => box.scrollWidth >= 640 && box.tabIndex === 0") for one in pictures)

    @pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1400, "light"), (1400, "dark")])
    @pytest.mark.parametrize("name", ["index", "verbs/predict", "results/photos"])
    def test_a_page_is_accessible(self, site: Path, browser: Any, name: str, width: int, scheme: str) -> None:
        with opened(browser, (site / f"{name}.html").as_uri(), width) as page:
            page.emulate_media(color_scheme=scheme)
            assert accessible(page) == []


def verbs() -> dict[str, Any]:
    sys.path.append(str(DOCS))
    try:
        from site_pages import commands

        return commands()
    finally:
        sys.path.remove(str(DOCS))


def test_every_verb_has_a_page_and_every_name_is_in_the_api() -> None:
    texts = [page.read_text() for page in (DOCS / "verbs").glob("*.md")]
    shown = {verb for text in texts for verb in re.findall(r"{verb} ([\w ]+)", text)}
    assert shown == set(verbs())
    table = (DOCS / "verbs" / "index.md").read_text()
    assert all(f"({verb.split()[0]}.md)" in table for verb in shown)
    known = re.findall(r":: offramp\.(\w+)", (DOCS / "api.md").read_text())
    assert sorted(known) == sorted(name for name in offramp.__all__ if name != "__version__")


def commands_of(page: Path) -> list[str]:
    """Commands that stand alone on a line, indented or in a block of shell; not those with an ellipsis."""
    text = page.read_text()
    blocks = "".join(re.findall(r"```shell\n(.*?)```", text, re.DOTALL))
    lines = re.findall(r"^    (offramp [a-z].*)$", text, re.MULTILINE)
    lines += re.findall(r"^(?:\.venv/bin/)?(offramp [a-z].*)$", blocks, re.MULTILINE)
    return [line for line in lines if "..." not in line]


REPEATED = [
    page for page in PAGES if page.parent.name == "results" and page.name != "photos.md"
]  # by the run's settings
COMMANDS = [(page.name, line) for page in PAGES if page not in REPEATED for line in commands_of(page)]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}:{n}" for n, (page, _) in enumerate(COMMANDS)])
def test_a_command_that_a_page_shows_can_be_given(page: str, line: str) -> None:
    _, words = take_imports(shlex.split(re.split(r" [>|] ", line)[0], comments=True)[1:])
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words[0] in command.commands, line
        command, words = command.commands[words[0]], words[1:]
    given = command.make_context(line, with_ray_address(words)).params  # an option that is not there raises
    if {"recipe", "data_dir"} <= set(given):  # so does a recipe or a setting that is not there
        config = with_settings(load_recipe(given["recipe"]).config, given["settings"] or [])
        assert given["data_dir"] or config.data.name in ("digits", "stripes"), line


def test_the_refusals_that_are_explained_are_those_of_the_code() -> None:
    source = " ".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    source = re.sub(r'"\s+f?"', "", source)  # sentences over several lines
    said = re.findall(r"^#### `(.*)`$", (DOCS / "faq.md").read_text(), re.MULTILINE)
    assert len(said) >= 30
    for sentence in said:
        pattern = ".{1,120}?".join(re.escape(part) for part in sentence.split("…"))
        if sentence.endswith(" … is unknown"):  # common/names.py puts these together
            pattern = rf'(?:unknown|Registry)(?:\[\w+\])?\("{sentence.split()[0]}"'
        assert re.search(pattern, source), sentence


def test_the_gallery_draws_what_left_where(tmp_path: Path) -> None:
    sys.path.append(str(DOCS))
    try:
        import gallery
    finally:
        sys.path.remove(str(DOCS))
    exits, names = np.array([1, 1, 2, 2, 1, 2]), np.array(["sea", "sea", "otter", "otter", "sea", "otter"])
    rows = gallery.drawn_rows(exits, np.array([True, True, True, False, True, True]), 2, columns=2)
    assert [set(exits[row]) for row in rows] == [{1}, {2}] and 3 not in rows[1] and all(len(row) == 2 for row in rows)
    images = np.full((6, 32, 32, 3), 200, np.uint8)
    sheet = gallery.picture(images, rows, ["sea"] * 6, np.ones(6, bool), [0.5, 0.5])
    assert sheet.size[0] == gallery.LEFT + gallery.COLUMNS * (gallery.SIDE + gallery.GAP)
    assert gallery.class_table(exits, names, few=1)[2:] == [
        "| sea | 1.00 | 100% |",
        "| otter | 2.00 | 0% |",
    ]
