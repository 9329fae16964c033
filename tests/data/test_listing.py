"""Folders as people have them: layouts, tables of labels, odd files, what is refused and what is said to be ignored."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from offramp import load_dataset
from offramp.common import images
from offramp.common.files import sha256, short_digest
from offramp.common.images import UnreadableImage, read_image
from offramp.data import listing
from offramp.data.label_table import LABELS
from offramp.data.listing import FolderListing, first_twins, folder_layout, list_folder
from offramp.data.splits import hold_out_share
from offramp.fitting.kept_plan import digest_of
from offramp.fitting.looking import look_at

Writer = Callable[..., Path]


def photo(path: Path, colour: int = 0, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (colour, 255 - colour, 90)).save(path, **options)
    return path


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Cats and dogs, ten of each, in bare class folders."""
    for name, colour in (("cat", 0), ("dog", 200)):
        for number in range(10):
            photo(tmp_path / "pets" / name / f"{number:02d}.png", colour)
    return tmp_path / "pets"


def counts(listed: FolderListing) -> list[int]:
    return [len(listed.splits[split].paths) for split in ("train", "calibration", "test")]


def test_digests_of_the_layouts_of_before_are_the_same(image_folder: Writer) -> None:
    """A run of before goes on: what it remembers is a digest of classes and file names, spelled out here."""
    root = image_folder(classes=2, train=5, val=3)
    names = [f"class{c}/train{i:03d}.png" for c in range(2) for i in range(5)]
    wanted = short_digest(["class0", "class1", short_digest(names)])
    assert list_folder(root).identity == wanted
    photo(root / "test" / "class0" / "a.png")  # was, and is, left alone where there is val/
    (root / "train" / "class0" / ".hidden.png").write_bytes(b"")
    (root / "notes.txt").write_text("mine")
    assert list_folder(root).identity == wanted and counts(list_folder(root)) == [8, 2, 6]
    shutil.rmtree(root / "val")
    shutil.rmtree(root / "test")
    assert list_folder(root).identity == wanted and counts(list_folder(root)) == [6, 2, 2]
    for name in ("class0", "class1"):
        (root / "train" / name).rename(root / name)
    (root / "train").rmdir()
    assert list_folder(root).identity == wanted


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test", "Test", "VAL"])
def test_the_test_split_may_have_any_of_its_names(image_folder: Writer, name: str) -> None:
    root = image_folder(classes=2, train=10, val=3)
    known = list_folder(root).identity
    (root / "val").rename(root / name)
    listed = list_folder(root)
    assert counts(listed) == [18, 2, 6]
    assert {path.parts[-3] for path in listed.splits["test"].paths} == {name}
    # a run that took its test images out of train/ before this name was known must not go on with others
    assert (listed.identity == known) == (name == "val")


def test_train_may_be_written_in_other_letters(image_folder: Writer) -> None:
    root = image_folder(classes=2, train=10, val=3)
    (root / "train").rename(root / "Train")
    (root / "val").rename(root / "Test")
    assert counts(list_folder(root)) == [18, 2, 6]


def test_of_two_test_folders_the_first_is_taken_and_the_other_is_said(
    image_folder: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    root = image_folder(classes=2, train=10, val=3)
    (root / "val").rename(root / "valid")
    photo(root / "test" / "class0" / "a.png")
    photo(root / "masks" / "m.png")
    assert counts(list_folder(root)) == [18, 2, 6]
    assert "folders beside the one that is the test split: 1 (test)" in caplog.text
    assert "folders beside train/: 1 (masks)" in caplog.text


def test_images_without_classes_are_no_test_split(image_folder: Writer, caplog: pytest.LogCaptureFixture) -> None:
    root = image_folder(classes=2, train=10, val=0)
    shutil.rmtree(root / "val")
    photo(root / "test" / "1.png")
    assert counts(list_folder(root)) == [14, 2, 4]
    assert "folders without classes: 1 (test)" in caplog.text


@pytest.mark.parametrize("levels", [1, 2])
def test_classes_may_lie_deeper_in_a_lone_folder(pets: Path, tmp_path: Path, levels: int) -> None:
    outer = tmp_path / "download"
    inner = outer.joinpath(*(f"pets-{level}" for level in range(levels)))
    inner.parent.mkdir(parents=True)
    plain = list_folder(pets)
    pets.rename(inner)
    listed = list_folder(outer)
    assert listed.class_names == ("cat", "dog") and listed.identity == plain.identity
    train = outer / "x" / "train"
    train.mkdir(parents=True)
    inner.rename(train / "photos")
    shutil.rmtree(outer / "pets-0", ignore_errors=True)
    assert list_folder(outer).class_names == ("cat", "dog")


@pytest.mark.parametrize("names", [("training", "testing"), ("Train_Set", "test"), ("train set", "validation")])
def test_splits_by_other_names_are_not_taken_as_classes(pets: Path, tmp_path: Path, names: tuple[str, str]) -> None:
    root = tmp_path / "root"
    shutil.copytree(pets, root / names[0])
    shutil.copytree(pets, root / names[1])
    with pytest.raises(
        ValueError, match=r"would have the class '\w+', which holds folders that look like classes \(cat, dog"
    ):
        list_folder(root)


def test_a_test_folder_beside_classes_is_no_class(pets: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(pets, pets.with_name("copy"))
    photo(pets / "test" / "unlabelled.png")
    for number in range(3):
        photo(pets / "test" / f"{number}.png")
    assert list_folder(pets).class_names == ("cat", "dog", "test")
    assert "pets/test is taken as a class; it would be a split beside a folder train/" in caplog.text
    shutil.rmtree(pets / "test")
    pets.with_name("copy").rename(pets / "test")
    with pytest.raises(ValueError, match="would have the class 'test', which holds folders that look like classes"):
        list_folder(pets)


def test_folders_of_the_same_names_in_several_classes_are_said(pets: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They may be views of each class; or the classes, and what is above them years."""
    for name in ("cat", "dog"):
        photo(pets / name / name / "a.png")  # an archive in a folder of its name
        photo(pets / name / "indoors" / "a.png")
    assert list_folder(pets).class_names == ("cat", "dog") and not caplog.records
    for name in ("cat", "dog"):
        photo(pets / name / "outdoors" / "a.png")
    list_folder(pets)
    list_folder(pets)
    assert caplog.text.count("hold folders of the same names (indoors, outdoors); if these are the classes") == 1


@pytest.mark.parametrize("stray", ["__MACOSX/pets/._a.png", "preview.png", "README.txt", ".DS_Store"])
def test_what_archives_hold_beside_their_folder(
    pets: Path, tmp_path: Path, stray: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = list_folder(pets)
    outer = tmp_path / "unpacked"
    photo(outer / stray) if stray.endswith(".png") else (outer.mkdir(), (outer / stray).write_text(""))
    pets.rename(outer / "pets")
    assert list_folder(outer).identity == plain.identity
    assert "1 (" in caplog.text and stray.split("/")[0] in caplog.text
    photo(outer / "more.png")
    photo(outer / "most.png")
    with pytest.raises(ValueError, match="at least two classes"):  # these may be what is meant
        list_folder(outer)


def test_a_class_that_the_test_folder_lacks_is_named(image_folder: Writer) -> None:
    root = image_folder(classes=3, train=10, val=3)
    shutil.rmtree(root / "val" / "class1")
    with pytest.raises(
        ValueError, match="val has no folder for the class 'class1', which the training folder has; put"
    ):
        list_folder(root)


def test_folders_inside_of_a_class_belong_to_it(pets: Path) -> None:
    photo(pets / "cat" / "black" / "old" / "x.png")
    listed = list_folder(pets)
    assert listed.class_names == ("cat", "dog") and listed.images == 21


def table(root: Path, text: str, **options: str) -> Path:
    """Six photos without class folders, and what they show."""
    for number in range(6):
        photo(root / f"{number}.png")
    (root / LABELS).write_text(text, **options)
    return root


LINES = [f"{number}.png,{'cat' if number % 2 else 'dog'}" for number in range(6)]


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(LINES),
        "filename,label\n" + "\n".join(LINES) + "\n\n",
        "\ufeffFile;Category\r\n" + "\r\n".join(LINES).replace(",", ";"),
        "label\tpath\n" + "\n".join("\t".join(reversed(line.split(","))) for line in LINES),
        "id,breed\n" + "\n".join(line.replace(".png", "") for line in LINES),
        "picture,animal\n" + "\n".join(LINES),
        "\n".join(line.replace(".png", "") for line in LINES),
        "\n".join(f'"{line.split(",")[0]}"," {line.split(",")[1]} "' for line in LINES),
    ],
)
def test_a_table_says_what_files_show(tmp_path: Path, text: str) -> None:
    listed = list_folder(table(tmp_path / "photos", text, encoding="utf-8"))
    assert listed.class_names == ("cat", "dog") and listed.images == 6 and counts(listed) == [2, 2, 2]
    own = {
        path.name: int(label)
        for part in listed.splits.values()
        for path, label in zip(part.paths, part.labels, strict=True)
    }
    assert own == {f"{number}.png": int(number % 2 == 0) for number in range(6)}


@pytest.mark.parametrize("place", ["images", "train"])
def test_a_tables_files_may_lie_in_a_folder_beside_it(
    tmp_path: Path, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "photos"
    table(root / place, "")
    (root / place / LABELS).unlink()
    lines = [*LINES, "gone.png,cat", "3.png,cat", "2.png,"]
    (root / LABELS).write_text("\n".join(lines))
    photo(root / "test" / "unlabelled.png")
    listed = list_folder(root)
    assert listed.images == 6
    assert "lines of labels.csv whose file is not there: 1 (gone.png)" in caplog.text
    assert "lines of labels.csv without a label: 1 (2.png)" in caplog.text
    assert "images without a label: 1 (unlabelled.png)" in caplog.text


def test_a_table_may_split(tmp_path: Path) -> None:
    lines = [f"{line},{'test' if number > 3 else 'train'}" for number, line in enumerate(LINES)]
    root = table(tmp_path / "photos", "file,label,split\n" + "\n".join(lines))
    listed = list_folder(root)
    assert counts(listed) == [2, 2, 2] and {p.name for p in listed.splits["test"].paths} == {"4.png", "5.png"}
    whole = list_folder(table(tmp_path / "photos", "file,label\n" + "\n".join(LINES)))
    assert whole.identity != listed.identity
    swapped = [line.replace("cat", "x").replace("dog", "cat").replace("x", "dog") for line in LINES]
    assert list_folder(table(tmp_path / "photos", "\n".join(swapped))).identity != whole.identity


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "labels.csv is empty"),
        ("0.png\n1.png", "line 1: a file and a label are needed"),
        ("0.png,dog\n1.png", "line 2: a file and a label are needed"),
        ("a.png,dog\nb.png,cat", "names no file that is there; files are looked for beside it, in images/"),
        ("0.png,dog\n../1.png,cat", "names ../1.png, which lies outside of"),
        ("0.png,dog\n/etc/1.png,cat", "names /etc/1.png, which lies outside of"),
        ("0.png,dog\n0.png,cat", "names 0.png twice, with other words: 'dog' and 'cat'"),
        ("0.png,dog\n1.png,dog", "at least two classes, or a labels.csv; found 1"),
        ("file,label,split\n0.png,dog,test\n1.png,cat,test", "no image to train on"),
        ("file,label,split\n0.png,dog,train\n1.png,cat,test", "the class 'cat' in the test split alone"),
        ("0.png,dog\n1.png,Dog", "the classes 'Dog' and 'dog', which are the same word"),
    ],
)
def test_tables_that_cannot_be_used_are_sentences(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list_folder(table(tmp_path / "photos", text))


def test_a_table_in_another_encoding_is_a_sentence(tmp_path: Path) -> None:
    root = table(tmp_path / "photos", "")
    (root / LABELS).write_bytes("0.png,Käfer".encode("latin-1"))
    with pytest.raises(ValueError, match="is not UTF-8"):
        list_folder(root)


def test_class_folders_win_over_a_table_and_that_is_said(pets: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = list_folder(pets).identity
    (pets / LABELS).write_text("cat/00.png,dog")
    assert list_folder(pets).identity == before
    assert "labels.csv, as there are class folders: 1 (labels.csv)" in caplog.text


def test_a_class_with_too_few_images_is_named(pets: Path) -> None:
    photo(pets / "axolotl" / "only.png")
    with pytest.raises(ValueError, match="each class needs at least 3 images, one for each split; 'axolotl' has 1"):
        list_folder(pets)
    photo(pets / "axolotl" / "two.png")
    with pytest.raises(ValueError, match="'axolotl' has 2"):
        list_folder(pets)
    with pytest.raises(ValueError, match="the calibration split takes 11 samples of class 'axolotl'"):
        list_folder(pets, calibration=33)
    assert counts(list_folder(pets, calibration=0)) == [17, 0, 5]
    for name in "pqrst":
        photo(pets / name / "only.png")
    with pytest.raises(ValueError, match="'axolotl' has 2, 'p' has 1, 'q' has 1 and 3 more classes. Add some"):
        list_folder(pets)


def test_with_a_test_folder_two_are_enough(image_folder: Writer) -> None:
    root = image_folder(classes=2, train=2, val=1)
    assert counts(list_folder(root)) == [2, 2, 2]
    (root / "train" / "class1" / "train000.png").unlink()
    with pytest.raises(ValueError, match="at least 2 images, one for each split; 'class1' has 1"):
        list_folder(root)


def test_two_classes_that_are_one_word_are_refused(pets: Path) -> None:
    photo(pets / "Cat" / "0.png")
    with pytest.raises(ValueError, match="the classes 'Cat' and 'cat', which are the same word; put them together, or"):
        list_folder(pets)
    shutil.rmtree(pets / "Cat")
    for name in ("caf\u00e9", "cafe\u0301"):  # two ways to write the same letters
        photo(pets / name / "0.png")
    with pytest.raises(ValueError, match="which are the same word"):
        list_folder(pets)


@pytest.mark.parametrize("call", ["scandir", "listdir"])
def test_a_folder_that_may_not_be_opened_is_said_as_such(
    pets: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As root every folder opens, so the refusal is the operating system's, in its words."""
    real = getattr(os, call)

    def refusing(path: str | Path = ".") -> object:
        if Path(path).name == "dog":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, call, refusing)
    with pytest.raises(ValueError, match=r"pets/dog may not be opened \(permission denied\); allow it"):
        list_folder(pets)


def test_a_photo_that_may_not_be_opened_is_like_no_other(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = [pets / "cat" / f"same{at}.png" for at in range(3)]
    for path in photos:
        photo(path)

    def refusing(path: Path) -> str:
        if path == photos[1]:
            raise PermissionError(13, "Permission denied", str(path))
        return sha256(path)

    with monkeypatch.context() as patch:
        patch.setattr(listing, "sha256", refusing)
        assert first_twins(photos).tolist() == [0, 1, 0]
    assert first_twins(photos).tolist() == [0, 0, 0]


def test_a_photo_that_is_not_there_is_like_no_other(pets: Path) -> None:
    """As at the end of a broken link: it is passed over as unreadable, when somebody wants to see it."""
    (pets / "cat" / "broken.png").symlink_to(pets / "nowhere.png")
    listed = list_folder(pets)
    assert listed.images == 21 and "broken.png" not in str(look_at(pets, listed).duplicates)
    assert len(digest_of(listed.splits.values(), pets)) == 16


def test_a_photo_is_read_once_however_often_the_folder_is_listed(pets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = [pets / "cat" / f"same{at}.png" for at in range(3)]
    for path in photos:
        photo(path)
    read: list[Path] = []
    monkeypatch.setattr(listing, "sha256", lambda path: read.append(path) or sha256(path))
    assert [first_twins(photos).tolist() for _ in range(2)] == [[0, 0, 0]] * 2
    assert sorted(read) == photos
    monkeypatch.setattr(listing, "MOST_COMPARED", 2)
    assert first_twins(photos).tolist() == [0, 1, 2]


@pytest.mark.parametrize("tested", [False, True])
def test_as_many_different_photos_as_splits_are_enough(pets: Path, tested: bool) -> None:
    """Ten copies each of three photos, or of two beside a test folder: no copy lies on two sides."""
    shutil.rmtree(pets / "cat")
    shutil.rmtree(pets / "dog")
    root = pets / "train" if tested else pets
    for name in ("cat", "dog"):
        for at in range(20 if tested else 30):
            photo(root / name / f"{at:02d}.png", at // 10 + 10 * (name == "dog"))
        if tested:
            photo(pets / "test" / name / "0.png", 99)
    for seed in range(3):
        splits = list_folder(pets, seed).splits
        digests = [{sha256(path) for path in split.paths} for split in splits.values()]
        assert all(digests) and sum(map(len, digests)) == len(set.union(*digests))


def test_copies_stay_on_one_side(pets: Path) -> None:
    """Whatever is held out, for the test or for calibration, has no copy among what is trained on."""
    for name in ("cat", "dog"):
        for at in range(20):
            photo(pets / name / f"{at:02d}.png", at + 100 * (name == "dog"))
            if at % 2:
                shutil.copy(pets / name / f"{at:02d}.png", pets / name / f"{at:02d}-copy.png")
    before = list_folder(pets).identity
    for seed in range(5):
        splits = list_folder(pets, seed).splits
        digests = [{sha256(path) for path in split.paths} for split in splits.values()]
        assert all(digests) and not set.intersection(*digests)
        assert sum(map(len, digests)) == len(set.union(*digests))
        assert sum(len(split.paths) for split in splits.values()) == 2 * 30
    for copy in pets.glob("*/*-copy.png"):
        copy.unlink()
    plain = list_folder(pets)
    assert plain.identity != before
    held = hold_out_share(np.repeat([0, 1], 20), 0.2, 0, "test", ("cat", "dog"))[1]
    assert [path.name for path in plain.splits["test"].paths] == [f"{row % 20:02d}.png" for row in held]


def test_a_class_of_copies_alone_is_split_all_the_same(pets: Path) -> None:
    for name in ("cat", "dog"):
        for at in range(5):
            photo(pets / name / f"{at:02d}.png")
    assert all(len(split.paths) for split in list_folder(pets).splits.values())


def test_what_is_not_used_is_said_once_with_counts_and_examples(pets: Path, caplog: pytest.LogCaptureFixture) -> None:
    photo(pets / "stray.png")
    for name in (".DS_Store", "cat/.DS_Store", "cat/._00.png", "dog/Thumbs.db", "dog/a.txt", "dog/b.mp4", "dog/c.pdf"):
        (pets / name).write_bytes(b"")
    (pets / ".cache").mkdir()
    first = list_folder(pets)
    assert first.images == 20
    for part in (
        "images that lie in no class folder: 1 (stray.png)",
        "hidden files: 3 (.DS_Store, .DS_Store, ._00.png)",
        "hidden folders: 1 (.cache)",
        "files that are no images: 4 (Thumbs.db, a.txt, b.mp4, ...)",
    ):
        assert part in first.ignored
    assert list_folder(pets, seed=1).ignored == first.ignored
    assert caplog.text.count("not used in") == 1
    caplog.clear()
    list_folder(pets)
    assert not caplog.records
    photo(pets / "stray2.png")
    list_folder(pets)
    assert "images that lie in no class folder: 2 (stray.png, stray2.png)" in caplog.text


def test_a_folder_that_is_all_used_says_nothing(pets: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert list_folder(pets).ignored == "" and not caplog.records


def test_a_bundle_may_know_a_lone_folder_as_a_class(pets: Path) -> None:
    shutil.rmtree(pets / "dog")
    (pets / "cat").rename(pets / "young")
    (pets / "cat").mkdir()
    (pets / "young").rename(pets / "cat" / "young")
    assert folder_layout(pets, known=("cat", "dog")).class_names == ("cat",)
    assert folder_layout(pets).class_names in (("young",), ("cat",))


ODD = {
    "cmyk.jpg": lambda path: Image.new("CMYK", (12, 10), (0, 200, 200, 0)).save(path),
    "grey16.png": lambda path: Image.fromarray(np.full((10, 12), 40_000, np.uint16)).save(path),
    "palette.gif": lambda path: Image.new("P", (12, 10)).save(path),
    "transparent.png": lambda path: Image.new("RGBA", (12, 10), (255, 0, 0, 0)).save(path),
    "animated.gif": lambda path: frames()[0].save(path, save_all=True, append_images=frames()[1:]),
    "animated.webp": lambda path: frames()[0].save(path, save_all=True, append_images=frames()[1:], lossless=True),
    "animated.png": lambda path: frames()[0].save(path, save_all=True, append_images=frames()[1:]),
    "pages.tif": lambda path: frames()[0].save(path, save_all=True, append_images=frames()[1:]),
}
MEANS = {"cmyk.jpg": (255, 55, 55), "grey16.png": (155, 155, 155), "transparent.png": (255, 255, 255)}


def frames() -> list[Image.Image]:
    return [Image.new("RGB", (12, 10), colour) for colour in ("red", "lime", "blue")]


@pytest.mark.parametrize("name", ODD)
def test_odd_files_are_images_of_their_class(pets: Path, name: str) -> None:
    path = pets / "cat" / name
    ODD[name](path)
    data = load_dataset("imagefolder", data_dir=pets, image_size=8, calibration=0, workers=0)
    seen = sum(len(b.labels) for split in ("train", "test") for b in data.sweep(split, 8, torch.device("cpu")))
    assert seen == 21
    if name.startswith(("animated", "pages")):  # the first frame, where there are several
        MEANS[name] = (255, 0, 0)
    if name in MEANS:
        assert np.asarray(read_image(path)).mean((0, 1)) == pytest.approx(MEANS[name], abs=3)


def test_a_truncated_photo_is_named_with_its_reason(pets: Path, caplog: pytest.LogCaptureFixture) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (60, 60, 3), dtype=np.uint8)
    Image.fromarray(noise).save(pets / "cat" / "cut.jpg", quality=95)
    whole = (pets / "cat" / "cut.jpg").read_bytes()
    (pets / "cat" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    data = load_dataset("imagefolder", data_dir=pets, image_size=8, calibration=0, workers=0)
    for split in ("train", "test"):
        list(data.sweep(split, 8, torch.device("cpu")))
    assert "cut.jpg: image file is truncated" in caplog.text


@pytest.fixture
def without_heic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "heic_reader", lambda: False)


def test_heic_without_its_extra_is_a_sentence_that_names_it(
    pets: Path, caplog: pytest.LogCaptureFixture, without_heic: None
) -> None:
    (pets / "cat" / "IMG_1.HEIC").write_bytes(b"photo")
    (pets / "cat" / "IMG_2.heif").write_bytes(b"photo")
    assert list_folder(pets).images == 20
    said = "HEIC photos, which pip install 'offramp[heic]' makes readable: 2 (IMG_1.HEIC, IMG_2.heif)"
    assert said in caplog.text
    with pytest.raises(UnreadableImage, match=r"it is a HEIC photo, which pip install 'offramp\[heic\]' makes"):
        read_image(pets / "cat" / "IMG_1.HEIC")
    (pets / "eel").mkdir()
    (pets / "eel" / "IMG_3.heic").write_bytes(b"photo")
    with pytest.raises(ValueError, match="eel holds no images but HEIC photos, which pip install"):
        list_folder(pets)


def test_heic_with_its_extra_is_read_from_files_and_from_nowhere_else(pets: Path) -> None:
    heif = pytest.importorskip("pillow_heif")
    red = heif.from_pillow(Image.new("RGB", (32, 20), (250, 10, 10)))
    red.save(pets / "cat" / "IMG_1.HEIC")
    assert list_folder(pets).images == 21
    image = read_image(pets / "cat" / "IMG_1.HEIC")
    assert image.size == (32, 20) and np.asarray(image).mean((0, 1)) == pytest.approx((250, 10, 10), abs=6)
    data = (pets / "cat" / "IMG_1.HEIC").read_bytes()
    with pytest.raises(UnreadableImage, match="no image of a known kind"):
        read_image(data)  # what comes over the network
    (pets / "cat" / "other.png").write_bytes(data)
    with pytest.raises(UnreadableImage, match="no image of a known kind"):
        read_image(pets / "cat" / "other.png")


def test_the_same_listing_serves_bundles(onnx_bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from offramp import load_bundle
    from offramp.running.labelled import images_of_folder

    root = tmp_path / "wrapped" / "photos"
    for name in ("0", "1"):
        for number in range(5):
            photo(root / name / f"{number}.png")
    (root / "0" / "notes.txt").write_text("")
    bundle = load_bundle(onnx_bundle)
    with caplog.at_level(logging.WARNING, "offramp"):
        assert images_of_folder(bundle, tmp_path / "wrapped", "test").size == 10
    assert "files that are no images: 1 (notes.txt)" in caplog.text
    lines = [f"{number}.png,{number % 2}" for number in range(6)]
    found = images_of_folder(bundle, table(tmp_path / "listed", "\n".join(lines)), "test")
    assert found.size == 6 and found.labels.tolist() == [0, 1, 0, 1, 0, 1]
