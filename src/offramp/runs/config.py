"""What a run is made of: frozen dataclasses, read from TOML or JSON, checked field by field.

`with_settings` applies `key=value` changes, `RunConfig.from_json` and `to_json` go to the run folder and back.
"""

from __future__ import annotations

import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

from offramp.common.names import unknown

T = TypeVar("T")
ENVELOPE = ("schema", "recipe")


def _at_least(low: float, default: Any) -> Any:
    return field(default=default, metadata={"min": low})


def _one_of(*choices: str) -> Any:
    return field(default=choices[0], metadata={"choices": choices})


@dataclass(frozen=True)
class ModelConfig:
    """Which network. `num_classes` None takes the data set's; `overrides` go to `create_model`."""

    name: str = "msdnet-tiny"
    num_classes: int | None = _at_least(2, None)
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class DataConfig:
    """Which data. What is None is left to the data set; what a data set does not know it refuses."""

    name: str = _one_of("digits", "cifar10", "cifar100", "imagefolder")
    dir: str | None = None
    calibration: int | None = _at_least(0, None)
    imbalance: float | None = _at_least(1, None)
    train: int | None = _at_least(1, None)
    test: int | None = _at_least(1, None)
    image_size: int | None = _at_least(8, None)
    workers: int | None = _at_least(0, None)
    download: bool | None = None

    def options(self) -> dict[str, Any]:
        """The settings that go to the data set's loader."""
        named = {k: v for k, v in asdict(self).items() if k not in ("name", "dir")}
        return {k: v for k, v in named.items() if v is not None}


@dataclass(frozen=True)
class TrainConfig:
    """How it is trained: SGD, the rate falling to 0 along a cosine.

    A loader batch of `batch` images makes two updates of half a batch. `learning_rate` None means
    0.1 x (batch / 2) / 64. `fast`, on a GPU: the step as a CUDA graph, with kernels of our own.
    """

    epochs: int = _at_least(1, 300)
    batch: int = _at_least(2, 1024)
    learning_rate: float | None = _at_least(0, None)
    momentum: float = _at_least(0, 0.9)
    weight_decay: float = _at_least(0, 1e-4)
    nesterov: bool = False
    clip_norm: float | None = _at_least(0, None)
    precision: str = _one_of("auto", "float32", "bfloat16")
    fast: bool = True
    eval_every: int = _at_least(1, 1)
    save_seconds: float = _at_least(0, 60.0)

    @property
    def initial_rate(self) -> float:
        return 0.1 * (self.batch / 2) / 64 if self.learning_rate is None else self.learning_rate


@dataclass(frozen=True)
class WeightingConfig:
    """How much each sample counts at each exit; all but `name`, `q` and `exits` are for `learned` (and `frozen`).

    `inputs`, `depth` and `width` shape the weight net, `delta`, `centring` and `bound` its range; `q` shapes
    the shares of the allocation, `objective` the meta loss; every `interval`-th loader batch trains the weight
    net, in the first `until` of training (1 is all of it); afterwards it stays as it is. `order` is the paper's, or
    `delayed`: cheaper, with weights from before the weight net's update. `from_run` is the finished run whose
    weight net `frozen` takes; `exits` are the weights of `fixed`, one for every exit.
    """

    name: str = _one_of("uniform", "fixed", "ascending", "descending", "selection", "learned", "frozen")
    q: float = _at_least(0.01, 0.75)
    inputs: str = _one_of("loss", "confidence", "both")
    depth: int = _at_least(1, 1)
    width: int = _at_least(1, 500)
    delta: float = _at_least(0, 0.8)
    centring: str = _one_of("exit", "batch", "all", "both")
    bound: bool = False
    objective: str = _one_of("allocated", "whole")
    look_ahead: str = _one_of("optimizer", "plain")
    engine: str = _one_of("forward_mode", "double_backward", "finite_difference")
    order: str = _one_of("exact", "delayed")
    interval: int = _at_least(1, 1)
    until: float = _at_least(0, 1.0)
    learning_rate: float = _at_least(0, 1e-4)
    weight_decay: float = _at_least(0, 1e-4)
    from_run: str | None = None
    exits: list[float] | None = _at_least(0, None)


@dataclass(frozen=True)
class ImtaConfig:
    """IMTA's parts: gradient equilibrium while the network trains, then a second phase of collaboration.

    The second phase freezes the network and trains collaborating classifiers on it, for as many epochs and from
    the same rate as the first, with distillation from the network's last head.
    """

    equilibrium: bool = False
    collaboration: bool = False
    temperature: float = _at_least(0.01, 3.0)
    gamma: float = _at_least(0, 0.9)


@dataclass(frozen=True)
class RunConfig:
    """One complete run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    weighting: WeightingConfig = field(default_factory=WeightingConfig)
    imta: ImtaConfig = field(default_factory=ImtaConfig)
    seed: int = _at_least(0, 0)
    recipe: str | None = None

    def __post_init__(self) -> None:
        if self.train.batch % 2:
            raise ValueError(f"train.batch must be even, it is trained on in two halves; got {self.train.batch}")
        if self.train.nesterov and not self.train.momentum:
            raise ValueError("train.nesterov needs train.momentum above 0")
        if self.imta.equilibrium and self.weighting.engine == "finite_difference":
            raise ValueError(
                "weighting.engine=finite_difference cannot go with imta.equilibrium, whose scaled gradients no "
                "difference of forward passes can see; use forward_mode"
            )
        check_order(self.weighting.order, self.weighting.engine, self.weighting.look_ahead)
        for name, share in (("imta.gamma", self.imta.gamma), ("weighting.until", self.weighting.until)):
            if share > 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {share:g}")
        if self.weighting.name == "learned" and self.train.clip_norm is not None:
            raise ValueError(
                "train.clip_norm cannot go with learned weights: clipping by global norm couples all params, so "
                "the look-ahead step would no longer be elementwise; leave one of them out"
            )
        if self.weighting.name == "frozen" and self.weighting.from_run is None:
            raise ValueError("weighting.name=frozen needs weighting.from_run, the run folder of the weight net")
        if (self.weighting.name == "fixed") != (self.weighting.exits is not None):
            raise ValueError("weighting.name=fixed and weighting.exits, a weight for every exit, need each other")
        if self.weighting.exits is not None and not any(self.weighting.exits):
            raise ValueError("weighting.exits must hold a weight above 0, or nothing is learned")

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self)}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> RunConfig:
        rest = dict(value)
        if rest.pop("schema", 1) != 1:
            raise ValueError("this configuration was written by a newer version of offramp")
        return parse(RunConfig, rest)


def check_order(order: str, engine: str, look_ahead: str) -> None:
    """Refuse what the delayed order cannot go with: its look-ahead step is the real one."""
    if order == "delayed" and (engine != "forward_mode" or look_ahead != "optimizer"):
        raise ValueError(
            "order=delayed takes the optimizer's own step as look-ahead and needs engine=forward_mode and "
            f"look_ahead=optimizer, got {engine} and {look_ahead}"
        )


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
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and types.NoneType in allowed:
        return None
    kind = typing.get_origin(allowed[0]) or allowed[0]
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} must be {_KINDS[kind]}, got {value!r}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{where} must be a finite number, got {value!r}")
    if kind is list:
        return [_parse_field(typing.get_args(allowed[0])[0], item, where, limits) for item in value]
    if "choices" in limits and value not in limits["choices"]:
        raise ValueError(unknown(where, value, limits["choices"]))
    if "min" in limits and not value >= limits["min"]:
        raise ValueError(f"{where} must be {limits['min']:g} or more, got {value!r}")
    return value


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
    """A configuration without what does not decide the result: seed, place of the data, how often things are saved.

    Nor does it have what training fills in for IMTA's second phase.
    """
    plain = TrainConfig()
    train = replace(config.train, eval_every=plain.eval_every, save_seconds=plain.save_seconds)
    implied = ("collaboration",) if config.imta.collaboration else ()
    overrides = {key: value for key, value in config.model.overrides.items() if key not in implied}
    model = replace(config.model, overrides=overrides)
    return replace(config, seed=0, model=model, data=replace(config.data, dir=None), train=train)


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


def _paths(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in table.items():
        if isinstance(value, dict) and value:
            found += _paths(value, f"{prefix}{key}.")
        elif f"{prefix}{key}" not in ENVELOPE:
            found.append(f"{prefix}{key}")
    return found
