"""An evaluated run made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.saved import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")
