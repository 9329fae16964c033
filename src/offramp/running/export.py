"""From a run to a bundle: the trained network, its policy, and proof that the bundle answers as the network does.

Everything is written into a folder beside the wanted one, run against the golden outputs, and moved into place.
"""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from offramp import __version__
from offramp.common.device import exact_float32
from offramp.common.files import sha256, write_bytes, write_json, writing
from offramp.common.images import Preprocessing
from offramp.common.names import unknown
from offramp.common.pretrained import CARD, MANIFEST, bundle_folder, is_bundle, pretrained_names
from offramp.measuring.policy import Policies, read_policies, write_policies
from offramp.models.cost import exit_costs
from offramp.models.exits import ExitNet
from offramp.models.fold import folded
from offramp.models.registry import load_model
from offramp.models.weights import write_tensors
from offramp.running.bundle import (
    FORMATS,
    GOLDEN,
    POLICY,
    SCHEMA,
    WEIGHTS,
    ModelCard,
    bundled_model,
    checked,
    compare_golden,
    load_bundle,
    read_golden,
    stage_file,
)
from offramp.running.golden_photos import PolicyResult, cut_photos, drawn_photos, write_photos
from offramp.runs.folder import read_config
from offramp.runs.outputs import read_outputs, read_summary

GOLDEN_IMAGES = 8


def export_run(
    run: str | Path,
    out: str | Path,
    *,
    policy: str | Path | None = None,
    format: str = "torch",
    half: bool = False,
    images: bool = True,
) -> Path:
    """Write the bundle of an evaluated and calibrated run; a folder that exists is not overwritten.

    `run` may also be a torch bundle, or the name of a network that comes trained. `half` stores weights as bfloat16.
    Without `images` the golden inputs are drawn, and the bundle holds no image of the data.
    """
    if is_bundle(run):
        return _export_bundle(bundle_folder(run), Path(out), policy, format, half)
    run, out = Path(run), Path(out)
    if not run.is_dir():
        raise ValueError(f"{run} is not the folder of a run, and {unknown('bundle', str(run), pretrained_names())}")
    path = run / POLICY if policy is None else Path(policy)
    if not path.is_file():
        raise ValueError(f"{path} is not there; find when images may leave with: offramp calibrate {run}")
    summary, policies = read_summary(run), read_policies(path)
    if summary.preprocessing is None:
        raise ValueError(f"{run} was evaluated by an older version; run: offramp eval {run}")
    model = load_model(run).set_schedule(policies.schedule)
    thumbs = read_outputs(run, "test").thumbs if images else None
    golden = drawn_images(model.input_shape) if thumbs is None else _cut(thumbs, summary.preprocessing)
    seed = read_config(run).seed
    return export_model(model, policies, summary.classes, summary.preprocessing, golden, out, format, half, seed)


def _export_bundle(folder: Path, out: Path, policy: str | Path | None, format: str, half: bool) -> Path:
    """A torch bundle as another one."""
    manifest, card, policies = checked(folder)
    if manifest["format"] != "torch":
        raise ValueError(f"{folder} holds ONNX graphs, of which no other bundle can be made; export its run")
    if policy is not None:
        policies = read_policies(Path(policy))
    model = bundled_model(folder, card).set_schedule(policies.schedule)
    golden = read_golden(folder)[0]
    return export_model(model, policies, card.classes, card.preprocessing, golden, out, format, half, card.seed)


def export_model(
    model: ExitNet,
    policies: Policies,
    classes: tuple[str, ...],
    preprocessing: Preprocessing,
    images: np.ndarray,
    out: Path,
    format: str = "torch",
    bfloat16: bool = False,
    seed: int = 0,
) -> Path:
    """Write a bundle of any network that can be rebuilt; `images` (uint8 [n, 3, h, w]) become its golden inputs.

    `bfloat16` rounds the weights and stores them so: half the size, and the golden outputs are those of the rounded
    network.
    """
    if format not in FORMATS:
        raise ValueError(unknown("bundle format", format, FORMATS))
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(f"{out} is there already; choose another folder or remove it")
    if model.spec is None:
        raise ValueError("this network has no name to be rebuilt from; register its builder with register_model")
    costs = tuple(cost.mul_adds for cost in exit_costs(model))
    if costs != policies.costs:
        raise ValueError("the policy is for another network: its costs are not this network's")
    card = ModelCard(model.spec.to_json(), policies.schedule, model.input_shape, classes, costs, preprocessing, seed)
    if bfloat16:
        model = rounded(model)
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        _write_files(part, model.eval(), policies, card, images, format, bfloat16)
        bundle = load_bundle(part, device="cpu")
        compare_golden(bundle.engine, preprocessing.normalise(images), _reference(model, card, images), out)
        bundle.check_photos(out)
        if out.is_dir():
            out.rmdir()
        os.replace(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


def _write_files(
    part: Path, model: ExitNet, policies: Policies, card: ModelCard, images: np.ndarray, format: str, bfloat16: bool
) -> None:
    write_json(part / CARD, card.to_json())
    write_policies(part / POLICY, policies)
    photos = list(drawn_photos(card.preprocessing))
    cut = cut_photos([data for _, _, data in photos], card.preprocessing)
    write_photos(part, photos, PolicyResult.of(_reference(model, card, cut), policies))
    with writing(part / GOLDEN) as file:
        np.savez(file, images=images, logits=_reference(model, card, images), photos=cut)
    if format == "torch":
        tensors = model.state_dict()
        if bfloat16:
            tensors = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
        write_tensors(part / WEIGHTS, tensors)
    else:
        for k, graph in enumerate(onnx_stages(folded(model)), 1):
            write_bytes(part / stage_file(k), graph)
    files = {path.name: sha256(path) for path in sorted(part.iterdir())}
    write_json(part / MANIFEST, {"schema": SCHEMA, "offramp": __version__, "format": format, "files": files})


def rounded(model: ExitNet) -> ExitNet:
    """A copy whose params and statistics are what bfloat16 can hold."""
    own = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in own.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(tensor.bfloat16())
    return own


def _reference(model: ExitNet, card: ModelCard, images: np.ndarray) -> np.ndarray:
    """The logits of the network as it was trained, nothing folded, in float32."""
    with torch.inference_mode(), exact_float32():
        ready = torch.from_numpy(card.preprocessing.normalise(images))
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
    """The network without its inner heads."""

    def __init__(self, model: ExitNet) -> None:
        super().__init__()
        self.model = model

    def forward(self, *state: Tensor) -> tuple[Tensor, ...]:
        for k in range(1, self.model.num_exits):
            _, state = self.model.advance(k, state)
        return (self.model.step(self.model.num_exits, state)[0],)


def onnx_whole(model: ExitNet) -> bytes:
    """The whole network without its inner heads as one graph, to be compared with."""
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
    return program.model_proto.SerializeToString()
