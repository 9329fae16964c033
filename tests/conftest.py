"""Small things that several tests need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import count as counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.browser import CHROMIUM
from helpers.runs import SMALL_RUN
from offramp.runs.config import RunConfig, with_settings
from offramp.runs.recipe import load_recipe

pytest_plugins = ["helpers.bundles"]

torch.set_num_threads(1)  # threads of several test processes would spin against each other
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"  # and those of processes that tests start
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are read as Python; Triton must know before it is first imported


@pytest.fixture
def small_config() -> Callable[..., RunConfig]:
    """A run on the digits that takes about a second; more settings may be given."""

    def config(*settings: str) -> RunConfig:
        return with_settings(load_recipe("digits-baseline").config, [*SMALL_RUN, *settings])

    return config


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, Callable[[], BaseException]], None]:
    """Makes the n-th call of `os.replace` or `os.fsync` raise, once; those after it go well."""
    real = {name: getattr(os, name) for name in ("replace", "fsync")}

    def set_up(name: str, nth: int, trouble: Callable[[], BaseException]) -> None:
        calls = counter(1)

        def failing(*args: Any) -> None:
            if next(calls) == nth:
                raise trouble()
            real[name](*args)

        monkeypatch.setattr(os, name, failing)

    return set_up


@pytest.fixture
def image_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes images of a few plain colours, one class per colour, in ImageNet's layout."""

    def write(classes: int = 3, train: int = 20, val: int = 5, nested: bool = True) -> Path:
        root = tmp_path / "images"
        draw = np.random.default_rng(0)
        for split, count in (("train", train), ("val", val)):
            for c in range(classes):
                folder = root / split / f"class{c}" if nested else root / f"class{c}"
                folder.mkdir(parents=True, exist_ok=True)
                for i in range(count):
                    pixels = draw.integers(0, 80, (40 + i, 50, 3)) + np.eye(3, dtype=int)[c % 3] * 150
                    Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{split}{i:03d}.png")
        return root

    return write


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium, driven by Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
