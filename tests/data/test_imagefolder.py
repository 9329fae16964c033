"""Image folders: layouts, unreadable files, determinism whatever the number of workers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from offramp import load_dataset
from offramp.common.images import MAX_PIXELS
from offramp.data.imagefolder import MEAN, ImageFolderDataset, readable
from offramp.data.listing import most_unreadable
from offramp.data.photos import PhotoAugmentation

CPU = torch.device("cpu")
Writer = Callable[..., Path]


def test_imagenets_layout(image_folder: Writer) -> None:
    data = load_dataset("imagefolder", data_dir=image_folder(), image_size=32, calibration=9, workers=0)
    assert data.class_names == ("class0", "class1", "class2")
    assert [data.size(s) for s in ("train", "calibration", "test")] == [51, 9, 15]
    batches = list(data.sweep("test", 10, CPU))
    assert [tuple(b.images.shape) for b in batches] == [(10, 3, 32, 32), (5, 3, 32, 32)]
    brightest = torch.cat([b.images for b in batches]).mean((2, 3)).argmax(1)
    assert torch.equal(brightest, torch.cat([b.labels for b in batches]))
    assert data.thumbnails("test", np.array([0, 14])).shape == (2, 64, 64, 3)


def test_without_val_a_fifth_of_each_class_is_the_test_split(image_folder: Writer) -> None:
    root = image_folder(train=20, val=0, nested=False)
    data = load_dataset("imagefolder", data_dir=root, image_size=32, workers=0)
    assert [data.size(s) for s in ("train", "calibration", "test")] == [42, 6, 12]
    paths = [set(split.paths) for split in data.splits.values()]  # type: ignore[attr-defined]
    assert len(set.union(*paths)) == 60
    other = load_dataset("imagefolder", data_dir=root, image_size=32, workers=0, seed=1)
    assert set(other.splits["test"].paths) != paths[2]  # type: ignore[attr-defined]


def test_an_unbalanced_folder_gives_a_share_of_each_class(image_folder: Writer) -> None:
    root = image_folder(train=40, val=0, nested=False)
    for path in sorted((root / "class1").iterdir())[10:]:
        path.unlink()
    (root / ".cache").mkdir()
    data = load_dataset("imagefolder", data_dir=root, image_size=32, workers=0)
    counts = [np.bincount(split.labels).tolist() for split in data.splits.values()]  # type: ignore[attr-defined]
    assert counts == [[29, 7, 29], [3, 1, 3], [8, 2, 8]]


def test_the_stream_does_not_depend_on_the_workers(image_folder: Writer) -> None:
    root = image_folder()
    batches = []
    for workers, start in ((0, 0), (2, 0), (2, 2)):
        data = load_dataset("imagefolder", data_dir=root, image_size=32, workers=workers)
        stream = data.stream(8, 0, CPU, start=start)
        batches.append([next(stream) for _ in range(5 - start)])
        del stream
    for a, b in zip(batches[0], batches[1], strict=True):
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    for a, b in zip(batches[0][2:], batches[2], strict=True):
        assert torch.equal(a[0], b[0])


def test_the_callers_generator_is_left_alone(image_folder: Writer) -> None:
    data = load_dataset("imagefolder", data_dir=image_folder(), image_size=32, workers=0)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    next(data.stream(8, 0, CPU))
    assert torch.equal(torch.rand(1), expected)


def test_an_unreadable_image_is_named_and_passed_over(image_folder: Writer, caplog: pytest.LogCaptureFixture) -> None:
    root = image_folder(classes=2, train=100, val=60)
    for broken in ("train/class1/train007.png", "val/class0/val003.png"):
        (root / broken).write_bytes((root / broken).read_bytes()[:200])
    data = load_dataset("imagefolder", data_dir=root, image_size=32, calibration=0, workers=0)
    with caplog.at_level(logging.WARNING, "offramp"):
        rows = torch.cat([b.index for b in data.sweep("test", 16, CPU)])
        stream = data.stream(50, 0, CPU)
        sizes = {len(next(stream)[0]) for _ in range(8)}
    assert rows.tolist() == [r for r in range(120) if r != 3]
    assert sizes == {50}
    named = [record.getMessage() for record in caplog.records]
    told = sorted(line.rsplit("/", 1)[1] for line in named)
    assert told == ["train007.png: image file is truncated", "val003.png: image file is truncated"]


def test_a_folder_is_known_by_its_files_whatever_their_names(image_folder: Writer) -> None:
    root = image_folder(classes=2, train=10, val=5)
    first = load_dataset("imagefolder", data_dir=root, image_size=32, workers=0)
    (root / "train/class0/train003.png").rename(root / "train/class0" / os.fsdecode(b"caf\xe9.png"))
    second = load_dataset("imagefolder", data_dir=root, image_size=32, workers=0)
    again = load_dataset("imagefolder", data_dir=root, image_size=32, workers=0)
    assert first.identity != second.identity == again.identity


def test_one_unreadable_image_stops_no_small_split(image_folder: Writer) -> None:
    root = image_folder(classes=2, train=10, val=5)
    (root / "val/class0/val001.png").write_bytes(b"not an image")
    data = load_dataset("imagefolder", data_dir=root, image_size=32, workers=0)
    assert sum(len(part.labels) for part in data.sweep("test", 16, CPU)) == 9


def test_too_many_unreadable_images_stop_the_run(image_folder: Writer) -> None:
    root = image_folder(classes=2, train=30, val=30)
    for i in range(6):
        (root / f"val/class0/val{i:03d}.png").write_bytes(b"not an image")
    data = load_dataset("imagefolder", data_dir=root, image_size=32, workers=0)
    passed_over = r"6 of 120 images are unreadable, more than the 5 that are passed over"
    with pytest.raises(ValueError, match=passed_over + r"; .*: it is no image of a known kind\. Repair or"):
        list(data.sweep("test", 16, CPU))


def test_how_many_unreadable_images_are_passed_over() -> None:
    assert [most_unreadable(images) for images in (8, 20, 75, 120, 500, 3000)] == [1, 2, 5, 5, 5, 30]


def test_every_mode_becomes_rgb_and_exif_is_obeyed(tmp_path: Path) -> None:
    for mode in ("1", "L", "P", "RGBA", "CMYK", "I;16"):
        path = tmp_path / f"{mode.replace(';', '')}.tif"
        Image.new(mode, (5, 4)).save(path)
        image = readable(path, MAX_PIXELS)
        assert image is not None and image.mode == "RGB" and image.size == (5, 4)
    turned = Image.new("RGB", (6, 3))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    image = readable(tmp_path / "turned.jpg", MAX_PIXELS)
    assert image is not None and image.size == (3, 6)


def test_bad_folders_are_refused(image_folder: Writer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere is not there; imagefolder needs"):
        load_dataset("imagefolder", data_dir=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="at least two classes"):
        load_dataset("imagefolder", data_dir=tmp_path)
    (tmp_path / "only" / "val").mkdir(parents=True)
    with pytest.raises(ValueError, match="has val/ but no train/"):
        load_dataset("imagefolder", data_dir=tmp_path / "only")
    root = image_folder()
    (root / "val" / "stranger").mkdir()
    with pytest.raises(ValueError, match="'stranger', which the training folder does not have"):
        load_dataset("imagefolder", data_dir=root)
    (root / "val" / "stranger").rmdir()
    (root / "train" / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no images"):
        load_dataset("imagefolder", data_dir=root)


def test_unreadable_files_are_counted_over_all_splits_and_named_once(
    image_folder: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    root = image_folder(classes=3, train=20, val=5)
    data = load_dataset("imagefolder", data_dir=root, image_size=32, calibration=6, workers=0)
    data.splits["test"].paths[0].write_bytes(b"no image")
    for _ in range(3):  # as in every epoch
        assert sum(len(batch.labels) for batch in data.sweep("test", 8, torch.device("cpu"))) == 14
    assert caplog.text.count("unreadable image passed over (1 so far)") == 1
    assert "val000.png: it is no image of a known kind" in caplog.text
    for path in (*data.splits["calibration"].paths[:2], *data.splits["train"].paths[:3]):
        path.write_bytes(b"no image either")
    with pytest.raises(ValueError, match="6 of 75 images are unreadable, more than the 5"):
        list(data.sweep("train", 8, torch.device("cpu")))
        list(data.sweep("calibration", 8, torch.device("cpu")))


def test_a_large_image_is_read_only_if_it_is_asked_for(
    image_folder: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    root = image_folder(classes=2, train=4, val=2)
    Image.new("RGB", (200, 100)).save(root / "val/class0/val000.png")
    options = {"data_dir": root, "image_size": 32, "calibration": 0, "workers": 0}
    small = load_dataset("imagefolder", max_pixels=10_000, **options)
    assert sum(len(batch.labels) for batch in small.sweep("test", 8, torch.device("cpu"))) == 3
    assert "it has 200 x 100 pixels, more than 10,000" in caplog.text
    every = load_dataset("imagefolder", **options)
    assert sum(len(batch.labels) for batch in every.sweep("test", 8, torch.device("cpu"))) == 4


def first_batch(folder: Path, workers: int = 0, **more: Any) -> torch.Tensor:
    data = load_dataset("imagefolder", data_dir=folder, image_size=32, workers=workers, **more)
    return next(iter(data.stream(16, 0, torch.device("cpu"))))[0]


def test_photos_are_augmented_by_name(image_folder: Callable[..., Path]) -> None:
    folder = image_folder()
    plain = first_batch(folder)
    assert torch.equal(plain, first_batch(folder, augmentation="crop"))
    seen = [plain]
    for name, options in (
        ("crop", {"scale": 0.9, "flip": 0.0}),
        ("trivial", {}),
        ("rand", {"operations": 3, "magnitude": 12}),
        ("trivial", {"erase": 1.0}),
    ):
        found = first_batch(folder, augmentation=name, augmentation_options=options)
        assert found.shape == plain.shape and not any(torch.equal(found, other) for other in seen)
        assert torch.equal(found, first_batch(folder, workers=2, augmentation=name, augmentation_options=options))
        seen.append(found)


def test_what_is_erased_has_the_mean_colour() -> None:
    photo = Image.fromarray(np.full((40, 40, 3), 255, np.uint8))
    torch.manual_seed(0)
    image = PhotoAugmentation(erase=1.0).transform(32, MEAN)(photo)
    assert image.dtype == torch.uint8 and image.shape == (3, 32, 32)
    colours = image.flatten(1).T.unique(dim=0).tolist()
    assert sorted(colours) == sorted([[255, 255, 255], [round(255 * m) for m in MEAN]])


def test_options_of_augmentations_that_do_not_fit(image_folder: Callable[..., Path]) -> None:
    folder = image_folder()
    with pytest.raises(ValueError, match="augmentation_options do not fit the augmentation 'crop'"):
        first_batch(folder, augmentation="crop", augmentation_options={"size": 3})
    with pytest.raises(ValueError, match="do not fit the augmentation 'shift-2'"):
        first_batch(folder, augmentation="shift-2", augmentation_options={"size": 3})
    with pytest.raises(ValueError, match="scale must lie between 0 and 1"):
        first_batch(folder, augmentation="crop", augmentation_options={"scale": 3})
    with pytest.raises(ValueError, match="need data.augmentation"):
        first_batch(folder, augmentation_options={"scale": 0.3})
    with pytest.raises(ValueError, match="trivial is for photos in folders, not for digits"):
        load_dataset("digits", augmentation="trivial")


def test_copies_of_a_photo_are_in_one_fold(image_folder: Writer) -> None:
    root = image_folder(classes=2, train=20, val=2)
    for number in range(0, 20, 2):
        twin = f"train{number + 1:03d}.png"
        (root / "train/class0" / twin).write_bytes((root / f"train/class0/train{number:03d}.png").read_bytes())
    for fold in (1, 2, 3, 4, 5):
        data = load_dataset("imagefolder", data_dir=root, folds=5, fold=fold, workers=0)
        assert isinstance(data, ImageFolderDataset)
        held = {int(path.stem[-3:]) for path in data.splits["calibration"].paths if path.parent.name == "class0"}
        assert held == {number ^ 1 for number in held}


def test_folds_part_all_that_is_not_tested_on(image_folder: Writer) -> None:
    """Each image is held out once, every class in each fold, and the test split stays as it is."""
    root = image_folder(classes=3, train=10, val=4)
    plain = load_dataset("imagefolder", data_dir=root)
    everything = sorted([*plain.index("train"), *plain.index("calibration")])
    held = []
    for fold in range(1, 6):
        data = load_dataset("imagefolder", data_dir=root, folds=5, fold=fold)
        assert sorted([*data.index("train"), *data.index("calibration")]) == everything
        assert isinstance(data, ImageFolderDataset)
        assert np.bincount(data.splits["calibration"].labels).tolist() == [2, 2, 2]
        assert data.index("test").tolist() == plain.index("test").tolist() and data.identity == plain.identity
        held += data.index("calibration").tolist()
    assert sorted(held) == everything
    with pytest.raises(ValueError, match=r"data.options.fold must lie between 1 and 5, got 6"):
        load_dataset("imagefolder", data_dir=root, folds=5, fold=6)
    with pytest.raises(ValueError, match="folds must be 2 or more"):
        load_dataset("imagefolder", data_dir=root, folds=1)
