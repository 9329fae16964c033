"""Splits, streams and augmentation; the digits and the CIFAR files."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from offramp import load_dataset
from offramp.data import ArrayDataset, cifar
from offramp.data.augment import ShiftFlip, normalise
from offramp.data.dataset import Shuffle
from offramp.data.digits import _scans, split_scans
from offramp.data.splits import hold_out, long_tail, with_noise

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits() -> ArrayDataset:
    data = load_dataset("digits", seed=3, train=300, calibration=60, test=100)
    assert isinstance(data, ArrayDataset)
    return data


def test_hold_out_is_even_disjoint_and_by_seed() -> None:
    labels = np.repeat(np.arange(10), 30)
    kept, held = hold_out(labels, 52, 0, "calibration")
    assert sorted([*kept, *held]) == list(range(300))
    assert set(np.bincount(labels[held]).tolist()) == {5, 6}
    assert not np.array_equal(held, hold_out(labels, 52, 1, "calibration")[1])
    assert np.array_equal(held, hold_out(labels, 52, 0, "calibration")[1])
    assert len(hold_out(labels, 0, 0, "calibration")[1]) == 0


def test_hold_out_leaves_something_of_every_class() -> None:
    with pytest.raises(ValueError, match="2 samples of class 1, which has only 2"):
        hold_out(np.array([0, 0, 0, 0, 1, 1]), 4, 0, "calibration")


def test_long_tail_follows_the_formula() -> None:
    labels = np.repeat(np.arange(100), 500)
    counts = np.bincount(labels[long_tail(labels, 100, 0)])
    expected = [int(500 * 0.01 ** (c / 99) + 1e-9) for c in range(100)]
    assert counts.tolist() == expected
    assert counts[0] == 500 and counts[-1] == 5
    with pytest.raises(ValueError, match="1 or more"):
        long_tail(labels, 0.5, 0)


def test_the_stream_loses_no_sample_and_starts_anywhere() -> None:
    shuffle = Shuffle(10, seed=0, device=CPU)
    rows = torch.cat([shuffle.rows(4 * step, 4) for step in range(15)])
    for start in range(0, 60, 10):
        assert sorted(rows[start : start + 10].tolist()) == list(range(10))
    assert not torch.equal(rows[:10], rows[10:20])
    assert torch.equal(Shuffle(10, seed=0, device=CPU).rows(23, 9), rows[23:32])
    assert torch.equal(Shuffle(10, seed=0, device=CPU).rows(5, 35), rows[5:40])


def test_the_same_step_gives_the_same_batch(digits: ArrayDataset) -> None:
    batches = [next(digits.stream(64, seed, CPU, start=7)) for seed in (0, 0, 1)]
    late = digits.stream(64, 0, CPU, start=5)
    next(late), next(late)
    again = next(late)
    assert torch.equal(batches[0][0], batches[1][0])
    assert torch.equal(batches[0][0], again[0]) and torch.equal(batches[0][1], again[1])
    assert not torch.equal(batches[0][0], batches[2][0])
    assert batches[0][0].shape == (64, 3, 32, 32)


def test_an_epoch_is_full_batches_only(digits: ArrayDataset) -> None:
    assert digits.steps_per_epoch(64) == 4
    with pytest.raises(ValueError, match="larger than the training split"):
        digits.steps_per_epoch(301)


def slow_crop(source: torch.Tensor, top: int, left: int, mirrored: bool) -> torch.Tensor:
    crop = source[:, top : top + 8, left : left + 8]
    return crop.flip(2) if mirrored else crop


def test_crops_and_mirrors_are_those_of_a_slow_loop() -> None:
    images = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8)
    out = ShiftFlip(pad=2, flip=True)(images, torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(images, [2] * 4)
    places = [(top, left, mirrored) for top in range(5) for left in range(5) for mirrored in (False, True)]
    seen = set()
    for image, source in zip(out, padded, strict=True):
        found = [place for place in places if torch.equal(image, slow_crop(source, *place))]
        assert len(found) == 1
        seen.add(found[0])
    assert {m for _, _, m in seen} == {False, True}
    assert len({t for t, _, _ in seen}) > 2 and len({c for _, c, _ in seen}) > 2


def test_normalise_is_the_textbook_formula() -> None:
    images = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    expected = (images.double() / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    out = normalise(images, mean, std)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_digits_are_deterministic_and_the_test_split_is_the_same_for_all_seeds(digits: ArrayDataset) -> None:
    again = load_dataset("digits", seed=3, train=300, calibration=60, test=100)
    other = load_dataset("digits", seed=4, train=300, calibration=60, test=100)
    assert isinstance(again, ArrayDataset) and isinstance(other, ArrayDataset)
    for split in ("train", "calibration", "test"):
        assert np.array_equal(digits.splits[split].images, again.splits[split].images)
        assert np.array_equal(digits.splits[split].labels, again.splits[split].labels)
    assert np.array_equal(digits.splits["test"].images, other.splits["test"].images)
    assert not np.array_equal(digits.splits["train"].images, other.splits["train"].images)


def test_no_scan_is_in_two_splits() -> None:
    _, labels = _scans()
    rows = split_scans(labels, 0, 0.2)
    together = np.concatenate(list(rows.values()))
    assert len(together) == len(set(together.tolist())) == len(labels)


def test_digits_know_how_hard_they_are(digits: ArrayDataset) -> None:
    difficulty = digits.difficulty("test")
    assert difficulty is not None and difficulty.min() >= 0 and difficulty.max() <= 1
    grey = digits.splits["test"].images.astype(float).mean(1)
    noise = np.abs(np.diff(grey, axis=2)).mean((1, 2))
    assert noise[difficulty > 0.8].mean() > 1.3 * noise[difficulty < 0.2].mean()


def test_a_split_may_be_empty() -> None:
    data = load_dataset("digits", train=100, calibration=0, test=20)
    assert data.size("calibration") == 0 and data.size("train") == 100


def test_unknown_data_and_options_get_the_nearest_match() -> None:
    with pytest.raises(ValueError, match="did you mean 'cifar100'"):
        load_dataset("cifar1000")
    with pytest.raises(ValueError, match="option of data set 'digits' 'imbalance' is unknown"):
        load_dataset("digits", imbalance=3)


# --- CIFAR: the real files are not in the repository, so files of the same form stand in for them


@pytest.fixture
def cifar_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Writes small files of CIFAR's form and makes their md5 the expected ones."""

    def write(name: str) -> Path:
        source = cifar.SOURCES[name]
        folder = tmp_path / source.folder
        folder.mkdir()
        draw = np.random.default_rng(0)
        classes = 10 if name == "cifar10" else 100

        def put(file: str, content: dict[str, object]) -> str:
            data = pickle.dumps(content, protocol=4)
            (folder / file).write_bytes(data)
            return hashlib.md5(data).hexdigest()

        def batch(n: int) -> dict[str, object]:
            labels = np.tile(np.arange(classes), n // classes).tolist()
            return {"data": draw.integers(0, 256, (n, 3072), dtype=np.uint8), source.label_key: labels}

        sums = {file: put(file, batch(20 * classes // len(source.train))) for file in source.train}
        tests = {file: put(file, batch(2 * classes)) for file in source.test}
        meta = put(source.meta[0], {source.names_key: [f"class{c}" for c in range(classes)]})
        fields = {"train": sums, "test": tests, "meta": (source.meta[0], meta)}
        monkeypatch.setitem(cifar.SOURCES, name, cifar.Source(**{**vars(source), **fields}))
        return tmp_path

    return write


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_read_and_split(name: str, cifar_dir: Callable[[str], Path]) -> None:
    folder = cifar_dir(name)
    data = load_dataset(name, data_dir=folder, calibration=100)
    assert isinstance(data, ArrayDataset)
    classes = data.num_classes
    assert data.class_names[1] == "class1"
    assert [data.size(s) for s in ("train", "calibration", "test")] == [20 * classes - 100, 100, 2 * classes]
    assert set(np.bincount(data.splits["calibration"].labels)) == {100 // classes}
    together = np.concatenate([data.index("train"), data.index("calibration")])
    assert sorted(together.tolist()) == list(range(20 * classes))
    assert load_dataset(name, data_dir=folder, calibration=0).size("train") == 20 * classes


def test_cifar_long_tail_is_taken_after_calibration(cifar_dir: Callable[[str], Path]) -> None:
    data = load_dataset("cifar10", data_dir=cifar_dir("cifar10"), calibration=50, imbalance=5)
    assert isinstance(data, ArrayDataset)
    assert np.bincount(data.splits["train"].labels).tolist() == [int(15 * 0.2 ** (c / 9) + 1e-9) for c in range(10)]
    assert set(np.bincount(data.splits["test"].labels)) == {2}


def test_cifar_can_be_few_images_of_every_class(cifar_dir: Callable[[str], Path]) -> None:
    folder = cifar_dir("cifar10")
    whole, few, again, other = (
        load_dataset("cifar10", data_dir=folder, calibration=50, seed=seed, train=train)
        for seed, train in ((0, None), (0, 43), (0, 43), (1, 43))
    )
    assert few.size("train") == 43 and set(np.bincount(few.splits["train"].labels)) == {4, 5}
    assert set(few.index("train")) < set(whole.index("train")) and few.identity != whole.identity
    assert np.array_equal(few.index("calibration"), whole.index("calibration"))
    assert np.array_equal(few.index("train"), again.index("train"))
    assert not np.array_equal(few.index("train"), other.index("train"))
    assert load_dataset("cifar10", data_dir=folder, calibration=50, train=150).size("train") == 150  # all there are
    with pytest.raises(ValueError, match="the train split takes 16 samples of class 0, which has only 15"):
        load_dataset("cifar10", data_dir=folder, calibration=50, train=160)
    with pytest.raises(ValueError, match="leave one out"):
        load_dataset("cifar10", data_dir=folder, train=40, imbalance=5)


def test_a_share_of_labels_is_made_wrong() -> None:
    labels = np.repeat(np.arange(10), 200)
    noisy = with_noise(labels, 0.3, 10, seed=0)
    moved = noisy != labels
    assert moved.sum() == 600 and set(noisy) == set(range(10))
    assert np.bincount((noisy - labels)[moved] % 10, minlength=10)[1:].min() > 40  # any other class: 67 on average
    assert np.array_equal(noisy, with_noise(labels, 0.3, 10, seed=0))
    assert not np.array_equal(noisy, with_noise(labels, 0.3, 10, seed=1))
    assert np.array_equal(with_noise(labels, 0, 10, seed=0), labels) and (with_noise(labels, 1, 10, 0) != labels).all()
    with pytest.raises(ValueError, match="label_noise must lie between 0 and 1, got 1.5"):
        load_dataset("digits", train=64, calibration=10, test=10, label_noise=1.5)


def test_only_labels_to_train_on_are_made_wrong(cifar_dir: Callable[[str], Path]) -> None:
    folder = cifar_dir("cifar100")
    for name, options in (
        ("digits", {"train": 300, "calibration": 60, "test": 100}),
        ("cifar100", {"data_dir": folder, "calibration": 200, "train": 300}),
    ):
        clean, noisy, more = (load_dataset(name, **options, label_noise=share) for share in (0.0, 0.2, 0.4))
        assert (clean.splits["train"].labels != noisy.splits["train"].labels).sum() == 60
        for split in ("train", "calibration", "test"):
            assert np.array_equal(clean.splits[split].images, noisy.splits[split].images)
            assert split == "train" or np.array_equal(clean.splits[split].labels, noisy.splits[split].labels)
        assert clean.identity == load_dataset(name, **options).identity
        assert len({clean.identity, noisy.identity, more.identity}) == 3  # runs are not mixed up


def test_cifar_is_checked_before_it_is_unpickled(cifar_dir: Callable[[str], Path]) -> None:
    folder = cifar_dir("cifar100")
    path = folder / "cifar-100-python" / "train"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ValueError, match="not the original file: its md5"):
        load_dataset("cifar100", data_dir=folder)


def test_the_unpickler_refuses_code(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (exec, ("raise SystemExit",))

    path = tmp_path / "train"
    path.write_bytes(pickle.dumps({"data": Bomb()}))
    with pytest.raises(ValueError, match=r"asks for builtins\.exec"):
        cifar._read(path, hashlib.md5(path.read_bytes()).hexdigest())


def test_cifar_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--data-dir"):
        load_dataset("cifar10")
    with pytest.raises(ValueError, match="cifar-10-batches-py is missing"):
        load_dataset("cifar10", data_dir=tmp_path)
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(ValueError, match="data_batch_1 cannot be read"):
        load_dataset("cifar10", data_dir=tmp_path)


def test_download_is_left_to_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    calls = []
    monkeypatch.setattr(torchvision.datasets, "CIFAR100", lambda *a, **k: calls.append((a, k)))
    with pytest.raises(ValueError, match="is missing"):
        load_dataset("cifar100", data_dir=tmp_path, download=True)
    assert calls == [((tmp_path,), {"download": True})]


def test_our_md5_sums_are_torchvisions() -> None:
    from torchvision.datasets import CIFAR10, CIFAR100

    for name, theirs in (("cifar10", CIFAR10), ("cifar100", CIFAR100)):
        ours = cifar.SOURCES[name]
        assert list(ours.train.items()) == [tuple(pair) for pair in theirs.train_list]
        assert list(ours.test.items()) == [tuple(pair) for pair in theirs.test_list]
        assert ours.meta == (theirs.meta["filename"], theirs.meta["md5"])
        assert (ours.folder, ours.names_key) == (theirs.base_folder, theirs.meta["key"])
