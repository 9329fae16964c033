"""Bundles answer as the evaluated network does, on both engines, and refuse whatever is not as it was exported."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from offramp import load_bundle, load_dataset
from offramp.common.files import sha256
from offramp.measuring.calibrate import PolicyRequest, calibrate_run
from offramp.measuring.confidence import confidences
from offramp.measuring.policy import exits_taken, read_policies
from offramp.running.export import export_run
from offramp.runs.outputs import read_outputs


@pytest.fixture(params=["torch", "onnx"])
def bundle(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_bundle")


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """The 400 test images that the run was evaluated on, uint8 [n, h, w, 3]."""
    return load_dataset("digits", train=512, calibration=200, test=400).thumbnails("test", np.arange(400))


def expected(run: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Exits and labels by the saved logits, and which samples lie within 1e-4 of a threshold they meet."""
    policies, saved = read_policies(run / "policy.json"), read_outputs(run, "test")
    sure = confidences(saved.logits, policies.measure, policies.temperatures)
    exits = exits_taken(sure, policies.policy.thresholds)
    gaps = np.abs(sure[:-1] - np.array(policies.policy.thresholds, np.float32)[:, None])
    met = np.arange(1, len(sure))[:, None] <= exits
    labels = saved.logits.argmax(-1)[exits - 1, np.arange(len(exits))]
    return exits, labels, ((gaps <= 1e-4) & met).any(0)


@pytest.mark.parametrize("batch", [1, 64, 400])
def test_prediction_and_exit_are_those_of_evaluation(run: Path, bundle: Path, images: np.ndarray, batch: int) -> None:
    loaded = load_bundle(bundle)
    exits, labels, near = expected(run)
    rows = np.arange(40) if batch == 1 else np.arange(400)
    parts = [loaded(images[rows[at : at + batch]]) for at in range(0, len(rows), batch)]
    found = np.concatenate([part.exits for part in parts]), np.concatenate([part.labels for part in parts])
    print(f"{near.sum()} of {len(near)} samples lie within 1e-4 of a threshold")
    assert near.mean() < 0.005
    np.testing.assert_array_equal(found[0][~near[rows]], exits[rows][~near[rows]])
    np.testing.assert_array_equal(found[1][~near[rows]], labels[rows][~near[rows]])
    assert len(set(found[0].tolist())) == 3


def test_golden_outputs_are_given_again(bundle: Path) -> None:
    assert load_bundle(bundle).check_golden() < 1e-4


def test_every_kind_of_image_is_taken(bundle: Path, images: np.ndarray, tmp_path: Path) -> None:
    loaded = load_bundle(bundle)
    path = tmp_path / "a.png"
    Image.fromarray(images[3]).save(path)
    wanted = loaded(images[3:4])
    for same in ([path], [str(path)], [path.read_bytes()], [Image.open(path)], loaded.prepare(images[3:4])):
        found = loaded(same)
        assert (found.labels.tolist(), found.exits.tolist()) == (wanted.labels.tolist(), wanted.exits.tolist())
    assert len(loaded([])) == 0
    with pytest.raises(ValueError, match=r"images must be \[3, 32, 32\]"):
        loaded(np.zeros((1, 3, 8, 8), np.float32))
    with pytest.raises(ValueError, match="uint8"):
        loaded(np.zeros((1, 32, 32), np.uint8))
    for alone in (str(path), path, path.read_bytes(), Image.fromarray(images[3])):
        with pytest.raises(ValueError, match="give a list of images"):
            loaded(alone)
    with pytest.raises(ValueError, match="image 2 cannot be read: it is not there"):
        loaded([path, tmp_path / "none.png"])
    clear = Image.new("RGBA", (32, 32), (255, 0, 0, 0))
    clear.save(path)
    np.testing.assert_array_equal(loaded.prepare([clear]), loaded.prepare([path]))


def test_policies_can_be_chosen_when_running(bundle: Path, images: np.ndarray) -> None:
    loaded = load_bundle(bundle)
    cheap = loaded(images, budget_mul_adds=loaded.costs[0] * 1.05)
    dear = loaded(images, q=1.9)
    assert cheap.mul_adds.mean() < loaded(images).mul_adds.mean() < dear.mul_adds.mean()
    assert loaded(images, max_exit=1).exits.max() == 1
    assert loaded(images, deadline_ms=0.001).exits.max() == 1
    assert loaded.runtime() is loaded.runtime()
    with pytest.raises(ValueError, match="not for both"):
        loaded(images, budget_mul_adds=1e6, q=1.0)
    with pytest.raises(ValueError, match="below exit 1's cost"):
        loaded(images, budget_mul_adds=1.0)


def test_a_lazy_policy_makes_a_lazy_bundle(run: Path, images: np.ndarray, tmp_path: Path) -> None:
    calibrate_run(run, PolicyRequest(q=0.9), lazy=True, out=tmp_path / "lazy.json")
    lazy = load_bundle(export_run(run, tmp_path / "lazy", policy=tmp_path / "lazy.json"))
    eager = read_policies(run / "policy.json")
    assert lazy.card.schedule == "lazy"
    assert all(a <= b for a, b in zip(lazy.costs, eager.costs, strict=True)) and lazy.costs[0] < eager.costs[0]
    exits, labels, near = expected(run)
    found = lazy(images)
    np.testing.assert_array_equal(found.exits[~near], exits[~near])
    np.testing.assert_array_equal(found.labels[~near], labels[~near])


def damaged(bundle: Path, tmp_path: Path, change: Callable[[Path], object]) -> Path:
    copy = Path(shutil.copytree(bundle, tmp_path / "copy", dirs_exist_ok=True))
    change(copy)
    return copy


def rewritten(name: str, **changes: object) -> Callable[[Path], None]:
    """Change a JSON file and its digest, so that only the content is wrong."""

    def change(folder: Path) -> None:
        value = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**value, **changes}))
        manifest = json.loads((folder / "bundle.json").read_text())
        if name != "bundle.json":
            manifest["files"][name] = sha256(folder / name)
            (folder / "bundle.json").write_text(json.dumps(manifest))

    return change


def unnamed(folder: Path, *names: str) -> None:
    """Leave files out of the manifest, so that nothing vouches for them."""
    manifest = json.loads((folder / "bundle.json").read_text())
    manifest["files"] = {name: digest for name, digest in manifest["files"].items() if name not in names}
    (folder / "bundle.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("is not a bundle", lambda f: (f / "bundle.json").unlink()),
        ("cannot be read as JSON", lambda f: (f / "bundle.json").write_text("{")),
        ("is damaged", lambda f: (f / "bundle.json").write_text("[]")),
        ("newer version of offramp", rewritten("bundle.json", schema=3)),
        ("unknown format 'pickle'", rewritten("bundle.json", format="pickle")),
        ("model.json is missing", lambda f: (f / "model.json").unlink()),
        ("not the file that was written", lambda f: (f / "golden.npz").write_bytes(b"x")),
        ("is missing", rewritten("bundle.json", files={"../../etc/passwd": "x"})),
        ("does not name model.json", rewritten("bundle.json", files={})),
        ("does not name (model.safetensors|stage-1.onnx)", lambda f: unnamed(f, "model.safetensors", "stage-1.onnx")),
        ("do not rise", rewritten("model.json", costs=[3, 2, 1])),
        ("does not fit its network", rewritten("model.json", input_shape=[3, 64, 64])),
        ("not as many", rewritten("model.json", classes=["a", "b"])),
        ("schema 9 is not known", rewritten("model.json", schema=9)),
        ("model.json cannot be used", rewritten("model.json", preprocessing={})),
        ("for another network", rewritten("policy.json", costs=[1, 2, 3])),
        ("policy.json cannot be used", rewritten("policy.json", schema=9)),
    ],
)
def test_whatever_is_not_as_exported_is_refused(bundle: Path, tmp_path: Path, words: str, change) -> None:
    with pytest.raises(ValueError, match=words):
        load_bundle(damaged(bundle, tmp_path, change))


def test_broken_graphs_and_weights_are_sentences(torch_bundle: Path, onnx_bundle: Path, tmp_path: Path) -> None:
    for source, name in ((torch_bundle, "model.safetensors"), (onnx_bundle, "stage-2.onnx")):

        def cut(folder: Path, name: str = name) -> None:
            (folder / name).write_bytes((folder / name).read_bytes()[:100])
            manifest = json.loads((folder / "bundle.json").read_text())
            manifest["files"][name] = sha256(folder / name)
            (folder / "bundle.json").write_text(json.dumps(manifest))

        with pytest.raises(ValueError, match="damaged|cannot be loaded"):
            load_bundle(damaged(source, tmp_path / name, cut))


def test_export_refuses_what_it_should(run: Path, torch_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is there already"):
        export_run(run, torch_bundle)
    with pytest.raises(ValueError, match="bundle format 'tensorrt' is unknown"):
        export_run(run, tmp_path / "b", format="tensorrt")
    with pytest.raises(ValueError, match="offramp calibrate"):
        export_run(run, tmp_path / "b", policy=tmp_path / "none.json")
    assert not list(tmp_path.iterdir())


def test_a_bundle_that_answers_otherwise_is_never_written(run: Path, tmp_path: Path, monkeypatch) -> None:
    from offramp.running import export

    before = export._reference
    monkeypatch.setattr(export, "_reference", lambda *args: before(*args) + 1.0)
    with pytest.raises(ValueError, match="does not give its golden outputs"):
        export_run(run, tmp_path / "b")
    assert not list(tmp_path.iterdir())


def test_a_box_without_torch_runs_an_onnx_bundle(onnx_bundle: Path, images: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", images[:50])
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, offramp\n"
        f"found = offramp.load_bundle({str(onnx_bundle)!r})(np.load({str(tmp_path / 'images.npy')!r}))\n"
        "print(found.exits.tolist())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(out.stdout) == load_bundle(onnx_bundle)(images[:50]).exits.tolist()


def test_http_answers_alike(bundle: Path, images: np.ndarray) -> None:
    """What the server says is what the bundle says, sample by sample, exit by exit."""
    from offramp.bench.serve import running

    loaded = load_bundle(bundle)
    wanted = loaded(images[:40])
    files = []
    for image in images[:40]:
        data = io.BytesIO()
        Image.fromarray(image).save(data, "PNG")
        files.append(("images", ("image.png", data.getvalue(), "image/png")))
    with running(bundle, loaded, "--reveal-exit") as url:
        found = httpx.post(f"{url}/predict", files=files, timeout=30).json()["predictions"]
    assert [one["class"] for one in found] == wanted.labels.tolist()
    assert [one["exit"] for one in found] == wanted.exits.tolist()
    assert [one["mul_adds"] for one in found] == wanted.mul_adds.tolist()


def test_a_server_under_load_answers_everything_once(onnx_bundle: Path) -> None:
    from offramp.bench.serve import bench_serve

    [found] = bench_serve(onnx_bundle, seconds=2.0, clients=[16])
    assert found.load.passed, found


def test_other_sessions_of_the_process_are_left_alone(onnx_bundle: Path) -> None:
    code = (
        "import onnxruntime as ort, offramp, numpy as np\n"
        f"path = {str(onnx_bundle)!r}\n"
        "images = np.zeros((1, 32, 32, 3), np.uint8)\n"
        "one = offramp.load_bundle(path)(images)\n"
        "two = offramp.load_bundle(path, threads=1)(images)\n"
        "own = ort.InferenceSession(path + '/stage-1.onnx', providers=['CPUExecutionProvider'])\n"
        "given = offramp.load_bundle(path).prepare(images)\n"
        "logits = own.run(None, {own.get_inputs()[0].name: given})[0]\n"
        "print(one.labels[0], two.labels[0], logits.shape)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second, *shape = done.stdout.split()
    assert first == second and shape == ["(1,", "10)"]


def test_an_argument_that_went_is_still_taken(onnx_bundle: Path) -> None:
    with pytest.warns(DeprecationWarning, match="needs no own_process"):
        assert load_bundle(onnx_bundle, own_process=True).format == "onnx"


def test_running_imports_nothing_of_training(torch_bundle: Path) -> None:
    code = (
        "import sys, offramp\n"
        f"offramp.load_bundle({str(torch_bundle)!r})\n"
        "print([m for m in sys.modules if m.startswith('offramp.')"
        " and m.split('.')[1] in ('train', 'meta', 'step', 'objectives', 'learned_weights', 'build')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
