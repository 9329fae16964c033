"""From a run to a bundle: the trained network, its policy, and proof that the bundle answers as the network does.

Everything is written into a folder beside the wanted one, run against the golden outputs, and moved into place. A
network of one's own loop comes as an object, with the folder that `offramp.evaluate` and `offramp.calibrate` wrote.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offramp.common import registry
from offramp.common.device import exact_float32
from offramp.common.files import new_folder, read_json, write_bytes, write_json, writing
from offramp.common.images import Preprocessing
from offramp.common.names import unknown
from offramp.common.pretrained import CARD, bundle_folder, is_bundle
from offramp.data import preprocessing_of
from offramp.measuring.policy import Policies, read_policies, write_policies
from offramp.models.cost import exit_costs
from offramp.models.exits import ExitNet, all_specs
from offramp.models.fold import folded
from offramp.models.registry import MODELS, load_model
from offramp.models.weights import write_tensors
from offramp.running.bundle import (
    FORMATS,
    GOLDEN,
    PACKAGES,
    POLICY,
    WEIGHTS,
    ModelCard,
    bundled_model,
    checked,
    compare_golden,
    in_python,
    load_bundle,
    not_there,
    read_golden,
    stage_file,
    write_manifest,
)
from offramp.running.golden_photos import PolicyResult, cut_photos, drawn_photos, write_photos
from offramp.runs.folder import CONFIG, DATA, holds_run, read_config
from offramp.runs.outputs import EvalSummary, read_outputs, read_summary

GOLDEN_IMAGES = 8


@dataclass(frozen=True)
class About:
    """What a bundle says beside its network and policy: classes, how images are prepared, what it was trained on."""

    classes: tuple[str, ...]
    preprocessing: Preprocessing
    seed: int = 0
    data: str | None = None
    held_out: str | None = None


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    policy: str | Path | None = None,
    format: str | None = None,
    half: bool = False,
    images: bool = True,
) -> Path:
    """Write the bundle of an evaluated and calibrated run; a folder that exists is not overwritten.

    `run` may also be a model folder that was evaluated and calibrated, a torch bundle, or the name of a network that
    comes trained. `format` None is torch for our networks and onnx for others. `half` stores weights as bfloat16.
    Without `images` the golden inputs are drawn, and the bundle holds no image of the data.
    """
    if is_bundle(run):
        return _export_bundle(bundle_folder(run), Path(out), policy, format, half)
    run = Path(run)
    if not run.is_dir():
        raise ValueError(not_there(str(run)))
    summary, policies = read_summary(run), _read_policies(run, policy)
    if summary.preprocessing is None:
        older = holds_run(run)
        how = f"it was evaluated by an older version; run: offramp eval {run}" if older else _AGAIN
        raise ValueError(f"{run} does not say how images are prepared: {how}")
    if not (run / CONFIG).is_file():
        raise ValueError(f"{run} holds no network; its object is exported in Python: {in_python(run)}")
    about = About(summary.classes, summary.preprocessing, *_trained_on(run))
    model = load_model(run).set_schedule(policies.schedule)
    golden = _golden_images(run, summary, model, summary.preprocessing, images)
    return export_model(model, policies, about, golden, Path(out), format, half)


_AGAIN = "evaluate it again with preprocessing=..., or in Python: offramp.export(..., preprocessing=...)"


def export(
    model: ExitNet,
    folder: str | Path,
    *,
    out: str | Path,
    classes: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
    policy: str | Path | None = None,
    format: str | None = None,
    half: bool = False,
    images: bool = True,
) -> Path:
    """Write the bundle of any network, with the folder that `offramp.evaluate` and `offramp.calibrate` wrote for it.

    `classes` and `preprocessing` are taken from there, or from the network, where they are not given. `format` None is
    torch for our own networks and onnx for all others, which then need no code of yours to run.
    """
    if not isinstance(model, ExitNet):
        raise ValueError(
            "only a network that can be run stage by stage becomes a bundle: put its stages and heads together with "
            f"ExitNet.from_parts; this is a {type(model).__name__}"
        )
    folder = Path(folder)
    summary, policies = read_summary(folder), _read_policies(folder, policy)
    prepared = preprocessing or summary.preprocessing or preprocessing_of(model)
    if prepared is None:
        raise ValueError(
            "a bundle must know how images are prepared; give it preprocessing=Preprocessing(size, resize, mean, std)"
        )
    if prepared.size != model.input_shape[-1]:
        raise ValueError(f"preprocessing.size is {prepared.size}, the network takes {model.input_shape[-1]} pixels")
    if model.input_shape != (3, prepared.size, prepared.size):
        raise ValueError(
            f"a bundle is for square images in three colours, the network takes {list(model.input_shape)}; grey ones "
            "can be given three times, others padded"
        )
    named = summary.classes if classes is None else tuple(map(str, classes))
    golden = _golden_images(folder, summary, model, prepared, images)
    own = copy.deepcopy(model).cpu().set_schedule(policies.schedule)
    return export_model(own, policies, About(named, prepared, *_trained_on(folder)), golden, Path(out), format, half)


def _read_policies(run: Path, policy: str | Path | None) -> Policies:
    path = run / POLICY if policy is None else Path(policy)
    if not path.is_file():
        raise ValueError(f"{path} is not there; find when images may leave with: offramp calibrate {run}")
    return read_policies(path)


def _trained_on(run: Path) -> tuple[int, str | None, str | None]:
    """The seed of a run, which data it had and which of them it held out; of a network from elsewhere, nothing."""
    found = read_json(run / DATA) if (run / DATA).is_file() else {}
    known = found if isinstance(found, dict) else {}
    return (read_config(run).seed if holds_run(run) else 0), known.get("identity"), known.get("held_out")


def _golden_images(
    run: Path, summary: EvalSummary, model: ExitNet, preprocessing: Preprocessing, images: bool
) -> np.ndarray:
    """Some of the images that the network was evaluated on; else drawn ones."""
    split = "test" if "test" in summary.samples else "calibration"
    thumbs = read_outputs(run, split).thumbs if images else None
    return drawn_images(model.input_shape) if thumbs is None else _cut(thumbs, preprocessing)


def _export_bundle(folder: Path, out: Path, policy: str | Path | None, format: str | None, half: bool) -> Path:
    """A torch bundle as another one."""
    manifest, card, policies = checked(folder)
    if manifest["format"] != "torch":
        raise ValueError(f"{folder} holds ONNX graphs, of which no other bundle can be made; export its run")
    if policy is not None:
        policies = read_policies(Path(policy))
    model = bundled_model(folder, card).set_schedule(policies.schedule)
    about = About(card.classes, card.preprocessing, card.seed, card.data, card.held_out)
    return export_model(model, policies, about, read_golden(folder)[0], out, format, half)


def default_format(model: ExitNet) -> str:
    """torch for our own networks; onnx for others, which then need neither a package nor anybody's code."""
    return "torch" if _is_ours(model) else "onnx"


def _is_ours(model: ExitNet) -> bool:
    """Whether the network, and every network in it, is built by offramp alone."""
    return model.spec is not None and all(_name_is_ours(spec.name) for spec in all_specs(model.spec))


def _name_is_ours(name: str) -> bool:
    return name in MODELS and _module_of(MODELS[name].builder).startswith("offramp.")


def _module_of(builder: Any) -> str:
    """The module that a builder was written in."""
    return str(getattr(getattr(builder, "func", builder), "__module__", None) or "")


def export_model(
    model: ExitNet,
    policies: Policies,
    about: About,
    images: np.ndarray,
    out: Path,
    format: str | None = None,
    bfloat16: bool = False,
) -> Path:
    """Write a bundle; `images` (uint8 [n, 3, h, w]) become its golden inputs. Only torch bundles need a named network.

    `bfloat16` rounds the weights and stores them so: half the size, and the golden outputs are those of the rounded
    network.
    """
    format = format or default_format(model)
    _refuse_format(model, format, bfloat16)
    costs = tuple(cost.mul_adds for cost in exit_costs(model))
    if costs != policies.costs:
        raise ValueError("the policy is for another network: its costs are not this network's")
    if bfloat16:
        model = rounded(model)
    expected = _reference(model.eval(), about.preprocessing, images)
    card = _card(model, policies, about, costs, expected.shape[-1], format)
    with new_folder(out) as part:
        _write_files(part, model, policies, card, images, expected, format, bfloat16)
        bundle = load_bundle(part, device="cpu")
        compare_golden(bundle.engine, about.preprocessing.normalise(images), expected, out)
        bundle.check_photos(out)
    return out


def _refuse_format(model: ExitNet, format: str, bfloat16: bool) -> None:
    if format not in FORMATS:
        raise ValueError(unknown("bundle format", format, FORMATS))
    if format == "torch" and model.spec is None:
        raise ValueError(
            "this network has no name to be rebuilt from; export it as onnx, or give its builder a name: register_model"
        )
    if format == "onnx" and bfloat16:
        raise ValueError(
            "half the size is for torch bundles; the graphs of an onnx bundle hold float32: leave --half out"
        )


def _card(
    model: ExitNet, policies: Policies, about: About, costs: tuple[int, ...], num_classes: int, format: str
) -> ModelCard:
    """What `model.json` says; an ONNX bundle names no package and no module, for it needs none."""
    if about.classes and len(about.classes) != num_classes:
        raise ValueError(f"{len(about.classes)} classes were given, the network has {num_classes}")
    spec = {"name": None, "num_classes": num_classes, "overrides": {}} if model.spec is None else model.spec.to_json()
    spec["overrides"].pop("pretrained", None)  # its params are here
    packages, imports = _needed(model) if format == "torch" else ({}, ())
    return ModelCard(
        spec,
        policies.schedule,
        model.input_shape,
        about.classes,
        costs,
        about.preprocessing,
        about.seed,
        about.data,
        about.held_out,
        packages,
        imports,
    )


def _needed(model: ExitNet) -> tuple[dict[str, str], tuple[str, ...]]:
    """What builds a named network beside offramp: a package with its version, or modules to be imported."""
    assert model.spec is not None
    names = [spec.name for spec in all_specs(model.spec)]
    packages = {package for name in names if (package := name.partition("/")[0]) in PACKAGES and "/" in name}
    theirs = [name for name in names if name in MODELS and not _name_is_ours(name)]
    modules = {_module_of(MODELS[name].builder) for name in theirs} - {"", "__main__"}
    versions = {package: metadata.version(package) for package in sorted(packages)}
    return versions, tuple(registry.loaded if theirs and registry.loaded else sorted(modules))


def _write_files(
    part: Path,
    model: ExitNet,
    policies: Policies,
    card: ModelCard,
    images: np.ndarray,
    expected: np.ndarray,
    format: str,
    bfloat16: bool,
) -> None:
    write_json(part / CARD, card.to_json())
    write_policies(part / POLICY, policies)
    photos = list(drawn_photos(card.preprocessing))
    cut = cut_photos([data for _, _, data in photos], card.preprocessing)
    write_photos(part, photos, PolicyResult.of(_reference(model, card.preprocessing, cut), policies))
    with writing(part / GOLDEN) as file:
        np.savez(file, images=images, logits=expected, photos=cut)
    if format == "torch":
        tensors = model.state_dict()
        if bfloat16:
            tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
        write_tensors(part / WEIGHTS, tensors)
    else:
        for k, graph in enumerate(onnx_stages(folded(model)), 1):
            write_bytes(part / stage_file(k), graph)
    write_manifest(part, format, card.preprocessing)


def rounded(model: ExitNet) -> ExitNet:
    """A copy whose params and statistics are what bfloat16 can hold."""
    own = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in own.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.bfloat16())
    return own


def _reference(model: ExitNet, preprocessing: Preprocessing, images: np.ndarray) -> np.ndarray:
    """The logits of the network as it was trained, nothing folded, in float32."""
    with torch.inference_mode(), exact_float32():
        ready = torch.from_numpy(preprocessing.normalise(images))
        return torch.stack(model.eval()(ready)).numpy()


def _cut(thumbs: np.ndarray, preprocessing: Preprocessing) -> np.ndarray:
    """Some images as the network takes them."""
    from PIL import Image

    return np.stack([preprocessing.cut(Image.fromarray(image)) for image in thumbs[:GOLDEN_IMAGES]])


def drawn_images(shape: tuple[int, int, int]) -> np.ndarray:
    """Images of nothing, the same ones every time: coloured waves of random directions and lengths, uint8."""
    channels, height, width = shape
    draw = np.random.default_rng(0)
    down, right = np.mgrid[:height, :width] / max(height, width)
    lengths = draw.normal(0, 2 * np.pi, (2, GOLDEN_IMAGES, channels, 4, 1, 1))
    starts = draw.uniform(0, 2 * np.pi, lengths.shape[1:])
    waves = np.sin(lengths[0] * down + lengths[1] * right + starts).mean(2)
    return np.round(127.5 + 127.5 * waves).astype(np.uint8)


class _StageModule(nn.Module):
    """One stage as a module of its own: state in; logits and the next state out."""

    def __init__(self, model: ExitNet, k: int) -> None:
        super().__init__()
        self.model, self.k = model, k

    def forward(self, *state: Tensor) -> tuple[Tensor, ...]:
        logits, after = self.model.step(self.k, state)
        return (logits, *after)


def onnx_stages(model: ExitNet) -> list[bytes]:
    """One ONNX graph per stage, with any batch size."""
    state: tuple[Tensor, ...] = (torch.zeros(2, *model.input_shape),)
    graphs = []
    for k in range(1, model.num_exits + 1):
        stage = _StageModule(model, k).eval()
        with torch.no_grad():
            _, *after = stage(*state)
        graphs.append(onnx_graph(stage, state, ["logits", *(f"next_{i}" for i in range(len(after)))]))
        state = tuple(after)
    return graphs


class _Whole(nn.Module):
    """The network to its last exit."""

    def __init__(self, model: ExitNet) -> None:
        super().__init__()
        self.model = model

    def forward(self, *state: Tensor) -> tuple[Tensor, ...]:
        return (self.model.last(*state),)


def onnx_whole(model: ExitNet) -> bytes:
    """The network to its last exit as one graph, to be compared with."""
    return onnx_graph(_Whole(model).eval(), (torch.zeros(2, *model.input_shape),), ["logits"])


def onnx_graph(module: nn.Module, inputs: tuple[Tensor, ...], outputs: list[str]) -> bytes:
    """A module as an ONNX graph whose first dimension is free."""
    names = [f"state_{i}" for i in range(len(inputs))]
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporter warns of its own insides
        program = torch.onnx.export(
            module,
            inputs,
            dynamo=True,
            input_names=names,
            output_names=outputs,
            dynamic_shapes=(tuple({0: batch} for _ in inputs),),
            verbose=False,
        )
    assert program is not None
    graph = program.model_proto
    for part in (graph.graph, *graph.graph.node, *graph.graph.value_info, *graph.graph.initializer):
        part.ClearField("metadata_props")  # stack traces with the paths of whoever exports
    return graph.SerializeToString()
