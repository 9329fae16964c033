"""Bundles made by somebody who means harm: nothing in them runs, and each is refused with a sentence."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from offramp import load_bundle
from offramp.common.files import sha256
from offramp.common.registry import loaded
from offramp.running.engines.onnx_files import refuse_external_data

Change = Callable[[Path], object]


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    return tmp_path / "sprung"


def vouched(bundle: Path, copy: Path, change: Change) -> Path:
    """A copy with a change that its manifest vouches for, new files included."""
    shutil.copytree(bundle, copy)
    change(copy)
    manifest = json.loads((copy / "bundle.json").read_text())
    manifest["files"] = {p.name: sha256(p) for p in sorted(copy.iterdir()) if p.name != "bundle.json"}
    (copy / "bundle.json").write_text(json.dumps(manifest))
    return copy


def test_the_trap_would_spring(sprung: Path) -> None:
    pickle.loads(pickle.dumps(Trap(sprung)))
    assert sprung.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "stage-1.onnx"])
def test_a_pickle_in_place_of_params_is_refused(
    name: str, torch_bundle: Path, onnx_bundle: Path, tmp_path: Path, sprung: Path
) -> None:
    source = torch_bundle if name.startswith("model") else onnx_bundle

    def as_pickle(folder: Path) -> None:
        (folder / name).write_bytes(pickle.dumps(Trap(sprung)))

    def as_torch_file(folder: Path) -> None:
        torch.save({"weight": Trap(sprung)}, folder / name)

    for at, change in enumerate((as_pickle, as_torch_file)):
        with pytest.raises(ValueError, match="is damaged or cut short|cannot be loaded: it is no ONNX graph"):
            load_bundle(vouched(source, tmp_path / str(at), change), device="cpu")
    assert not sprung.exists()


def exported_program(path: Path, trap: Path) -> None:
    """A real archive of torch.export whose sample inputs are a pickle that makes a file."""
    program = torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    torch.export.save(program, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, pickle.dumps(Trap(trap)) if "sample_inputs" in name else data)


def test_an_exported_program_is_refused_as_params_and_never_opened_beside_them(
    torch_bundle: Path, onnx_bundle: Path, tmp_path: Path, sprung: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((torch, "load"), (torch.export, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(module, name, lambda *args, **options: pytest.fail("a bundle was unpickled"))
    for at, source in enumerate((torch_bundle, onnx_bundle)):
        beside = vouched(source, tmp_path / f"beside{at}", lambda f: exported_program(f / "model.pt2", sprung))
        load_bundle(beside, device="cpu").check_golden()  # a file that is not on the format's page is skipped
    with pytest.raises(ValueError, match="is damaged or cut short"):
        load_bundle(
            vouched(torch_bundle, tmp_path / "as", lambda f: exported_program(f / "model.safetensors", sprung)),
            device="cpu",
        )
    assert not sprung.exists()


def test_golden_arrays_that_are_pickles_are_refused(torch_bundle: Path, tmp_path: Path, sprung: Path) -> None:
    def of_objects(folder: Path) -> None:
        own = dict(np.load(folder / "golden.npz"))
        np.savez(folder / "golden.npz", **{**own, "images": np.array([Trap(sprung)], dtype=object)})

    def bare(folder: Path) -> None:
        (folder / "golden.npz").write_bytes(pickle.dumps(Trap(sprung)))

    def of_another_shape(folder: Path) -> None:
        own = dict(np.load(folder / "golden.npz"))
        np.savez(folder / "golden.npz", **{**own, "logits": own["logits"][:, :, :2]})

    for change, words in ((of_objects, "is damaged"), (bare, "is damaged"), (of_another_shape, "golden outputs")):
        folder = vouched(torch_bundle, tmp_path / change.__name__, change)
        with pytest.raises(ValueError, match=words):
            load_bundle(folder, device="cpu").check_golden()
    assert not sprung.exists()


def external(location: str) -> TensorProto:
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", "16")):
        tensor.external_data.add(key=key, value=value)
    return tensor


def graph_with(tensor: TensorProto, where: str) -> bytes:
    """A graph that takes a tensor in one of the places where a graph may have one."""
    value = helper.make_tensor_value_info
    ends = [value("x", TensorProto.FLOAT, ["n", 4])], [value("y", TensorProto.FLOAT, ["n", 4])]
    add, functions = helper.make_node("Add", ["x", "w"], ["y"]), []
    constant = helper.make_node("Constant", [], ["w"], value=tensor)
    if where == "initializer":
        graph = helper.make_graph([add], "g", *ends, [tensor])
    elif where == "constant":
        graph = helper.make_graph([constant, add], "g", *ends)
    elif where == "branch":
        inner = helper.make_graph([constant], "inner", [], [value("w", TensorProto.FLOAT, [4])])
        yes = helper.make_node("Constant", [], ["yes"], value=helper.make_tensor("t", TensorProto.BOOL, [], [True]))
        branch = helper.make_node("If", ["yes"], ["w"], then_branch=inner, else_branch=inner)
        graph = helper.make_graph([yes, branch, add], "g", *ends)
    else:
        opsets = [helper.make_opsetid("", 18)]
        functions = [helper.make_function("own", "W", [], ["w"], [constant], opsets)]
        graph = helper.make_graph([helper.make_node("W", [], ["w"], domain="own"), add], "g", *ends)
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=9).SerializeToString()


@pytest.mark.parametrize("where", ["initializer", "constant", "branch", "function"])
@pytest.mark.parametrize("location", ["../../etc/passwd", "/etc/passwd", "beside.bin"])
def test_params_in_another_file_are_refused(where: str, location: str, onnx_bundle: Path, tmp_path: Path) -> None:
    graph = graph_with(external(location), where)
    with pytest.raises(ValueError, match="its params lie in another file"):
        refuse_external_data(graph)

    def change(folder: Path) -> None:
        (folder / "stage-1.onnx").write_bytes(graph)
        (folder / "beside.bin").write_bytes(bytes(16))

    with pytest.raises(ValueError, match="cannot be loaded: its params lie in another file"):
        load_bundle(vouched(onnx_bundle, tmp_path / "copy", change))


@pytest.mark.parametrize("where", ["initializer", "constant", "branch", "function"])
def test_graphs_with_their_params_inside_are_taken(where: str, onnx_bundle: Path) -> None:
    inside = onnx.numpy_helper.from_array(np.zeros(4, np.float32), "w")
    refuse_external_data(graph_with(inside, where))
    for stage in sorted(onnx_bundle.glob("stage-*.onnx")):
        data = stage.read_bytes()
        refuse_external_data(data)
        with pytest.raises(ValueError, match="it is no ONNX graph"):
            refuse_external_data(data[: len(data) // 2])


def links(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / name)
    (folder / name).symlink_to(folder.parent / name)


def absolute(folder: Path) -> None:
    manifest = json.loads((folder / "bundle.json").read_text())
    manifest["files"][str(folder / "model.json")] = sha256(folder / "model.json")
    (folder / "bundle.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["model.safetensors", "model.json", "bundle.json", "photo-1.png"])
def test_a_link_to_another_file_is_refused(name: str, torch_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "copy"
    shutil.copytree(torch_bundle, folder)
    links(folder, name)
    with pytest.raises(ValueError, match=f"{name} is a link to another file"):
        load_bundle(folder, device="cpu")


def test_a_path_in_the_manifest_is_refused(torch_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(torch_bundle, folder)
    absolute(folder)
    with pytest.raises(ValueError, match="is damaged: .*model.json is missing"):
        load_bundle(folder, device="cpu")


def card_with(**changes: object) -> Change:
    def change(folder: Path) -> None:
        card = json.loads((folder / "model.json").read_text())
        (folder / "model.json").write_text(json.dumps({**card, **changes}))

    return change


def test_a_module_that_a_bundle_names_is_never_imported(
    torch_bundle: Path, tmp_path: Path, sprung: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_module.py").write_text(f"import pathlib\npathlib.Path({str(sprung)!r}).touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    spec = {"name": "evil-net", "num_classes": 10, "overrides": {}}
    folder = vouched(torch_bundle, tmp_path / "copy", card_with(model=spec, imports=["evil_module", "$(reboot)"]))
    with pytest.raises(ValueError, match=r"add --import evil_module --import '\$\(reboot\)'$"):
        load_bundle(folder, device="cpu")
    assert not sprung.exists() and "evil_module" not in sys.modules and "evil_module" not in loaded


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("timm/hf-hub:evil/network", {}),
        ("timm/local-dir:/tmp/evil", {}),
        ("https://evil/network", {}),
        ("timm/../evil", {}),
        ("timm/resnet18", {"pretrained": True}),
        ("msdnet-tiny", {"pretrained": "/etc/passwd"}),
        ("cascade", {"members": [{"name": "timm/hf-hub:evil/network"}], "image_sizes": [32]}),
        ("cascade", {"members": [{"name": "msdnet-tiny", "pretrained": "/etc/passwd"}], "image_sizes": [32]}),
    ],
)
def test_a_network_that_would_be_fetched_is_refused(
    name: str, overrides: dict[str, object], torch_bundle: Path, tmp_path: Path
) -> None:
    spec = {"name": name, "num_classes": 10, "overrides": overrides}
    with pytest.raises(ValueError, match="would be fetched from elsewhere"):
        load_bundle(vouched(torch_bundle, tmp_path / "copy", card_with(model=spec)), device="cpu")


@pytest.mark.parametrize(
    "members",
    [5, "msdnet-tiny", [5], [{}], [{"name": "x", "overrides": 5}], [[["name", "msdnet-tiny"], ["pretrained", "/x"]]]],
)
def test_members_that_are_none_are_a_sentence(members: object, torch_bundle: Path, tmp_path: Path) -> None:
    spec = {"name": "cascade", "num_classes": 10, "overrides": {"members": members, "image_sizes": [32]}}
    with pytest.raises(ValueError, match="members of 'cascade' must be tables with a name and, if any, overrides"):
        load_bundle(vouched(torch_bundle, tmp_path / "copy", card_with(model=spec)), device="cpu")


def test_a_package_to_install_is_one_that_builds_networks(torch_bundle: Path, tmp_path: Path) -> None:
    for at, packages in enumerate(({"evil": "1.0"}, {"timm": "1.0' evil"}, {"timm": "--index-url=http://evil"})):
        folder = vouched(torch_bundle, tmp_path / str(at), card_with(packages=packages))
        with pytest.raises(ValueError, match="its packages are not versions of timm and torchvision"):
            load_bundle(folder, device="cpu")


def test_files_are_read_nowhere_else(torch_bundle: Path, tmp_path: Path) -> None:
    """A folder in place of a file, or a pipe, is no file."""
    for at, make in enumerate((os.mkdir, os.mkfifo)):
        folder = tmp_path / str(at)
        shutil.copytree(torch_bundle, folder)
        (folder / "golden.npz").unlink()
        make(folder / "golden.npz")
        with pytest.raises(ValueError, match="golden.npz is missing"):
            load_bundle(folder, device="cpu")
