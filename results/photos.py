"""What is kept of runs on photos: what every network in them does, in some kilobytes, and milliseconds.

    python results/photos.py keep RUN...      # evaluated runs on Pets or Clothing; kept in results/photos/
    python results/photos.py times            # milliseconds of every stage on this machine, by ONNX Runtime
    python results/photos.py int8 RUN FOLDER  # a pool's networks in 8 bits beside themselves, on test images
    python results/photos_page.py             # docs/results/photos.md and its pictures, from what is kept

A run whose network is a cascade is a pool: each of its members is a single network too, and some of them one after
another are a smaller cascade, whose answers follow from the saved logits.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from offramp.common.files import read_json, write_bytes, write_json
from offramp.fitting.choice import Network, points
from offramp.measuring.calibrate import PolicyRequest
from offramp.measuring.confidence import Predictions
from offramp.measuring.policy import exits_taken
from offramp.measuring.thresholds import search
from offramp.runs.config import RunConfig
from offramp.runs.folder import ENVIRONMENT, read_config, read_metrics
from offramp.runs.outputs import read_outputs, read_summary

HERE = Path(__file__).parent
KEPT = HERE / "photos"
POINTS = 24
SUMMED, SHARED = ", summed", ", shared params"  # what a cascade's name ends in


def member_name(member: dict[str, Any], size: int | None = None) -> str:
    """timm/tf_efficientnet_lite0 at 96 pixels -> Lite0 96; `size` where that is not the one it was built for."""
    return f"{member['name'].rsplit('_', 1)[-1].capitalize()} {size or member['overrides']['image_size']}"


def way_of(config: RunConfig) -> str:
    """How people call the way a run was trained."""
    options = config.objective.options
    distilled = config.objective.name == "distillation"
    words = [f"distilled from the {options.get('source', 'last')}" if distilled else "labels alone"]
    if config.train.network_epochs:
        words.append("heads on the frozen network" if config.train.parts == "inner_heads" else "network first")
    if config.model.overrides.get("head") == "chained":
        words.append("heads that read the exit before")
    if config.weighting.name == "learned":
        words.append("learned weights")
    return ", ".join(words)


@dataclass(frozen=True)
class Part:
    """A network within a run: which of its stages, in what order, with summed logits if `carry`."""

    family: str
    name: str
    stages: tuple[int, ...]
    carry: float = 0.0

    def logits(self, given: np.ndarray) -> np.ndarray:
        found: list[np.ndarray] = []
        for stage in self.stages:
            found.append(given[stage] + self.carry * found[-1] if found and self.carry else given[stage])
        return np.stack(found)


def parts_of(config: RunConfig, exits: int) -> list[Part]:
    """The single networks and cascades of a pool; a network with exits as it is."""
    members = config.model.overrides.get("members")
    if members is None:
        return [Part("exits", f"exits on {member_name(_as_member(config))}", tuple(range(exits)))]
    own = config.model.overrides
    names = [member_name(member, size) for member, size in zip(members, own["image_sizes"], strict=True)]
    shared = len(set(own.get("same", names))) < len(names)
    if shared or own.get("carry") or config.weighting.name == "learned":  # trained for each other: only as they are
        return [Part("cascade", " + ".join(names) + (SHARED if shared else ""), tuple(range(exits)))]
    found = [Part("single", name, (at,)) for at, name in enumerate(names)]
    for count in (2, 3):
        for stages in combinations(range(exits), count):
            for carry in (0.0, 1.0):
                name = " + ".join(names[at] for at in stages) + (SUMMED if carry else "")
                found.append(Part("cascade", name, stages, carry))
    return found


def _as_member(config: RunConfig) -> dict[str, Any]:
    return {"name": config.model.name, "overrides": config.model.overrides}


def keep(run: Path) -> Path:
    """Everything that the page says of a run, in one file."""
    config, summary = read_config(run), read_summary(run)
    held, test = read_outputs(run, "calibration"), read_outputs(run, "test")
    steps = np.diff([0, *summary.costs])
    parts = parts_of(config, len(steps))
    log = read_metrics(run)
    data = Path(str(config.data.dir)).name
    name = f"{data}-{'pool' if len(parts) > 1 else parts[0].family}-{way_of(config)}-seed={config.seed}"
    if config.model.name.startswith("timm/") and "lite2" in config.model.name:
        name = name.replace("-exits-", "-exits2-")
    networks = [_kept_part(part, steps, held, test) for part in parts]
    environment = read_json(run / ENVIRONMENT) if (run / ENVIRONMENT).is_file() else {}
    kept = {
        "schema": 1,
        "data": data,
        "way": way_of(config),
        "seed": config.seed,
        "epochs": [config.train.network_epochs or 0, config.train.epochs],
        "seconds": log[-1].get("seconds") if log else None,
        "device": environment.get("device", ""),
        "samples": {"calibration": len(held.labels), "test": len(test.labels)},
        "settings": _settings(config),
        "networks": networks,
    }
    path = KEPT / f"{name.replace(' ', '_').replace(',', '')}.json"
    write_bytes(path, (json.dumps(kept, separators=(",", ":")) + "\n").encode())
    return path


def _settings(config: RunConfig) -> dict[str, Any]:
    """What the run was, without where its data lay."""
    table = config.to_json()
    table["data"]["dir"] = None
    return table


def _kept_part(part: Part, steps: np.ndarray, held: Any, test: Any) -> dict[str, Any]:
    costs = tuple(np.cumsum(steps[list(part.stages)]).tolist())
    on_held = Predictions.of(part.logits(np.asarray(held.logits)), np.asarray(held.labels))
    on_test = Predictions.of(part.logits(np.asarray(test.logits)), np.asarray(test.labels))
    labels = np.asarray(test.labels)
    kept: dict[str, Any] = {
        "family": part.family,
        "name": part.name,
        "costs": costs,
        "held_out": [round(float(right.mean()), 5) for right in on_held.right],
        "test": [round(float(right.mean()), 5) for right in on_test.right],
        "balanced": [round(balanced(right, labels), 5) for right in on_test.right],
    }
    if len(costs) > 1:
        seen = points(Network(part.family, part.name, on_held, costs), PolicyRequest())
        kept["held_out_curve"] = [[round(p.mul_adds), round(p.top1, 5)] for p in seen]
        kept["curve"] = [_at(on_test, labels, costs, t) for t in search(on_held, costs, _grid(costs))]
    return kept


def _grid(costs: Sequence[float]) -> list[float]:
    return [float(b) for b in np.geomspace(costs[0], costs[-1], POINTS)]


def _at(given: Predictions, labels: np.ndarray, costs: Sequence[float], thresholds: Sequence[float]) -> list[Any]:
    """Mean cost, accuracy, balanced accuracy, and the share that leaves at each exit."""
    exits = exits_taken(given.confidences, thresholds)
    right = given.right[exits - 1, np.arange(len(exits))]
    shares = np.bincount(exits - 1, minlength=len(costs)) / len(exits)
    cost = float((shares * np.asarray(costs)).sum())
    return [
        round(cost),
        round(float(right.mean()), 5),
        round(balanced(right, labels), 5),
        [round(s, 4) for s in shares.tolist()],
    ]


def balanced(right: np.ndarray, labels: np.ndarray) -> float:
    """The mean over classes of the share that is right."""
    return float(np.mean([right[labels == label].mean() for label in np.unique(labels)]))


# Times


MEMBERS = (("lite0", 96), ("lite0", 128), ("lite0", 160), ("lite0", 192), ("lite2", 192))
TIMES = KEPT / "times.json"
BATCHES = (1, 64)


def times() -> None:
    """Milliseconds per image of members as stages of a cascade and alone, of exits, and of single networks in 8 bits.

    A stage of a cascade is given images of the largest size and resizes them itself.
    """
    from offramp import cascade, create_model
    from offramp.fitting.timing import Serving, stage_table

    def built(name: str, size: int, exits: int) -> Any:
        return create_model(f"timm/tf_efficientnet_{name}", 37, exits=exits, image_size=size).eval()

    networks = [built(name, size, 1) for name, size in MEMBERS]
    found: dict[str, dict[str, list[float]]] = defaultdict(dict)
    place = ""
    for batch in BATCHES:
        serving = Serving("onnx", "cpu", batch)
        pool = stage_table(cascade(networks, [size for _, size in MEMBERS]), serving)
        place = str(pool["machine"])
        for at, (name, size) in enumerate(MEMBERS, 1):
            found[f"{name.capitalize()} {size}"][str(batch)] = [_per_image(pool, at, batch)]
        exits = stage_table(built("lite0", 192, 4), serving)
        found["exits on Lite0 192"][str(batch)] = [_per_image(exits, k, batch) for k in range(1, 5)]
        for (name, size), network in zip(MEMBERS, networks, strict=True):
            alone = stage_table(network, serving)
            found[f"{name.capitalize()} {size}, alone"][str(batch)] = [_per_image(alone, 1, batch)]
            found[f"{name.capitalize()} {size}, int8"][str(batch)] = [int8_ms(network, batch)]
            print(f"{name} {size}, batch {batch}: timed", flush=True)
    write_json(TIMES, {"schema": 1, "machine": place, "engine": "onnxruntime", "stage_ms": dict(found)})


def _per_image(table: dict[str, Any], stage: int, batch: int) -> float:
    return round(float(table["stage_ms"][str(stage)][str(batch)]) / batch, 4)


def int8_ms(network: Any, batch: int) -> float:
    """Milliseconds per image of a network whose weights and activations ONNX Runtime made 8 bits wide."""
    from offramp.bench.infer import Subject, stage_milliseconds
    from offramp.fitting.timing import REPEATS
    from offramp.running.engines.onnx_engine import OnnxEngine

    subject = Subject(OnnxEngine([quantised(network)]), lambda images: None, network.input_shape)
    return _per_image({"stage_ms": stage_milliseconds(subject, [batch], REPEATS)}, 1, batch)


def quantised(network: Any, images: np.ndarray | None = None) -> bytes:
    """The network's graph in 8 bits: static, per channel, ranges from `images` (random ones if only time matters)."""
    import tempfile

    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    from offramp.models.fold import folded
    from offramp.running.export import onnx_stages

    if images is None:
        images = np.random.default_rng(1).normal(size=(8, *network.input_shape)).astype(np.float32)

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.left = [{"state_0": images[at : at + 1]} for at in range(len(images))]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.left.pop() if self.left else None

    with tempfile.TemporaryDirectory() as folder:
        plain, ready, small = (Path(folder) / name for name in ("plain.onnx", "ready.onnx", "int8.onnx"))
        plain.write_bytes(onnx_stages(folded(network))[0])
        quant_pre_process(str(plain), str(ready), skip_symbolic_shape=True)
        eight: Any = {"per_channel": True, "activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
        quantize_static(str(ready), str(small), Reader(), quant_format=QuantFormat.QDQ, **eight)
        return small.read_bytes()


INT8 = KEPT / "int8.json"
RANGED = 200  # training images that give the ranges of activations


def int8(run: Path, folder: Path) -> None:
    """What 8 bits do to the single networks of a pool: both accuracies on test images, and how often they agree."""
    import onnxruntime as ort
    import torch

    from offramp import load_model
    from offramp.data import load_dataset, prepared_for
    from offramp.fitting.candidates import members_of

    cpu, rows = torch.device("cpu"), []
    for network in members_of(load_model(run).eval()):
        data = prepared_for(network, load_dataset("imagefolder", data_dir=folder))
        some = np.random.default_rng(0).permutation(data.size("train"))[:RANGED]
        seen = torch.cat([batch.images for batch in data.sweep("train", 64, cpu)]).numpy()[np.sort(some)]
        session = ort.InferenceSession(quantised(network, seen), providers=["CPUExecutionProvider"])
        plain, eight, labels = [], [], []
        for batch in data.sweep("test", 64, cpu):
            with torch.inference_mode():
                plain.append(network(batch.images)[-1].argmax(1).numpy())
            eight.append(session.run(None, {"state_0": batch.images.contiguous().numpy()})[0].argmax(1))
            labels.append(batch.labels.numpy())
        full, small, right = (np.concatenate(each) for each in (plain, eight, labels))
        spec = network.spec
        assert spec is not None
        rows.append(
            {
                "name": member_name({"name": spec.name, "overrides": spec.overrides}),
                "samples": len(right),
                "top1": round(float((full == right).mean()), 5),
                "int8": round(float((small == right).mean()), 5),
                "agree": round(float((full == small).mean()), 5),
            }
        )
        print(rows[-1], flush=True)
    write_json(INT8, {"schema": 1, "data": folder.name, "networks": rows})


def main(words: Sequence[str]) -> None:
    if words[:1] == ["keep"] and len(words) > 1:
        for run in words[1:]:
            print(f"kept: {keep(Path(run))}")
    elif words == ["times"]:
        times()
    elif words[:1] == ["int8"] and len(words) == 3:
        int8(Path(words[1]), Path(words[2]))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
