"""The page of the bundle's format is right: its arithmetic is ours, and a client written from it answers as we do."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image

from offramp import export, load_bundle, load_model
from offramp.common.files import sha256
from offramp.common.images import Preprocessing, read_image
from offramp.running.engines.protocol import all_logits
from offramp.running.golden_photos import PolicyResult, drawn_photos, read_photos

NODE = Path(__file__).parent / "node"
NEAR = 1e-4
in_pillows_order = pytest.mark.skipif(
    int(PIL.__version__.split(".")[0]) < 13, reason="the page has the order of passes of Pillow 13"
)


# docs/bundle-format.md, "From a file to an array", word for word in numpy


def page_bilinear(x: float) -> float:
    return max(0.0, 1 - abs(x))


def page_bicubic(x: float) -> float:
    x = abs(x)
    if x < 1:
        return (1.5 * x - 2.5) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * -0.5 if x < 2 else 0.0


PAGE_FILTERS = {"bilinear": (1, page_bilinear), "bicubic": (2, page_bicubic)}


def page_line_filters(n: int, m: int, interpolation: str) -> list[tuple[int, np.ndarray]]:
    """The first value that each of m outputs looks at, and its weights."""
    found, scale = [], n / m
    reach, f = PAGE_FILTERS[interpolation]
    wide = max(scale, 1.0)
    support = reach * wide
    for i in range(m):
        centre = (i + 0.5) * scale
        first, last = max(0, int(centre - support + 0.5)), min(n, int(centre + support + 0.5))
        w = [f((j - centre + 0.5) * (1 / wide)) for j in range(first, last)]
        total = 0.0
        for one in w:
            total += one
        shares = [one / total for one in w]
        found.append((first, np.array([int(math.copysign(0.5, s) + s * 2**22) for s in shares], np.int64)))
    return found


def page_pass(lines: np.ndarray, m: int, interpolation: str) -> np.ndarray:
    """Whole numbers [..., n, 3] to [..., m, 3]; a pass to as many changes nothing."""
    if lines.shape[-2] == m:
        return lines
    sums = [
        2**21 + np.tensordot(lines[..., first : first + len(k), :], k, ([-2], [0]))
        for first, k in page_line_filters(lines.shape[-2], m, interpolation)
    ]
    return (np.stack(sums, -2) >> 22).clip(0, 255)


def page_resized(pixels: np.ndarray, own: Preprocessing) -> np.ndarray:
    resize, interpolation = own.resize, own.interpolation
    height, width = pixels.shape[:2]
    short, long = min(width, height), max(width, height)
    if short == resize and not own.squash:
        return pixels
    longer = resize if own.squash else max(resize, (resize * long) // short)
    wide, high = (resize, longer) if width <= height else (longer, resize)
    if height > high and height - high > 2 * (width - wide):
        return page_pass(page_columns(pixels, high, interpolation), wide, interpolation)
    return page_columns(page_pass(pixels, wide, interpolation), high, interpolation)


def page_columns(pixels: np.ndarray, m: int, interpolation: str) -> np.ndarray:
    return page_pass(pixels.transpose(1, 0, 2), m, interpolation).transpose(1, 0, 2)


def page_middle(pixels: np.ndarray) -> np.ndarray:
    height, width = pixels.shape[:2]
    most = 20 * min(width, height)
    left, top = max(0, (width - most) // 2), max(0, (height - most) // 2)
    return pixels[top : height - top, left : width - left]


def half_to_even(twice: int) -> int:
    """Half of a whole number, rounded."""
    down, rest = divmod(twice, 2)
    return down + (rest and down % 2)


def page_cut(pixels: np.ndarray, own: Preprocessing) -> np.ndarray:
    """Steps 4 to 6 of the page: whole numbers [h, w, 3] to uint8 [3, size, size]."""
    image = page_resized(page_middle(pixels.astype(np.int64)), own)
    top, left = (half_to_even(side - own.size) for side in image.shape[:2])
    return image[top : top + own.size, left : left + own.size].astype(np.uint8).transpose(2, 0, 1)


def page_on_white(pixels: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    s, a = pixels.astype(np.int64), alpha.astype(np.int64)[..., None]
    return (s * a + 255 * (255 - a) + 127) // 255


PREPARED = [
    Preprocessing(size, resize, (0.5,) * 3, (0.25,) * 3, interpolation, squash)
    for interpolation, squash in (("bilinear", False), ("bicubic", False), ("bicubic", True))
    for size, resize in ((32, 32), (24, 28), (56, 64))
]


def shown(own: Preprocessing) -> str:
    return f"{own.resize}-{own.size}-{own.interpolation}{'-squash' if own.squash else ''}"


SIZES = [
    *((32, 32), (28, 28), (64, 64), (33, 32), (50, 31), (31, 50), (28, 90), (10, 13), (200, 24), (1, 1), (3, 2)),
    *((400, 20), (401, 20), (402, 20), (403, 20), (20, 403), (1, 300), (301, 1), (640, 427), (333, 500), (97, 89)),
]


def noise(width: int, height: int, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, channels), dtype=np.uint8)


@in_pillows_order
@pytest.mark.parametrize("own", PREPARED, ids=shown)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_pages_resizing_is_ours(own: Preprocessing, size: tuple[int, int]) -> None:
    for pixels in (noise(*size), np.where(noise(*size) < 128, np.uint8(0), np.uint8(255))):
        np.testing.assert_array_equal(page_cut(pixels, own), own.cut(Image.fromarray(pixels)))


@in_pillows_order
def test_the_pages_resizing_is_ours_at_many_sizes() -> None:
    draw = np.random.default_rng(5)
    for number, (width, height, resize) in enumerate(draw.integers(1, 120, (300, 3)).tolist()):
        filter_ = ("bilinear", "bicubic")[number % 2]
        own = Preprocessing(int(draw.integers(1, resize + 1)), resize, (0.5,) * 3, (0.25,) * 3, filter_)
        pixels = noise(width, height)
        np.testing.assert_array_equal(page_cut(pixels, own), own.cut(Image.fromarray(pixels)), f"{width} x {height}")


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def as_read(image: Image.Image, kind: str = "PNG", **options: object) -> np.ndarray:
    return np.asarray(read_image(encoded(image, kind, **options)))


def test_the_pages_alpha_is_ours() -> None:
    """Every level with every alpha, in colour and in grey."""
    levels, alpha = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    wanted = page_on_white(np.stack([levels] * 3, -1), alpha)
    np.testing.assert_array_equal(as_read(Image.fromarray(np.stack([levels] * 3 + [alpha], -1))), wanted)
    np.testing.assert_array_equal(as_read(Image.fromarray(np.stack([levels, alpha], -1))), wanted)


def test_the_pages_palettes_and_keys_are_ours() -> None:
    entries = noise(1, 256)[:, 0]
    image = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    alpha = np.full(256, 255)
    alpha[:200] = noise(1, 200)[:, 0, 0]
    wanted = page_on_white(entries, alpha).reshape(16, 16, 3)
    coloured = image.copy()
    coloured.putpalette(entries.tobytes())
    np.testing.assert_array_equal(as_read(coloured, transparency=bytes(alpha[:200].tolist())), wanted)
    keyed = np.repeat(np.arange(256).reshape(16, 16, 1), 3, 2)
    keyed[keyed == 77] = 255
    np.testing.assert_array_equal(as_read(image, transparency=77), keyed)
    np.testing.assert_array_equal(as_read(image.convert("RGB"), transparency=(77, 77, 77)), keyed)


def test_the_pages_deep_grey_is_ours() -> None:
    values = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    wanted = np.repeat((values // 257)[..., None], 3, 2)
    np.testing.assert_array_equal(as_read(Image.fromarray(values)), wanted)
    np.testing.assert_array_equal(as_read(Image.fromarray(values), "TIFF"), wanted)


def page_upright(pixels: np.ndarray, value: int) -> np.ndarray:
    """Step 2 of the page."""
    height, width = pixels.shape[:2]
    if value == 7:
        return np.array([[pixels[height - 1 - x, width - 1 - y] for x in range(height)] for y in range(width)])
    turned = {2: pixels[:, ::-1], 3: np.rot90(pixels, 2), 4: pixels[::-1], 5: pixels.transpose(1, 0, 2)}
    return {**turned, 6: np.rot90(pixels, -1), 8: np.rot90(pixels)}.get(value, pixels)


@pytest.mark.parametrize("value", range(10))
def test_the_pages_turning_is_ours(value: int) -> None:
    exif = Image.Exif()
    exif[274] = value
    pixels = noise(7, 5)
    np.testing.assert_array_equal(as_read(Image.fromarray(pixels), exif=exif), page_upright(pixels, value))


def test_the_pages_normalising_is_ours() -> None:
    own = Preprocessing(16, 16, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    x = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16).repeat(3, 1)
    for c in range(3):
        scale, shift = np.float32(1 / (255 * own.std[c])), np.float32(-own.mean[c] / own.std[c])
        wanted = x[:, c].astype(np.float32) * scale + shift
        np.testing.assert_array_equal(own.normalise(x)[:, c], wanted)


# golden photos


@pytest.mark.parametrize("own", PREPARED, ids=shown)
def test_golden_photos_are_small_and_the_same_every_time(own: Preprocessing) -> None:
    first, second = list(drawn_photos(own)), list(drawn_photos(own))
    assert first == second
    assert all(len(data) < 8000 for _, _, data in first)
    opened = [Image.open(io.BytesIO(data)) for _, _, data in first]
    assert [image.mode for image in opened] == ["RGB", "RGB", "RGBA", "I;16", "RGB", "P"]
    assert opened[1].getexif()[274] == 6 and "transparency" in opened[5].info
    assert max(opened[4].size) > 20 * min(opened[4].size)


def wrong_ways(own: Preprocessing) -> dict[str, object]:
    """Mistakes that a client may make, each as a function of an upright RGB image."""

    def plain(image: Image.Image, rounding, resample) -> np.ndarray:
        short, long = min(image.size), max(image.size)
        longer = rounding(own.resize * long / short)
        wide = image.width > image.height
        image = image.resize((longer, own.resize) if wide else (own.resize, longer), resample)
        left, top = ((side - own.size) // 2 for side in image.size)
        return np.asarray(image.crop((left, top, left + own.size, top + own.size))).transpose(2, 0, 1)

    right, other = Image.Resampling.BILINEAR, Image.Resampling.BICUBIC
    if own.interpolation == "bicubic":
        right, other = other, right
    return {
        "nearest": lambda image: plain(image, int, Image.Resampling.NEAREST),
        "another filter": lambda image: plain(image, int, other),
        "rounded": lambda image: plain(image, round, right),
        "crop rounded down": lambda image: plain(image, int, right),
    }


@pytest.mark.parametrize("own", PREPARED, ids=shown)
def test_golden_photos_show_mistakes(own: Preprocessing) -> None:
    images = [read_image(data) for name, _, data in drawn_photos(own) if name in ("photo-1.png", "photo-3.png")]
    for words, wrong in wrong_ways(own).items():
        assert any((wrong(image) != own.cut(image)).any() for image in images), words


@pytest.fixture(params=["torch", "onnx"])
def bundle(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_bundle")


def test_every_bundle_has_golden_photos(bundle: Path) -> None:
    loaded, manifest = load_bundle(bundle), json.loads((bundle / "bundle.json").read_text())
    photos = read_photos(bundle, manifest["files"])
    assert len(photos) == 6 and all(photo.file in manifest["files"] for photo in photos)
    found = loaded([bundle / photo.file for photo in photos])
    assert found.labels.tolist() == [photo.label for photo in photos]
    assert found.exits.tolist() == [photo.exit for photo in photos]
    np.testing.assert_allclose(found.confidences, [photo.confidence for photo in photos], atol=NEAR)
    loaded.check_golden()


def renewed(bundle: Path, copy: Path, change) -> Path:
    """A copy with one change, vouched for by its manifest."""
    shutil.copytree(bundle, copy)
    change(copy)
    manifest = json.loads((copy / "bundle.json").read_text())
    manifest["files"] = {name: sha256(copy / name) for name in manifest["files"]}
    (copy / "bundle.json").write_text(json.dumps(manifest))
    return copy


def other_photo(folder: Path) -> None:
    pixels = np.asarray(Image.open(folder / "photo-1.png")).copy()
    Image.fromarray(255 - pixels).save(folder / "photo-1.png")


def other_answer(folder: Path) -> None:
    text = (folder / "photos.json").read_text()
    known = json.loads(text)
    known["photos"][2]["label"] += 1
    (folder / "photos.json").write_text(json.dumps(known))


def other_file(folder: Path) -> None:
    (folder / "photos.json").write_text((folder / "photos.json").read_text().replace("photo-3.png", "../photo.png"))


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("photo-1.png is cut into another array", other_photo),
        ("photo-3.png is class", other_answer),
        ("does not name ../photo.png", other_file),
        ("photos.json is damaged", lambda folder: (folder / "photos.json").write_text("[]")),
    ],
)
def test_photos_that_do_not_give_what_they_must_are_sentences(bundle: Path, tmp_path: Path, words: str, change) -> None:
    with pytest.raises(ValueError, match=words):
        load_bundle(renewed(bundle, tmp_path / "copy", change)).check_golden()


# a client in another language


def sixty_photos(folder: Path) -> list[Path]:
    """PNG files of many sizes and modes, the same ones every time."""
    folder.mkdir()
    for number in range(60):
        draw = np.random.default_rng(number)
        width, height = {8: (37, 37 * 25), 9: (990, 33)}.get(number % 10, draw.integers(8, 400, 2).tolist())
        image, options = _in_mode(_picture(draw, width, height), number % 6, draw)
        image.save(folder / f"{number:02d}.png", **options)
    return sorted(folder.iterdir())


def _picture(draw: np.random.Generator, width: int, height: int) -> np.ndarray:
    """Thick coloured strokes on a ground, with some noise."""
    down, right = np.mgrid[:height, :width] / min(width, height)
    pixels = np.full((height, width, 3), draw.integers(0, 120, 3), np.float64)
    for _ in range(4):
        centre, radius = draw.uniform(0, 1, 2), draw.uniform(0.1, 0.4)
        ring = np.abs(np.hypot(down % 1 - centre[0], right % 1 - centre[1]) - radius) < 0.06
        pixels[ring] = draw.integers(100, 256, 3)
    return (pixels + draw.normal(0, 6, pixels.shape)).clip(0, 255).astype(np.uint8)


def _in_mode(pixels: np.ndarray, which: int, draw: np.random.Generator) -> tuple[Image.Image, dict[str, object]]:
    image = Image.fromarray(pixels)
    if which == 1:
        alpha = draw.integers(0, 256, (*pixels.shape[:2], 1), dtype=np.uint8)
        return Image.fromarray(np.concatenate([pixels, alpha], 2)), {}
    if which == 2:
        return image.convert("L"), {}
    if which == 3:
        fine = draw.integers(0, 257, pixels.shape[:2])
        return Image.fromarray((np.asarray(image.convert("L")) * 257.0 + fine).clip(0, 65535).astype(np.uint16)), {}
    if which == 4:
        alpha = bytes(draw.integers(0, 256, 16, dtype=np.uint8).tolist())
        return image.quantize(16), {"transparency": alpha}
    if which == 5:
        exif = Image.Exif()
        exif[274] = int(draw.integers(1, 9))
        return image, {"exif": exif}
    return image, {}


@pytest.fixture(scope="session")
def node_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client with its packages installed, or a skip that says why not."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program}")
    folder = tmp_path_factory.mktemp("node-client")
    for file in NODE.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    command = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=0"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200)
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not install the client's packages in time")
    if done.returncode:
        pytest.skip(f"npm cannot install the client's packages: {done.stderr.strip().splitlines()[-1:]}")
    return folder / "walk.mjs"


def walked(client: Path, bundle: Path, photos: Path) -> dict[str, list[dict[str, object]]]:
    command = ["node", str(client), str(bundle), str(photos)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def other_measure(bundle: Path, copy: Path, measure: str, thresholds: list[float | None]) -> Path:
    """The bundle with another measure of confidence, with temperatures, and with thresholds of this test."""

    def change(folder: Path) -> None:
        known = json.loads((folder / "policy.json").read_text())
        known |= {"measure": measure, "temperatures": [0.7, 1.3, 0.9]}
        known["policies"][known["chosen"]]["thresholds"] = thresholds
        (folder / "policy.json").write_text(json.dumps(known))

    return renewed(bundle, copy, change)


def bicubic(run: Path, out: Path) -> Path:
    """The run's network in a bundle that resizes otherwise and cuts off the edges."""
    own = Preprocessing(32, 36, (0.5,) * 3, (0.25,) * 3, "bicubic")
    return export(load_model(run), run, out=out, preprocessing=own, format="onnx")


@in_pillows_order
def test_a_bundle_says_how_it_resizes(run: Path, tmp_path: Path) -> None:
    bundle = load_bundle(bicubic(run, tmp_path / "cubic"))
    assert bundle.check_golden() < 1e-3
    files = sixty_photos(tmp_path / "photos")[::6]  # those in RGB
    wanted = np.stack([page_cut(np.asarray(Image.open(file)), bundle.card.preprocessing) for file in files])
    np.testing.assert_array_equal(bundle.prepare(files), bundle.card.preprocessing.normalise(wanted))


def test_preprocessing_goes_to_json_and_back() -> None:
    for own in PREPARED:
        value = json.loads(json.dumps(own.to_json()))
        assert Preprocessing.from_json(value) == own
        assert ("interpolation" in value) == (own.interpolation == "bicubic")  # the others are as they always were
    with pytest.raises(ValueError, match="interpolation 'lanczos' is unknown"):
        Preprocessing.from_json({**PREPARED[0].to_json(), "interpolation": "lanczos"})


@pytest.mark.slow
@in_pillows_order
def test_a_client_written_from_the_page_answers_alike(
    node_client: Path, run: Path, onnx_bundle: Path, tmp_path: Path
) -> None:
    files = sixty_photos(tmp_path / "photos")
    compare_clients(walked(node_client, onnx_bundle, tmp_path / "photos"), onnx_bundle, files)
    cubic = bicubic(run, tmp_path / "cubic")
    compare_clients(walked(node_client, cubic, tmp_path / "photos"), cubic, files)
    for measure, thresholds in (("margin", [0.1, None]), ("entropy", [0.25, 0.25])):
        other = other_measure(onnx_bundle, tmp_path / measure, measure, thresholds)
        compare_clients(walked(node_client, other, tmp_path / "photos"), other, files)


def compare_clients(found: dict[str, list[dict[str, object]]], bundle: Path, files: list[Path]) -> None:
    """Same label and exit for all but those that lie too near to a threshold, which are few."""
    loaded = load_bundle(bundle)
    wanted = loaded(files)
    undecided = PolicyResult.of(all_logits(loaded.engine, loaded.prepare(files)), loaded.policies).undecided
    assert len(found["photos"]) == 60 and undecided.sum() <= 2
    assert len(set(wanted.exits.tolist())) > 1 and len(set(wanted.labels.tolist())) > 3
    rows = zip(found["photos"], files, wanted.labels, wanted.exits, wanted.confidences, undecided, strict=True)
    for row, file, label, exit_, sure, either in rows:
        assert row["file"] == file.name
        if not either:
            assert (row["label"], row["exit"]) == (label, exit_), file.name
            assert row["confidence"] == pytest.approx(sure, abs=NEAR), file.name


@pytest.mark.slow
@in_pillows_order
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_a_client_written_from_the_page_gives_golden_outputs(
    interpolation: str, node_client: Path, run: Path, onnx_bundle: Path, tmp_path: Path
) -> None:
    """Tensors nearly, PNG exactly, JPEG within what the bundle allows, and the answers that it names."""
    (tmp_path / "none").mkdir()
    bundle = onnx_bundle if interpolation == "bilinear" else bicubic(run, tmp_path / "cubic")
    found = walked(node_client, bundle, tmp_path / "none")
    assert found["tensors"] < 1e-3
    for row, photo in zip(found["golden"], read_photos(bundle, os.listdir(bundle)), strict=True):
        assert row["difference"] <= photo.tolerance == (3 if photo.file == "photo-2.jpg" else 0)
        assert (row["file"], row["label"], row["exit"]) == (photo.file, photo.label, photo.exit)
