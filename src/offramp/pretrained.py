"""Networks that come trained: bundles inside the package, found by their names."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "pretrained"


def pretrained_names() -> list[str]:
    """The networks that come trained."""
    return sorted(path.parent.name for path in FOLDER.glob("*/bundle.json"))


def bundle_folder(source: str | Path) -> Path:
    """A bundle's folder as it is, or that of a network that comes trained."""
    known = FOLDER / str(source)
    return known if str(source) in pretrained_names() and not Path(source).is_dir() else Path(source)
