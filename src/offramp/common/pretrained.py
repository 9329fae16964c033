"""Bundles by name: a folder, or one of the networks that come trained, which are bundles inside the package."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "pretrained"
DEFAULT_BACKBONE = "timm/tf_efficientnet_lite0"  # whose params come with offramp[backbones]
LARGER_BACKBONE = "timm/tf_efficientnet_lite2"  # and so do these
MANIFEST, CARD = "bundle.json", "model.json"


def pretrained_names() -> list[str]:
    """The networks that come trained."""
    return sorted(path.parent.name for path in FOLDER.glob(f"*/{MANIFEST}"))


def bundle_folder(source: str | Path) -> Path:
    """A bundle's folder as it is, or that of a network that comes trained; a bundle of that name goes first."""
    known = str(source) in pretrained_names() and not (Path(source) / MANIFEST).is_file()
    return FOLDER / str(source) if known else Path(source)


def is_bundle(source: str | Path) -> bool:
    """Whether this is a bundle's folder or the name of a network that comes trained."""
    return (bundle_folder(source) / MANIFEST).is_file()
