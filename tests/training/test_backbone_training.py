"""Networks of a library and cascades in the training loop: pretrained, prepared as they say, resumed bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.runs import resumed, same_weights, stopped_halfway
from offramp import create_model, evaluate_run, load_bundle, load_model, train_run, with_settings
from offramp.measuring.calibrate import PolicyRequest, calibrate_run
from offramp.running.export import export_run
from offramp.runs.config import RunConfig

DIGITS = ("data.train=64", "data.calibration=20", "data.test=20", "train.epochs=2", "train.batch=32")
EVERY_STEP = "train.save_seconds=0"
CUT = ("model.name=timm/test_resnet", "model.overrides={exits=3, options={drop_path_rate=0.1}, head='chained'}")
FINE = (
    "train.optimizer=adamw",
    "train.learning_rate=1e-3",
    "train.depth_decay=0.7",
    "train.head_rate=3.0",
    "train.decay_norms=false",
    "train.ema=0.9",
    "train.cutmix=1.0",
    "objective.name=distillation",
    "objective.options={source='mean', label_smoothing=0.1}",
)


def config(*settings: str) -> RunConfig:
    return with_settings(RunConfig(), [EVERY_STEP, *settings])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for number in range(60):
        path = tmp_path / "photos" / str(number % 3) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (50, 40, 3), dtype=np.uint8)).save(path)
    return tmp_path / "photos"


@pytest.mark.parametrize("weighting", ["uniform", "learned"])
def test_fine_tuning_resumes_bit_for_bit(weighting: str, tmp_path: Path) -> None:
    given = config(*DIGITS, *CUT, *FINE, f"weighting.name={weighting}")
    run = train_run(given, tmp_path / "run", device="cpu")
    assert load_model(run).input_shape == (3, 32, 32)  # the digits' size
    assert same_weights(run, resumed(given, run, tmp_path / "again"))


@pytest.mark.parametrize("order", ["exact", "delayed"])
def test_a_cascade_learns_with_learned_weights(order: str, tmp_path: Path) -> None:
    given = config(*DIGITS, "model.name=cascade", "weighting.name=learned", f"weighting.order={order}")
    run = train_run(given, tmp_path / "run", device="cpu")
    assert load_model(run).num_exits == 6
    assert same_weights(run, resumed(given, run, tmp_path / "again"))


def test_training_starts_from_a_single_network(tmp_path: Path) -> None:
    """Frozen under new heads, its last exit answers as before, bit for bit."""
    single = train_run(
        config(*DIGITS, "model.name=timm/test_resnet", "model.overrides={exits=1}"), tmp_path / "single", device="cpu"
    )
    heads = config(*DIGITS, *CUT, f"model.pretrained='{single}'", "train.parts=inner_heads", "train.probe=true")
    run = train_run(heads, tmp_path / "heads", device="cpu")
    images = torch.randn(4, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(load_model(run).eval()(images)[-1], load_model(single).eval()(images)[-1])
    again = stopped_halfway(heads, tmp_path / "again")
    (tmp_path / "single").rename(tmp_path / "gone")  # what a resumed run started from may be gone
    assert same_weights(run, train_run(heads, again, device="cpu", resume=True))


@pytest.mark.parametrize("more", [(), ("train.network_epochs=2",), ("train.network_epochs=2", "train.probe=true")])
def test_what_a_cascade_started_from_may_be_gone_when_it_is_resumed(more: tuple[str, ...], tmp_path: Path) -> None:
    alone = ("model.name=timm/test_resnet", "model.overrides={exits=1}", "train.epochs=1")
    single = train_run(config(*DIGITS, *alone), tmp_path / "single", device="cpu")
    of_run = f"{{name='timm/test_resnet', overrides={{exits=2, head='linear'}}, pretrained='{single}'}}"
    overrides = f"model.overrides={{members=[{of_run}, {of_run}], image_sizes=[24, 32]}}"
    given = config(*DIGITS, "model.name=cascade", overrides, *more)
    run = train_run(given, tmp_path / "run", device="cpu")
    again = stopped_halfway(given, tmp_path / "again")
    if "train.probe=true" in more:  # which heads are new has to be known until they have been probed
        again = stopped_halfway(given, again)
    single.rename(tmp_path / "gone")
    assert same_weights(run, train_run(given, again, device="cpu", resume=True))


@pytest.mark.parametrize("augmentation", ["trivial", "device-crop"])
def test_augmented_photos_are_the_same_when_a_run_is_resumed(augmentation: str, photos: Path, tmp_path: Path) -> None:
    """Drawn in the workers that read them, or on the device where they lie."""
    given = config(
        "data.name=imagefolder",
        f"data.dir='{photos}'",
        "data.workers=1",
        f"data.augmentation={augmentation}",
        "train.epochs=3",
        "train.batch=8",
        "weighting.name=learned",
        *CUT,
        *(["data.augmentation_options={erase=0.5}"] if augmentation == "trivial" else []),
    )
    given = with_settings(given, ["model.overrides.image_size=24"])
    run = train_run(given, tmp_path / "run", device="cpu")
    assert same_weights(run, resumed(given, run, tmp_path / "again"))


def test_photos_are_prepared_as_the_network_says(photos: Path, tmp_path: Path) -> None:
    given = config(
        "data.name=imagefolder", f"data.dir='{photos}'", "data.workers=0", "train.epochs=1", "train.batch=8", *CUT
    )
    run = train_run(with_settings(given, ["model.overrides.image_size=24"]), tmp_path / "run", device="cpu")
    prepared = evaluate_run(run, device="cpu").preprocessing
    wanted = create_model("timm/test_resnet", 3, exits=1, image_size=24).preprocessing
    assert prepared == wanted and prepared is not None and prepared.size == 24
    with pytest.raises(ValueError, match="data.image_size is 40, but the network takes images of 24"):
        train_run(
            with_settings(given, ["model.overrides.image_size=24", "data.image_size=40"]), tmp_path / "no", device="cpu"
        )


def test_a_probe_alone_is_a_run(tmp_path: Path) -> None:
    probe = ("train.parts=heads", "train.probe=true", "train.epochs=0")
    run = train_run(config(*DIGITS, *CUT, *probe), tmp_path / "run", device="cpu")
    top1 = [score.top1 for score in evaluate_run(run, device="cpu").exits["test"]]
    assert len(top1) == 3 and max(top1) > 0.15
    with pytest.raises(ValueError, match="train.epochs must be 1 or more; 0 is for heads that are linear probes"):
        config("train.epochs=0")


def test_norms_that_come_trained_keep_their_statistics(tmp_path: Path) -> None:
    """In the network, not in its new heads; scale and shift are trained."""
    alone = ("model.name=timm/test_resnet", "model.overrides={exits=1}")
    single = train_run(config(*DIGITS, *alone), tmp_path / "single", device="cpu")
    cut = ("model.name=timm/test_resnet", "model.overrides={exits=3, head='conv'}")
    given = config(*DIGITS, *cut, f"model.pretrained='{single}'", "train.freeze_norms=true")
    run = train_run(given, tmp_path / "run", device="cpu")
    before, after = (load_model(folder).state_dict() for folder in (single, run))
    fresh = create_model("timm/test_resnet", 10, exits=3, head="conv").state_dict()
    statistics = [name for name in after if name.endswith(("running_mean", "running_var"))]
    kept = [name for name in statistics if not name.startswith("heads.")]
    assert kept and all(torch.equal(before[name], after[name]) for name in kept)
    heads = [name for name in statistics if name not in kept]
    assert heads and not any(torch.equal(fresh[name], after[name]) for name in heads)
    assert not torch.equal(before["backbone.layer1.0.bn1.weight"], after["backbone.layer1.0.bn1.weight"])
    assert same_weights(run, resumed(given, run, tmp_path / "again"))
    with pytest.raises(ValueError, match="train.freeze_norms keeps statistics that a network has learned"):
        train_run(config(*DIGITS, *CUT, "train.freeze_norms=true"), tmp_path / "none", device="cpu")
    assert not (tmp_path / "none").exists()


def test_a_cascade_of_finished_runs_needs_no_training(tmp_path: Path) -> None:
    """And it does not need them any more."""
    alone = ("model.name=timm/test_resnet", "model.overrides={exits=1}")
    for seed in (0, 1):
        train_run(config(*DIGITS, *alone, f"seed={seed}"), tmp_path / f"run{seed}", device="cpu")
    of_run = "{{name='timm/test_resnet', overrides={{exits=1}}, pretrained='{}'}}"
    members = ", ".join(of_run.format(tmp_path / f"run{seed}") for seed in (0, 1))
    put = (
        "model.name=cascade",
        f"model.overrides={{members=[{members}], image_sizes=[24, 32], carry=1.0}}",
        "train.epochs=0",
        "train.probe=true",  # as in the recipe for photos: heads that come trained are not new
        "train.batch=4096",
    )
    run = train_run(config(*DIGITS, *put), tmp_path / "cascade", device="cpu")
    first = load_model(tmp_path / "run0").state_dict()
    for seed in (0, 1):
        (tmp_path / f"run{seed}").rename(tmp_path / f"gone{seed}")
    found = load_model(run)
    assert all(torch.equal(found.state_dict()[f"members.0.{name}"], tensor) for name, tensor in first.items())
    assert found.spec is not None and "gone" not in str(found.spec) and "pretrained" not in str(found.spec)
    evaluate_run(run, device="cpu")
    calibrate_run(run, PolicyRequest(q=0.5))
    bundle = load_bundle(export_run(run, tmp_path / "bundle", format="torch"))
    assert bundle(np.zeros((2, 32, 32, 3), np.uint8)).labels.shape == (2,)
    with pytest.raises(ValueError, match="for cascades of networks that are trained already"):
        config(*DIGITS, *put[:1], "train.epochs=0")
