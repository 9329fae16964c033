"""Networks as folders: what is saved comes back, what is damaged is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import offramp
from offramp import ExitNet, create_model, load_model, register_model


def tiny() -> ExitNet:
    return create_model("msdnet-tiny", num_classes=4, blocks=(1, 1), base_width=4, growth=4)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    model = tiny().eval()
    folder = model.save(tmp_path / "model")
    again = load_model(folder).eval()
    x = torch.randn(2, 3, 32, 32)
    assert all(torch.equal(a, b) for a, b in zip(model(x), again(x), strict=True))
    assert json.loads((folder / "config.json").read_text())["model"] == {
        "name": "msdnet-tiny",
        "num_classes": 4,
        "overrides": {"blocks": [1, 1], "base_width": 4, "growth": 4},
    }
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    weights = tiny().save(tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut short"):
        load_model(tmp_path)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    model = tiny()
    model.save(tmp_path)
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    tensors["heads.0.linear.bias"] = torch.zeros(9)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"heads\.0\.linear\.bias has shape \[9\], the model's has \[4\]"):
        load_model(tmp_path)
    del tensors["heads.0.linear.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks heads\.0\.linear\.bias"):
        load_model(tmp_path)


def test_an_unknown_name_gets_the_nearest_match(tmp_path: Path) -> None:
    tiny().save(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("msdnet-tiny", "msdnet-tony"))
    with pytest.raises(ValueError, match="did you mean 'msdnet-tiny'"):
        load_model(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"name": 3}}', '{"model": "msdnet5"}'])
def test_a_damaged_config_is_named(tmp_path: Path, text: str) -> None:
    tiny().save(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(tmp_path)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a model or run folder"):
        load_model(tmp_path)


class _Shared(nn.Module):
    """A stage of one's own whose linear layer is shared with the heads."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def build_shared(num_classes: int, width: int = 6) -> ExitNet:
    linear = nn.Linear(width, width)
    flat = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, width))
    heads = [nn.Linear(width, num_classes), nn.Sequential(nn.Dropout(0.5), nn.Linear(width, num_classes))]
    return ExitNet.from_parts([nn.Sequential(flat, _Shared(linear)), _Shared(linear)], heads)


def test_a_registered_network_of_ones_own_is_saved_and_loaded(tmp_path: Path) -> None:
    register_model("store-test-shared", build_shared, about="for this test")
    with pytest.raises(ValueError, match="registered already"):
        register_model("store-test-shared", build_shared)
    assert "store-test-shared" in offramp.list_models()
    model = create_model("store-test-shared", num_classes=3, width=5).eval()
    again = load_model(model.save(tmp_path)).eval()
    x = torch.randn(2, 3, 32, 32)
    assert all(torch.equal(a, b) for a, b in zip(model(x), again(x), strict=True))
    one, two = offramp.exit_costs(model)
    assert two.params - one.params == 5 * 3 + 3  # the shared layer is counted once


def test_a_nameless_network_says_how_to_get_a_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="register_model"):
        build_shared(3).save(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offramp.common.files import write_bytes

    write_bytes(tmp_path / "file", b"old")
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_bytes(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
