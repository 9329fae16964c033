"""Settings: recipes, inheritance, changes, and what is said of mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from offramp.runs.config import RunConfig, with_settings
from offramp.runs.recipe import list_recipes, load_recipe


def test_every_packaged_recipe_is_valid_and_opens_with_its_claim() -> None:
    assert "digits-baseline" in list_recipes()
    for name in list_recipes():
        recipe = load_recipe(name)
        assert len(recipe.claim) > 20
        assert recipe.config.recipe == name


def test_a_config_goes_to_json_and_back() -> None:
    config = with_settings(RunConfig(), ["model.overrides={growth=4}", "data.imbalance=100", "seed=3"])
    assert RunConfig.from_json(config.to_json()) == config
    assert config.data.imbalance == 100.0 and config.model.overrides == {"growth": 4}


def test_values_are_written_as_in_toml_and_text_may_be_bare() -> None:
    config = with_settings(RunConfig(), ["data.name=cifar100", 'data.dir="/a b"', "train.learning_rate=none"])
    assert (config.data.name, config.data.dir, config.train.learning_rate) == ("cifar100", "/a b", None)
    nested = with_settings(config, ["model.overrides.growth=4", "model.overrides.blocks=[1, 2]"])
    assert nested.model.overrides == {"growth": 4, "blocks": [1, 2]}


def test_the_learning_rate_follows_the_batch() -> None:
    assert RunConfig().train.initial_rate == 0.8
    assert with_settings(RunConfig(), ["train.learning_rate=0.3"]).train.initial_rate == 0.3


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("train.epoch=3", "setting 'train.epoch' is unknown; did you mean 'train.epochs'"),
        ("trian.epochs=3", "did you mean 'train.epochs'"),
        ("epochs=3", "setting 'epochs' is unknown; did you mean 'train.epochs'"),
        ("train.lr=0.1", "setting 'train.lr' is unknown; did you mean 'train.learning_rate'"),
        ("train.batch_size=64", "did you mean 'train.batch'"),
        ("train.colour=1", r"setting 'train.colour' is unknown\. Known"),
        ("train.epochs=three", "train.epochs must be a whole number, got 'three'"),
        ("train.epochs=0", "train.epochs must be 1 or more"),
        ("train.epochs=true", "train.epochs must be a whole number, got True"),
        ("train.batch=7", "train.batch must be even"),
        ("train.learning_rate=nan", "train.learning_rate must be a finite number"),
        ("train.precision=bf16", "train.precision 'bf16' is unknown.*float32, bfloat16"),
        ("weighting.name=fixed", "weighting.name=fixed and weighting.exits, a weight for every exit, need each other"),
        ("weighting.exits=[1.2, 0.8]", "need each other"),
        ("weighting.until=1.5", "weighting.until must lie between 0 and 1, got 1.5"),
        ("weighting.exits=1.2", "weighting.exits must be a list, got 1.2"),
        ("weighting.exits=[1, -1]", "weighting.exits must be 0 or more, got -1"),
        ("weighting.exits=[1, 'b']", "weighting.exits must be a number, got 'b'"),
        ("model=3", "model must be a table"),
        ("train.epochs", "not of the form key=value"),
        ("seed=-1", "seed must be 0 or more"),
    ],
)
def test_mistakes_get_the_field_and_the_fix(setting: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        with_settings(RunConfig(), [setting])


def test_a_recipe_of_ones_own_extends_others(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('# The base.\nextends = "digits-baseline"\n[train]\nepochs = 2\n')
    (tmp_path / "mine.toml").write_text('# Mine,\n# in two lines.\nextends = "base.toml"\n[train]\nbatch = 64\n')
    recipe = load_recipe(str(tmp_path / "mine.toml"))
    assert recipe.claim == "Mine, in two lines."
    assert (recipe.config.train.epochs, recipe.config.train.batch) == (2, 64)
    assert recipe.config.model.name == "msdnet-tiny"


def test_bad_recipes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean 'digits-baseline'"):
        load_recipe("digits-basline")
    with pytest.raises(ValueError, match="is not there"):
        load_recipe(str(tmp_path / "none.toml"))
    (tmp_path / "a.toml").write_text('extends = "b.toml"\n')
    (tmp_path / "b.toml").write_text('extends = "a.toml"\n')
    with pytest.raises(ValueError, match="in a circle"):
        load_recipe(str(tmp_path / "a.toml"))
    (tmp_path / "c.toml").write_text("= 3")
    with pytest.raises(ValueError, match="not valid TOML"):
        load_recipe(str(tmp_path / "c.toml"))
    with pytest.raises(ValueError, match="newer version"):
        RunConfig.from_json({"schema": 2})
