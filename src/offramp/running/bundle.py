"""A bundle: everything a box needs to answer, in one folder, checked before it is used.

`bundle.json` names the format and the sha256 of every file, `model.json` says what to build and how to prepare
images, `policy.json` when to leave; weights are safetensors or one ONNX graph per stage; `golden.npz` holds inputs
with the outputs they must give, `photos.json` encoded photos with theirs. Nothing is unpickled, and nothing of
training is imported. docs/bundle-format.md says all of it to those who write clients in other languages.
"""

from __future__ import annotations

import logging
import re
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from offramp import __version__
from offramp.common.extras import MissingExtra
from offramp.common.files import check_digests, read_json, sha256, short_digest, write_json
from offramp.common.images import Preprocessing, UnreadableImage, read_image, upright_rgb
from offramp.common.names import check_device_name, meant
from offramp.common.pretrained import CARD, MANIFEST, bundle_folder, pretrained_names
from offramp.measuring.policy import Policies, Policy, read_policies
from offramp.running.engines.protocol import Engine, all_logits
from offramp.running.golden_photos import PolicyResult, check_answers, check_cuts, cut_photos, read_photos
from offramp.running.packing import cached_packing
from offramp.running.runtime import ExitResult, Runtime
from offramp.runs.outputs import read_arrays

if TYPE_CHECKING:
    from offramp.models.exits import ExitNet, ModelSpec

log = logging.getLogger("offramp")

SCHEMA = 2  # of the manifest; 2 says that images are not resized bilinearly, which readers of 1 would do
CARD_SCHEMA = 1
FORMATS = ("torch", "onnx")
POLICY, WEIGHTS, GOLDEN = "policy.json", "model.safetensors", "golden.npz"
GOLDEN_TOLERANCE = 1e-3  # of logits, whose size is about ten
PACKAGES = ("timm", "torchvision")  # whose networks are built by name: timm/resnet50


@dataclass(frozen=True)
class ModelCard:
    """`model.json`: the network, its stages' schedule and costs, its classes, and how images are prepared.

    A torch bundle says what its network is built from beside offramp: `packages` with their versions, and `imports`,
    the modules that registered it. They are named to people, never imported.
    """

    model: dict[str, Any]
    schedule: str
    input_shape: tuple[int, int, int]
    classes: tuple[str, ...]
    costs: tuple[int, ...]
    preprocessing: Preprocessing
    seed: int = 0  # of the run: it decides what a folder of images holds out
    data: str | None = None  # which data it was trained on (Dataset.identity), where that is known
    held_out: str | None = None  # and which of them were held out (Dataset.held_out)
    packages: dict[str, str] = field(default_factory=dict)
    imports: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        value = {"schema": CARD_SCHEMA, **asdict(self), "preprocessing": self.preprocessing.to_json()}
        optional = ("data", "held_out", "packages", "imports")
        return {key: own for key, own in value.items() if own or key not in optional}

    @staticmethod
    def from_json(value: dict[str, Any]) -> ModelCard:
        if value["schema"] != CARD_SCHEMA:
            raise ValueError(f"its schema {value['schema']!r} is not known to this version of offramp")
        data, held_out = (None if value.get(key) is None else str(value[key]) for key in ("data", "held_out"))
        made = ModelCard(
            dict(value["model"]),
            str(value["schedule"]),
            tuple(map(int, value["input_shape"])),  # type: ignore[arg-type]
            tuple(map(str, value["classes"])),
            tuple(map(int, value["costs"])),
            Preprocessing.from_json(value["preprocessing"]),
            int(value.get("seed", 0)),
            data,
            held_out,
            {str(name): str(version) for name, version in value.get("packages", {}).items()},
            tuple(map(str, value.get("imports", ()))),
        )
        size = made.preprocessing.size
        if made.input_shape != (3, size, size) or made.preprocessing.resize > 4 * size:
            raise ValueError("its preprocessing does not fit its network")
        if not made.costs or made.costs[0] <= 0 or list(made.costs) != sorted(made.costs):
            raise ValueError("its costs do not rise from exit to exit")
        if made.classes and len(made.classes) != made.model.get("num_classes"):
            raise ValueError("its classes are not as many as its network's")
        if not all(name in PACKAGES and re.fullmatch(r"[\w.+]+", version) for name, version in made.packages.items()):
            raise ValueError(f"its packages are not versions of {' and '.join(PACKAGES)}")
        return made


def stage_file(k: int) -> str:
    """The name of stage k's graph."""
    return f"stage-{k}.onnx"


class Bundle:
    """A loaded bundle: `bundle(images) -> ExitResult`."""

    def __init__(
        self, folder: Path, format_: str, card: ModelCard, policies: Policies, engine: Engine, digest: str
    ) -> None:
        self.folder, self.format, self.card, self.policies, self.engine = folder, format_, card, policies, engine
        self.digest = digest
        self._runtimes: dict[Policy, Runtime] = {}

    @property
    def classes(self) -> tuple[str, ...]:
        return self.card.classes

    @property
    def costs(self) -> tuple[int, ...]:
        return self.card.costs

    @property
    def files(self) -> list[str]:
        """The files that its manifest vouches for."""
        return list(_read_manifest(self.folder)["files"])

    def policy(self, budget_mul_adds: float | None = None, q: float | None = None) -> Policy:
        """The chosen policy, or the one that a budget or a q asks for."""
        return asked_policy(self.policies, budget_mul_adds, q)

    def runtime(self, policy: Policy | None = None) -> Runtime:
        """The network under a policy, packing by the rule measured on this machine if there is one.

        A policy's runtime is made once: it learns how long stages take, which deadlines need.
        """
        policy = policy or self.policies.policy
        if policy not in self._runtimes:
            packing = cached_packing(self.digest, self.engine)
            self._runtimes[policy] = Runtime(self.engine, policy, self.costs, packing)
        return self._runtimes[policy]

    def prepare(self, images: Sequence[Any] | np.ndarray, first: int = 1) -> np.ndarray:
        """Normalised float32 [n, 3, h, w] of paths, encoded bytes, Pillow images or uint8 arrays [n, h, w, 3].

        One that cannot be read is named by its number, counted from `first`.
        """
        if isinstance(images, (str, bytes, Path, Image.Image)):
            raise ValueError("give a list of images, even for one")
        own = self.card.preprocessing
        cut = [own.cut(_as_image(image, number)) for number, image in enumerate(images, first)]
        return own.normalise(np.stack(cut)) if cut else np.zeros((0, *self.card.input_shape), np.float32)

    def __call__(
        self,
        images: Sequence[Any] | np.ndarray,
        *,
        budget_mul_adds: float | None = None,
        q: float | None = None,
        max_exit: int | None = None,
        max_mul_adds: float | None = None,
        deadline_ms: float | None = None,
    ) -> ExitResult:
        """Classify images of any kind; a float array [n, 3, h, w] is taken as normalised already."""
        ready = isinstance(images, np.ndarray) and images.dtype.kind == "f"
        tensor = np.asarray(images) if ready else self.prepare(images)
        if tensor.shape[1:] != self.card.input_shape:
            raise ValueError(f"images must be {list(self.card.input_shape)}, got {list(tensor.shape[1:])}")
        runtime = self.runtime(self.policy(budget_mul_adds, q))
        return runtime(tensor, max_exit=max_exit, max_mul_adds=max_mul_adds, deadline_ms=deadline_ms)

    def check_golden(self) -> float:
        """Run the golden inputs through every stage; the largest difference in logits. Too large is a ValueError.

        So is a golden photo that becomes another array or gets another answer; bundles of version 0.1 have none.
        """
        images, expected = read_golden(self.folder)
        difference = compare_golden(self.engine, self.card.preprocessing.normalise(images), expected, self.folder)
        self.check_photos(self.folder)
        return difference

    def check_photos(self, source: Any) -> None:
        """Cut the golden photos and run what they should be cut into; `source` is what an error names."""
        photos = read_photos(self.folder, self.files)
        if photos:
            cut, own = read_cut_photos(self.folder), self.card.preprocessing
            check_cuts(photos, cut_photos([(self.folder / one.file).read_bytes() for one in photos], own), cut, source)
            check_answers(photos, PolicyResult.of(all_logits(self.engine, own.normalise(cut)), self.policies), source)


def asked_policy(policies: Policies, budget_mul_adds: float | None = None, q: float | None = None) -> Policy:
    """The chosen policy of a bundle, or the one that a budget or a q asks for."""
    if budget_mul_adds is not None and q is not None:
        raise ValueError("ask for a budget or for a q, not for both")
    if budget_mul_adds is not None:
        return policies.within(budget_mul_adds)
    return policies.policy if q is None else policies.at_q(q)


def _as_image(value: Any, number: int) -> Image.Image:
    """One image of any kind; the `number` of one that cannot be read is named."""
    try:
        return _opened(value)
    except UnreadableImage as error:
        raise UnreadableImage(f"image {number} cannot be read: {error}") from error


def _opened(value: Any) -> Image.Image:
    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[-1] != 3:
            raise ValueError(f"an image must be uint8 [h, w, 3], got {value.dtype} {list(value.shape)}")
        return Image.fromarray(value)
    return upright_rgb(value) if isinstance(value, Image.Image) else read_image(value)


def load_bundle(
    path: str | Path, *, device: str = "auto", threads: int | None = None, own_process: bool | None = None
) -> Bundle:
    """Check a bundle's manifest and load it; torch is needed only for torch bundles.

    `path` may be the name of a network that comes trained. `threads` are as many as a stage may use; by default all.
    `own_process` does nothing any more.
    """
    if own_process is not None:
        warnings.warn("load_bundle needs no own_process: leave it out", DeprecationWarning, stacklevel=2)
    check_device_name(device)
    folder = bundle_folder(path)
    manifest, card, policies = checked(folder)
    if manifest["format"] == "onnx":
        engine = _onnx_engine(folder, card, policies, device, threads)
    else:
        engine = _torch_engine(folder, card, policies, device, threads)
    if engine.num_exits != len(card.costs):
        raise ValueError(f"{folder} is damaged: the network has {engine.num_exits} exits, its costs {len(card.costs)}")
    bundle = Bundle(folder, manifest["format"], card, policies, engine, manifest_digest(manifest))
    if manifest["format"] == "torch" and _other_versions(card):  # the same names may stand for another network
        bundle.check_golden()
    return bundle


def checked(folder: Path) -> tuple[dict[str, Any], ModelCard, Policies]:
    """Manifest, card and policies of a bundle whose files are those that were exported."""
    manifest = _read_manifest(folder)
    _check_files(folder, manifest["files"])
    try:
        card = ModelCard.from_json(read_json(folder / CARD))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder / CARD} cannot be used: {error}") from error
    policies = read_policies(folder / POLICY)
    if policies.costs != card.costs:
        raise ValueError(f"the policy in {folder} is for another network: its costs are not the model's")
    _check_weights(folder, manifest, len(card.costs))
    return manifest, card, policies


def manifest_digest(manifest: dict[str, Any]) -> str:
    """A short name for exactly these files."""
    return short_digest([repr(sorted(manifest["files"].items()))])


def write_manifest(folder: Path, format_: str, preprocessing: Preprocessing) -> None:
    """Vouch for every file that lies in a folder."""
    files = {path.name: sha256(path) for path in sorted(folder.iterdir())}
    schema = 1 if preprocessing.is_usual else SCHEMA
    write_json(folder / MANIFEST, {"schema": schema, "offramp": __version__, "format": format_, "files": files})


def in_python(folder: Path) -> str:
    """What makes a bundle of a network that lies in no folder."""
    return f"offramp.export(model, {str(folder)!r}, out={str(folder / 'bundle')!r})"


def not_there(name: str) -> str:
    """About a name that is neither a folder nor a network that comes trained."""
    known = pretrained_names()
    return f"{name} is not there{meant(name, known) or '.'} Networks that come trained: {', '.join(known) or 'none'}"


def _no_bundle(folder: Path) -> str:
    """What to do with a folder that is none."""
    if not folder.exists():
        return not_there(str(folder))
    if (folder / "bundle" / MANIFEST).is_file():
        return f"{folder} is not a bundle; it has one inside: {folder / 'bundle'}"
    how = f"offramp export {folder} --out {folder / 'bundle'}" if (folder / POLICY).is_file() else "offramp export"
    return f"{folder} is not a bundle: it has no {MANIFEST}; make one with: {how}"


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        raise ValueError(_no_bundle(folder))
    manifest = read_json(folder / MANIFEST)
    known = isinstance(manifest, dict) and isinstance(manifest.get("files"), dict)
    if not known or not isinstance(manifest.get("schema"), int):
        raise ValueError(f"{folder / MANIFEST} is damaged")
    if manifest["schema"] > SCHEMA:
        raise ValueError(
            f"{folder} was written by a newer version of offramp ({manifest.get('offramp')}); update this one"
        )
    if manifest.get("format") not in FORMATS:
        raise ValueError(f"{folder} has the unknown format {manifest.get('format')!r}")
    return dict(manifest)


def _check_files(folder: Path, files: dict[str, Any]) -> None:
    for name in (MANIFEST, *files):
        if (folder / name).is_symlink():
            raise ValueError(f"{folder} is damaged: {name} is a link to another file; copy the file itself")
    check_digests(folder, files)
    for needed in (CARD, POLICY, GOLDEN):
        if needed not in files:
            raise ValueError(f"{folder} is damaged: its manifest does not name {needed}")


def _check_weights(folder: Path, manifest: dict[str, Any], exits: int) -> None:
    """What is run must be among the files whose digests were compared."""
    stages = [stage_file(k) for k in range(1, exits + 1)]
    for needed in stages if manifest["format"] == "onnx" else [WEIGHTS]:
        if needed not in manifest["files"]:
            raise ValueError(f"{folder} is damaged: its manifest does not name {needed}")


def _onnx_engine(folder: Path, card: ModelCard, policies: Policies, device: str, threads: int | None) -> Engine:
    from offramp.running.engines.onnx_engine import NoSuchDevice, OnnxEngine

    stages = [folder / stage_file(k) for k in range(1, len(card.costs) + 1)]
    try:
        return OnnxEngine(stages, policies.measure, policies.temperatures, threads, device)
    except (ModuleNotFoundError, NoSuchDevice):
        raise
    except Exception as error:  # ONNX Runtime has its own exceptions for every kind of damage
        raise ValueError(f"{folder} cannot be loaded: {str(error).splitlines()[0]}") from error


def _torch_engine(folder: Path, card: ModelCard, policies: Policies, device: str, threads: int | None = None) -> Engine:
    import torch

    from offramp.common.device import pick_device
    from offramp.models.fold import folded
    from offramp.running.engines.torch_engine import TorchEngine

    if threads is not None:
        torch.set_num_threads(threads)
    place, model = pick_device(device), bundled_model(folder, card)
    graphs = place.type == "cuda"
    return TorchEngine(folded(model), policies.measure, policies.temperatures, place, graphs=graphs)


def bundled_model(folder: Path, card: ModelCard) -> ExitNet:
    """The network of a torch bundle, as it was trained."""
    from offramp.models.registry import MODELS, build_trained, parse_spec

    spec = parse_spec(card.model, folder / CARD)
    _refuse_missing_packages(folder, card)
    _refuse_other_sources(folder, spec)
    if "/" not in spec.name and spec.name not in MODELS and spec.name not in pretrained_names():
        named = " ".join(f"--import {shlex.quote(one)}" for one in card.imports) or "--import MODULE"
        raise ValueError(
            f"{folder} holds the network {spec.name!r}, which a module of its maker's registers. It is not imported by "
            f"itself: if you trust it, add {named}"
        )
    return build_trained(spec, card.schedule, folder / WEIGHTS)


def _refuse_other_sources(folder: Path, spec: ModelSpec) -> None:
    """A bundle holds its params: one that would have others fetched, or names a place and not a network, is refused."""
    from offramp.models.exits import all_specs

    for own in all_specs(spec):
        plain = re.fullmatch(rf"({'|'.join(PACKAGES)})/[\w.-]+", own.name) or not re.search(r"[/:\\]", own.name)
        if not plain or own.overrides.get("pretrained"):
            raise ValueError(f"{folder} is refused: its network, {own.name!r}, would be fetched from elsewhere")


def _refuse_missing_packages(folder: Path, card: ModelCard) -> None:
    """A package that the network is built by must be there; another version of it is named."""
    for name, version in card.packages.items():
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError as error:
            raise MissingExtra(f"{folder} needs {name}; install it with: pip install '{name}=={version}'") from error
        if here != version:
            log.warning("%s was made with %s %s, here is %s: its golden outputs decide", folder, name, version, here)


def _other_versions(card: ModelCard) -> bool:
    return any(metadata.version(name) != version for name, version in card.packages.items())


def read_golden(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Golden images, uint8 [n, 3, h, w], and the logits they gave, [K, n, C]."""
    images, logits = read_arrays(folder / GOLDEN, "images", "logits")
    if images.dtype != np.uint8 or images.ndim != 4 or logits.ndim != 3 or len(images) != logits.shape[1]:
        raise ValueError(f"{folder / GOLDEN} is damaged: its images and logits do not belong together")
    return images, logits


def read_cut_photos(folder: Path) -> np.ndarray:
    """What the golden photos must be cut into, uint8 [n, 3, h, w]."""
    return read_arrays(folder / GOLDEN, "photos")[0]


def compare_golden(engine: Engine, images: np.ndarray, expected: np.ndarray, source: Any) -> float:
    """The largest difference between what an engine answers and what it should."""
    found = all_logits(engine, images)
    if found.shape != expected.shape:
        raise ValueError(f"{source} does not give its golden outputs: logits are {found.shape}, not {expected.shape}")
    difference = float(np.abs(found - expected).max())
    if not difference <= GOLDEN_TOLERANCE * max(1.0, float(np.abs(expected).max())):
        raise ValueError(f"{source} does not give its golden outputs: logits differ by {difference:.3g}")
    return difference
