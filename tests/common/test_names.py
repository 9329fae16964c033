"""Names that are not known: the one that was meant is offered, and nonsense is not."""

from __future__ import annotations

import pytest

from offramp.common.names import meant, unknown
from offramp.runs.config import RunConfig, _paths

MODELS = ["msdnet-tiny", "msdnet5", "msdnet7", "ranet-c1", "ranet-c2"]
SETTINGS = _paths(RunConfig().to_json())


@pytest.mark.parametrize(
    ("given", "names", "near"),
    [
        ("msdnet", MODELS, "msdnet5"),
        ("msdnet55", MODELS, "msdnet5"),
        ("MSDNet7", MODELS, "msdnet7"),
        ("tiny", MODELS, "msdnet-tiny"),
        ("train.lr", SETTINGS, "train.learning_rate"),
        ("train.wd", SETTINGS, "train.weight_decay"),
        ("trian.epochs", SETTINGS, "train.epochs"),
        ("lr", SETTINGS, "train.learning_rate"),
        ("mobilenetv3", ["mobilenet_v2", "mobilenet_v3_small"], "mobilenet_v3_small"),
        ("vit", ["shvit_s1", "vit_tiny_patch16_224"], "vit_tiny_patch16_224"),
        ("epochs", SETTINGS, "train.epochs"),
        ("bf16", ["auto", "float32", "bfloat16"], "bfloat16"),
        ("resnet18", MODELS, None),
        ("banana", MODELS, None),
        ("train.colour", SETTINGS, None),
        ("train.", SETTINGS, None),
        ("", MODELS, None),
    ],
)
def test_the_name_that_was_meant(given: str, names: list[str], near: str | None) -> None:
    assert meant(given, names) == ("" if near is None else f"; did you mean {near!r}?")


def test_of_many_names_the_near_ones_are_listed() -> None:
    names = [f"net{n}" for n in range(200)]
    said = unknown("model", "nett19", names)
    assert "did you mean 'net19'? Also near: net1" in said and said.endswith("There are 200")
    assert unknown("model", "banana", names).endswith("is unknown; no name is near it. There are 200")
