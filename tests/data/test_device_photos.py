"""Photos that lie on the device, and the random parts that are cut from them there."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from offramp import load_dataset
from offramp.data.device_photos import DeviceCrop

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes: red from left to right, and blue from top to bottom; some photos wide, some high."""
    ramp = np.linspace(0, 255, 60).astype(np.uint8)
    for number in range(24):
        height, width = (40, 60) if number % 3 else (60, 40)
        pixels = np.zeros((height, width, 3), np.uint8)
        if number % 2:
            pixels[..., 0] = ramp[:width]
        else:
            pixels[..., 2] = ramp[:height, None]
        path = tmp_path / "photos" / ("blue" if number % 2 == 0 else "red") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return tmp_path / "photos"


def photos(folder: Path, **options: object):
    return load_dataset(
        "imagefolder",
        data_dir=folder,
        image_size=16,
        workers=0,
        augmentation="device-crop",
        augmentation_options=options,
    )


def test_boxes_are_those_of_torchvision() -> None:
    """The same distribution: means over many draws for photos that are wide, square and high."""
    from torchvision.transforms import v2

    ours, theirs = DeviceCrop(scale=0.25), v2.RandomResizedCrop(16, scale=(0.25, 1.0))
    torch.manual_seed(0)
    for width, height in ((300, 200), (200, 200), (200, 300)):
        boxes = ours.boxes(torch.full((20_000,), width / height), torch.Generator().manual_seed(0))
        drawn = [theirs.make_params([torch.zeros(3, height, width)]) for _ in range(3000)]
        wanted = [np.mean([d["width"] / width for d in drawn]), np.mean([d["height"] / height for d in drawn])]
        np.testing.assert_allclose(boxes[:, 2:].mean(0), wanted, atol=0.01)
        assert bool((boxes >= 0).all()) and bool((boxes[:, :2] + boxes[:, 2:] <= 1 + 1e-6).all())


def test_a_cut_is_a_part_of_its_photo() -> None:
    """On a ramp from left to right, the left edge of a cut has the value of the box's left edge."""
    ramp = torch.linspace(0, 255, 64).expand(200, 3, 64, 64).to(torch.uint8)
    crop, draw = DeviceCrop(scale=0.3, flip=0.0), torch.Generator().manual_seed(3)
    boxes = crop.boxes(torch.ones(200), torch.Generator().manual_seed(3))
    cut = crop(ramp, torch.ones(200), 32, draw)
    middle = 255 * (boxes[:, 0] + boxes[:, 2] / 2)
    np.testing.assert_allclose(cut.mean((1, 2, 3)), middle, atol=4)
    mirrored = DeviceCrop(scale=0.3, flip=1.0)(ramp, torch.ones(200), 32, torch.Generator().manual_seed(3))
    torch.testing.assert_close(mirrored.flip(3), cut)


def test_a_stream_can_begin_anywhere(folder: Path) -> None:
    data = photos(folder)
    whole = list(islice(data.stream(4, 0, CPU), 5))
    again = list(islice(photos(folder).stream(4, 0, CPU, start=3), 2))
    assert all(
        torch.equal(a, b) for one, two in zip(whole[3:], again, strict=True) for a, b in zip(one, two, strict=True)
    )
    parts = [list(islice(data.stream(4, 0, CPU, places=torch.tensor(own)), 2)) for own in ([0, 1], [2, 3])]
    for step in range(2):
        assert torch.equal(torch.cat([part[step][0] for part in parts]), whole[step][0])


def test_labels_go_with_their_photos(folder: Path) -> None:
    data = photos(folder, scale=0.5)
    names = data.class_names
    for images, labels in islice(data.stream(6, 0, CPU), 4):
        red, blue = images[:, 0].flatten(1).std(1), images[:, 2].flatten(1).std(1)
        assert [names[label] for label in labels] == [
            "red" if r > b else "blue" for r, b in zip(red, blue, strict=True)
        ]


def test_photos_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import offramp.data.imagefolder as room

    data, seen = photos(folder), []
    read = room.readable
    monkeypatch.setattr(room, "readable", lambda path, most: seen.append(path) or read(path, most))
    list(islice(data.stream(4, 0, CPU), 9))
    list(islice(data.stream(4, 1, CPU), 9))
    for _ in range(3):
        list(data.sweep("calibration", 8, CPU))
    assert len(seen) == len(set(seen)) == data.size("train") + data.size("calibration")


def test_photos_lie_there_once(folder: Path) -> None:
    """As one set of tensors; parts and what they are put together to would take twice the memory."""
    data = photos(folder)
    next(data.stream(4, 0, CPU))
    (kept,) = (found for key, found in data._kept.items() if key[0] == "train")
    ((squares, labels, widths),) = kept
    assert squares.shape == (data.size("train"), 3, 32, 32) and len(labels) == len(widths) == len(squares)
    assert labels.tolist() == data.splits["train"].labels.tolist()
    assert sorted(set(widths.tolist())) == pytest.approx([40 / 60, 60 / 40])


def test_it_is_for_photos_in_folders() -> None:
    with pytest.raises(ValueError, match="device-crop is for photos in folders, not for digits"):
        load_dataset("digits", augmentation="device-crop")
    with pytest.raises(ValueError, match="scale must lie between 0 and 1"):
        DeviceCrop(scale=2.0)
