"""What a run is made of: frozen dataclasses, read from TOML or JSON, checked field by field.

`with_settings` applies `key=value` changes, `RunConfig.from_json` and `to_json` go to the run folder and back.
Defaults stand here and nowhere else. So do choice lists, as `Literal` types; what can be registered is looked up by
name instead.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

from offramp.common.names import unknown

T = TypeVar("T")
ENVELOPE = ("schema", "recipe")


def _at_least(low: float, default: Any) -> Any:
    return field(default=default, metadata={"min": low})


def _between(low: float, high: float, default: Any) -> Any:
    return field(default=default, metadata={"min": low, "max": high})


def _table() -> Any:
    return field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """Which network. `num_classes` None takes the data set's; `overrides` go to `create_model`.

    `pretrained` is what its params start from: true for those that come with it, a file, or the folder of a run.
    """

    name: str = "msdnet-tiny"
    num_classes: int | None = _at_least(2, None)
    pretrained: bool | str = False
    overrides: dict[str, Any] = _table()

    @property
    def sources(self) -> list[Any]:
        """What the params start from: its own `pretrained` or, of a cascade, that of each of its networks."""
        members = self.overrides.get("members", ())
        return [m.get("pretrained", False) for m in members if isinstance(m, Mapping)] or [self.pretrained]

    @property
    def is_put_together(self) -> bool:
        """Whether it is a cascade of networks that were all trained before, each in a run or a file."""
        return "members" in self.overrides and all(type(source) is str for source in self.sources)


@dataclass(frozen=True)
class DataConfig:
    """Which data. What is None is left to the data set; what a data set does not know it refuses.

    `augmentation` None takes the data set's own, `augmentation_options` change the named one; `options` go to a data
    set of your own as they are.
    """

    name: str = "digits"
    dir: str | None = None
    calibration: int | None = _at_least(0, None)
    imbalance: float | None = _at_least(1, None)
    label_noise: float | None = _between(0, 1, None)
    train: int | None = _at_least(1, None)
    test: int | None = _at_least(1, None)
    image_size: int | None = _at_least(8, None)
    workers: int | None = _at_least(0, None)
    max_pixels: int | None = _at_least(1, None)
    download: bool | None = None
    augmentation: str | None = None
    augmentation_options: dict[str, Any] = _table()
    options: dict[str, Any] = _table()

    def given(self) -> dict[str, Any]:
        """The settings that go to the data set's loader."""
        named = {k: v for k, v in asdict(self).items() if k not in ("name", "dir", "options")}
        return {k: v for k, v in named.items() if v not in (None, {})} | self.options


@dataclass(frozen=True)
class TrainConfig:
    """How it is trained: by an optimiser whose rate falls to 0 along a cosine.

    A loader batch of `batch` images makes two updates of half a batch. `learning_rate` None means
    0.1 x (batch / 2) / 64; over the first `warm_up_steps` loader batches, half of all at most, it rises in a line.
    Params of stage k of K train at `depth_decay`^(K-k) of it (in a cascade, of each network's own stages), those of
    heads at `head_rate` times that. Without `decay_norms`, params of fewer than two dimensions (norms, biases), and
    those that a network names itself, have no weight decay. With `freeze_norms` the
    BatchNorms of a pretrained network normalise by the statistics they have, and keep them. `ema` is the decay of an
    average of the params, which is what is evaluated and saved. `mixup` and `cutmix` are the alphas of what samples of
    a half are mixed by.

    `parts` are what is trained; the rest is frozen. For `network_epochs` before that, in a phase of its own, the
    network is trained for its last exit alone. With `probe`, heads that are new begin as linear probes. `fork` names
    what is done where a feature goes to a head and further on.
    `fast`, on a GPU: the step as a CUDA graph, with kernels of our own.
    """

    epochs: int = _at_least(0, 300)
    batch: int = _at_least(2, 1024)
    optimizer: str = "sgd"
    optimizer_options: dict[str, Any] = _table()
    learning_rate: float | None = _at_least(0, None)
    momentum: float = _at_least(0, 0.9)
    weight_decay: float = _at_least(0, 1e-4)
    nesterov: bool = False
    warm_up_steps: int = _at_least(0, 0)
    depth_decay: float = _between(0, 1, 1.0)
    head_rate: float = _at_least(0, 1.0)
    decay_norms: bool = True
    freeze_norms: bool = False
    ema: float | None = _between(0, 1, None)
    mixup: float = _at_least(0, 0.0)
    cutmix: float = _at_least(0, 0.0)
    parts: Literal["all", "heads", "inner_heads", "last_exit"] = "all"
    network_epochs: int | None = _at_least(1, None)
    probe: bool = False
    fork: str | None = None
    fork_options: dict[str, Any] = _table()
    clip_norm: float | None = _at_least(0, None)
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    fast: bool = True
    eval_every: int = _at_least(1, 1)
    save_seconds: float = _at_least(0, 60.0)

    @property
    def initial_rate(self) -> float:
        return 0.1 * (self.batch / 2) / 64 if self.learning_rate is None else self.learning_rate


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is minimised: the loss of every sample at every exit; `options` are the objective's own."""

    name: str = "cross_entropy"
    options: dict[str, Any] = _table()


@dataclass(frozen=True)
class WeightingConfig:
    """How much each sample counts at each exit; the settings from `inputs` to `weight_decay` are for `learned`.

    `inputs`, `depth` and `width` shape the weight net, `delta`, `centring` and `bound` its range; `q` shapes
    the shares of the allocation, `objective` the meta loss; that of a `policy` has thresholds softened by a
    `temperature`, and its gradient goes `through_exits` too, if asked for. A weight counts for the `sum` of the
    objective's `terms`, or `each` has its own. Every `interval`-th loader batch trains the weight net, between the
    shares `since` and `until` of training; before, all weights are 1; afterwards, it stays as it is. `order` is the
    paper's, or `delayed`: cheaper, with weights from before the weight net's update. `from_run` is the finished run
    whose weight net `frozen` takes; `exits` are the weights of `fixed`, one for every exit; `options` are for a
    weighting of your own.
    """

    name: str = "uniform"
    q: float = _at_least(0.01, 0.75)
    inputs: Literal["loss", "confidence", "both"] = "loss"
    depth: int = _at_least(1, 1)
    width: int = _at_least(1, 500)
    delta: float = _at_least(0, 0.8)
    centring: Literal["exit", "batch", "all", "both"] = "exit"
    bound: bool = False
    terms: Literal["sum", "each"] = "sum"
    objective: Literal["allocated", "whole", "policy"] = "allocated"
    temperature: float = _at_least(1e-6, 0.05)
    through_exits: bool = False
    look_ahead: Literal["optimizer", "plain"] = "optimizer"
    engine: Literal["forward_mode", "double_backward", "finite_difference"] = "forward_mode"
    order: Literal["exact", "delayed"] = "exact"
    interval: int = _at_least(1, 1)
    since: float = _between(0, 1, 0.0)
    until: float = _between(0, 1, 1.0)
    learning_rate: float = _at_least(0, 1e-4)
    weight_decay: float = _at_least(0, 1e-4)
    from_run: str | None = None
    exits: list[float] | None = _at_least(0, None)
    options: dict[str, Any] = _table()

    def __post_init__(self) -> None:
        if self.order == "delayed" and (self.engine != "forward_mode" or self.look_ahead != "optimizer"):
            raise ValueError(
                "weighting.order=delayed takes the optimizer's own step as look-ahead and needs engine=forward_mode "
                f"and look_ahead=optimizer, got {self.engine} and {self.look_ahead}"
            )
        if self.through_exits and self.objective != "policy":
            raise ValueError("weighting.through_exits=true needs weighting.objective=policy")
        if self.since and self.since >= self.until:
            raise ValueError(f"weighting.since must lie below weighting.until, got {self.since} and {self.until}")
        if self.name == "frozen" and self.from_run is None:
            raise ValueError("weighting.name=frozen needs weighting.from_run, the run folder of the weight net")
        if (self.name == "fixed") != (self.exits is not None):
            raise ValueError("weighting.name=fixed and weighting.exits, a weight for every exit, need each other")
        if self.exits is not None and not any(self.exits):
            raise ValueError("weighting.exits must hold a weight above 0, or nothing is learned")


@dataclass(frozen=True)
class ImtaConfig:
    """IMTA's parts: gradient equilibrium while the network trains, then a second phase of collaboration.

    The second phase freezes the network and trains collaborating classifiers on it, for as many epochs and from
    the same rate as the first, with distillation from the network's last head.
    """

    equilibrium: bool = False
    collaboration: bool = False
    temperature: float = _at_least(0.01, 3.0)
    gamma: float = _between(0, 1, 0.9)


@dataclass(frozen=True)
class RunConfig:
    """One complete run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    weighting: WeightingConfig = field(default_factory=WeightingConfig)
    imta: ImtaConfig = field(default_factory=ImtaConfig)
    seed: int = _at_least(0, 0)
    recipe: str | None = None

    def __post_init__(self) -> None:
        if self.train.batch % 2:
            raise ValueError(f"train.batch must be even, it is trained on in two halves; got {self.train.batch}")
        if self.train.nesterov and not self.train.momentum:
            raise ValueError("train.nesterov needs train.momentum above 0")

        forks = self.train.fork is not None or self.imta.equilibrium
        if self.train.fork is not None and self.imta.equilibrium:
            raise ValueError("train.fork and imta.equilibrium, which is a fork too, cannot go together; leave one out")
        if forks and self.train.parts != "all":
            raise ValueError(
                f"a fork changes how the whole network trains; with train.parts={self.train.parts} leave it out"
            )
        if self.imta.collaboration and (self.train.parts != "all" or self.train.network_epochs or self.train.probe):
            raise ValueError(
                "imta.collaboration has phases of its own; it cannot go with train.parts, train.network_epochs or "
                "train.probe"
            )
        if not self.train.epochs and not self.train.probe and not self.model.is_put_together:
            raise ValueError(
                "train.epochs must be 1 or more; 0 is for heads that are linear probes (train.probe=true) and for "
                "cascades of networks that are trained already"
            )
        if self.train.network_epochs and self.train.parts == "last_exit":
            raise ValueError("train.parts=last_exit trains the network alone already; leave out train.network_epochs")

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> RunConfig:
        rest = dict(value)
        if rest.pop("schema", 1) != 1:
            raise ValueError("this configuration was written by a newer version of offramp")
        return parse(RunConfig, rest)


def parse(cls: type[T], given: Any, path: str = "") -> T:
    """Build the dataclass `cls` from nested mappings; a bad field is a sentence that names it."""
    if not isinstance(given, Mapping):
        raise ValueError(f"{path or 'the configuration'} must be a table, got {given!r}")
    assert is_dataclass(cls)
    known = {f.name: f for f in fields(cls)}
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in given.items():
        where = f"{path}.{key}" if path else key
        if key not in known:
            raise ValueError(unknown("setting", where, [f"{path}.{k}" if path else k for k in known]))
        values[key] = _parse_field(hints[key], value, where, known[key].metadata)
    return typing.cast(T, cls(**values))


def _parse_field(hint: Any, value: Any, where: str, limits: Mapping[str, Any]) -> Any:
    if is_dataclass(hint):
        return parse(typing.cast(type, hint), value, where)
    if typing.get_origin(hint) is Literal:
        return _parse_choice(typing.get_args(hint), value, where)
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in allowed:
        return None
    kinds = [typing.get_origin(each) or each for each in allowed if each is not types.NoneType]
    kind = next((each for each in kinds if type(value) is each), kinds[0])
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} must be {' or '.join(_KINDS[each] for each in kinds)}, got {value!r}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{where} must be a finite number, got {value!r}")
    if kind is list:
        return [_parse_field(typing.get_args(allowed[0])[0], item, where, limits) for item in value]
    _check_limits(value, where, limits)
    return value


def _parse_choice(choices: tuple[str, ...], value: Any, where: str) -> str:
    if value not in choices:
        raise ValueError(unknown(where, value, choices))
    return str(value)


def _check_limits(value: Any, where: str, limits: Mapping[str, Any]) -> None:
    if "max" in limits and not limits["min"] <= value <= limits["max"]:
        raise ValueError(f"{where} must lie between {limits['min']:g} and {limits['max']:g}, got {value!r}")
    if "min" in limits and not value >= limits["min"]:
        raise ValueError(f"{where} must be {limits['min']:g} or more, got {value!r}")


_KINDS = {
    int: "a whole number",
    float: "a number",
    str: "text",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}


def with_settings(config: RunConfig, settings: Iterable[str]) -> RunConfig:
    """Apply `key=value` changes such as `train.epochs=3`; values are written as in TOML, text may be bare."""
    table = config.to_json()
    table.pop("schema")
    for setting in settings:
        key, value = parse_setting(setting)
        *parents, last = key.split(".")
        inner = table
        for parent in parents:
            if not isinstance(inner.get(parent), dict):
                raise ValueError(unknown("setting", key, _paths(config.to_json())))
            inner = inner[parent]
        if inner is table and last not in table:
            raise ValueError(unknown("setting", key, _paths(config.to_json())))
        inner[last] = value
    return parse(RunConfig, table)


def data_config(name: str, settings: Iterable[str]) -> DataConfig:
    """A data set with `key=value` changes such as `data.download=true`; there is nothing else to be changed."""
    plain = RunConfig()
    changed = with_settings(plain, [f"data.name={name}", *settings])
    if replace(changed, data=plain.data) != plain:
        raise ValueError("only settings of the data count here, such as data.download=true")
    return changed.data


def decisive(config: RunConfig) -> RunConfig:
    """A configuration without what does not decide the result.

    That is the seed, where the data lie and how they are read, how often things are saved, and what training fills in
    for IMTA's second phase.
    """
    plain = TrainConfig()
    train = replace(config.train, eval_every=plain.eval_every, save_seconds=plain.save_seconds)
    implied = ("collaboration",) if config.imta.collaboration else ()
    overrides = {key: value for key, value in config.model.overrides.items() if key not in implied}
    model = replace(config.model, overrides=overrides)
    return replace(config, seed=0, model=model, data=replace(config.data, **_HOW_DATA_ARE_READ), train=train)


_HOW_DATA_ARE_READ: dict[str, Any] = {"dir": None, "workers": None, "download": None}


def all_but_weighting(config: RunConfig) -> str:
    """Everything that decides a run's result but the weighting, as text: equal where runs differ in nothing else."""
    table = replace(decisive(config), weighting=WeightingConfig(), recipe=None).to_json()
    return json.dumps(table, sort_keys=True)


def same_but_for_weighting(one: RunConfig, other: RunConfig) -> bool:
    """Whether two runs differ in nothing that decides their results but the weighting; seeds aside."""
    return all_but_weighting(one) == all_but_weighting(other)


def same_but_for_held_out(one: RunConfig, other: RunConfig) -> bool:
    """Whether two runs differ in nothing that decides their results but how many images were held out; seeds aside."""
    first, second = (
        replace(decisive(own), data=replace(decisive(own).data, calibration=None), recipe=None) for own in (one, other)
    )
    return first == second


def same_network_and_data(one: RunConfig, other: RunConfig) -> bool:
    """Whether two runs trained the same network on the same images; how, and how many were held out, aside."""
    first, second = (
        (own.model.name, own.model.overrides, own.imta, *(getattr(own.data, key) for key in _WHICH_IMAGES))
        for own in map(decisive, (one, other))
    )
    return first == second


_WHICH_IMAGES = ("name", "imbalance", "label_noise", "train", "image_size")


def parse_setting(setting: str) -> tuple[str, Any]:
    """`train.epochs=3` -> ("train.epochs", 3)."""
    key, equals, text = (part.strip() for part in setting.partition("="))
    if not equals:
        raise ValueError(f"{setting!r} is not of the form key=value, for example train.epochs=3")
    if text.lower() == "none":
        return key, None
    try:
        return key, tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key, text


def data_dir_setting(folder: str | os.PathLike[str]) -> str:
    """The setting that names the folder of the data, whatever it is called."""
    return f"data.dir={json.dumps(str(folder), ensure_ascii=False)}"


def _paths(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in table.items():
        if isinstance(value, dict) and value:
            found += _paths(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" not in ENVELOPE:
            found.append(f"{prefix}{key}")
    return found
