"""One command from a folder of photos to a bundle and a report, and again from where it stopped."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm

import offramp.fitting.fit as fitting
import offramp.fitting.networks as networks
import offramp.fitting.shipping as shipping
from helpers.runs import SMALL_RUN, call
from offramp import evaluate_run, load_bundle
from offramp.common.signals import Stopped
from offramp.fitting.candidates import reference_of, write_candidate
from offramp.fitting.choice import Choice
from offramp.fitting.features import answers, fitted
from offramp.fitting.fit import stopped_in_own_words
from offramp.fitting.fitted import replace_bundle
from offramp.fitting.kept_plan import keep_plan, known_plan
from offramp.fitting.plan import Member, Plan
from offramp.fitting.recipes import recipe_config
from offramp.fitting.saved import is_written
from offramp.fitting.starting import chosen_backbones, starting_config
from offramp.fitting.timing import Turns
from offramp.measuring.confidence import Predictions
from offramp.measuring.policy import outcome, read_policies
from offramp.models.weights import write_tensors
from offramp.running.labelled import evaluate_bundle, images_of_folder
from offramp.runs.folder import read_config
from offramp.runs.outputs import read_outputs
from offramp.runs.recipe import load_recipe

TINY = ("--backbone", "timm/test_efficientnet", "--set", "model.pretrained=false", "--set", "data.workers=0")
SIZES = ("--set", "model.overrides.image_size=64", "--set", "model.overrides.exits=2", "--format", "torch")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def files_of(out: Path, only: str = "") -> dict[str, int]:
    """When everything that was trained, and every array, was written; or only some files."""
    if only:
        return {str(path): path.stat().st_mtime_ns for path in out.glob(only)}
    runs = [path for path in out.glob("networks/*") if path.name in ("frozen", "tuned", "frozen-exits", "tuned-exits")]
    trained = [path for run in runs for path in (run / "model.safetensors", *run.glob("eval/*.json"))]
    kept = [*trained, *out.glob("features/*/*.npz")]
    return {str(path): path.stat().st_mtime_ns for path in kept}


def test_from_photos_to_a_bundle_and_again(
    tmp_path: Path,
    image_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    images, out = image_folder(classes=3, train=20, val=8), tmp_path / "fitted"
    assert call(monkeypatch, "fit", images, "--out", out, *TINY, *SIZES) == 0
    said = capsys.readouterr().out
    assert "84 images of 3 classes, 20 of each to learn from" in said and "warning: 24 test images" in said
    assert (
        "test_efficientnet at 32 and 64 pixels; frozen features with linear heads, judged by 5-fold cross-validation"
        in said
    )
    assert "about 1 minute" in said and "choosing on 60 held-out images" in said
    found = read(out / "fit.json")
    assert said.rstrip().endswith(found["sentence"])  # the last thing that is said
    assert (found["folder"], found["unit"], found["held_out"]["samples"]) == ("images", "mul_adds", 60)
    assert [family["family"] for family in found["families"]] == ["single", "single", "cascade", "cascade", "exits"]
    for family in found["families"]:
        assert (out / family["run"] / "eval/calibration/logits.npy").is_file()
        for point in family["points"]:
            assert point["interval"][0] <= point["top1"] <= point["interval"][1] + 1e-9 and point["mul_adds"] > 0
    assert len(found["families"][0]["points"]) == 1 < len(found["families"][2]["points"])
    chosen = next(f for f in found["families"] if f["name"] == found["chosen"]["name"])
    assert chosen["run"] == found["chosen"]["run"] and found["chosen"]["point"] < len(chosen["points"])
    assert found["test"]["samples"] == 24 and len(found["warnings"]) == 1
    assert (out / "report.html").is_file()

    bundle = load_bundle(out / "bundle")
    assert bundle.classes == ("class0", "class1", "class2")
    score = evaluate_bundle(bundle, images_of_folder(bundle, images, "test"))  # the same images, really leaving
    assert score.policy.top1 == pytest.approx(found["test"]["top1"]) and score.samples == 24
    assert score.policy.cost == pytest.approx(found["test"]["mul_adds"])
    assert f"{100 * score.policy.top1:.1f} % of 24 test images right (95 % interval" in found["sentence"]

    before = files_of(out)
    smallest = min(point["mul_adds"] for point in found["families"][1]["points"])
    assert call(monkeypatch, "fit", images, "--out", out, "--budget", f"{smallest:.0f}", *TINY, *SIZES) == 0
    assert files_of(out) == before  # neither trained nor evaluated again
    asked = read(out / "fit.json")
    assert asked["chosen"]["family"] in ("single", "cascade") and asked["test"]["mul_adds"] <= smallest * 1.001
    sentence = asked["sentence"]
    reference = "the single network test_efficientnet at 64 px"
    assert re.search(
        rf"takes [\d.]+M mul-adds and [\d.]+ ms per image on this machine, [\d.]+ times as fast as {reference}",
        sentence,
    )

    words = ("--budget-ms", "1000", "--threads", "1", "--batch", "2")
    assert call(monkeypatch, "fit", images, "--out", out, *words, *TINY, *SIZES) == 0
    assert files_of(out) == before
    timed = read(out / "fit.json")
    assert timed["unit"] == "ms" and all(p["ms"] > 0 for family in timed["families"] for p in family["points"])
    assert "1000 ms per image on this machine" in timed["asked"] and "2 images at a time" in timed["test"]["timed_with"]
    assert timed["test"]["ms"] > 0 and timed["test"]["reference_ms"] > 0
    capsys.readouterr()

    assert call(monkeypatch, "predict", out / "bundle", images / "val") == 0
    assert call(monkeypatch, "fit", images, "--out", out, *TINY, *SIZES, "--quick") == 2
    assert "was begun with other options (--quick)" in capsys.readouterr().err
    assert call(monkeypatch, "fit", images, "--out", out, *TINY, *SIZES, "--risk", "0.1") == 2
    assert "judged by folds, which gives estimates; a promise needs some" in capsys.readouterr().err
    for label in range(3):
        shutil.copy(images / f"train/class{label}/train000.png", images / f"train/class{label}/x.png")
    assert call(monkeypatch, "fit", images, "--out", out, *TINY, *SIZES) == 2
    assert "was begun with other photos to learn from" in capsys.readouterr().err


@pytest.mark.slow
def test_other_test_photos_are_answered_anew(
    tmp_path: Path,
    image_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A changed test folder changes the accuracy and nothing else; one photo that cannot be read is passed over."""
    images, out = image_folder(classes=2, train=12, val=4), tmp_path / "fitted"
    command = ("fit", images, "--out", out, *TINY, "--set", "model.overrides.image_size=32", "--format", "torch")
    command = (*command, "--set", "data.max_pixels=3000", "--set", "model.overrides.exits=2")
    assert call(monkeypatch, *command) == 0
    first, trained = read(out / "fit.json"), files_of(out, "features/*/train.npz")
    assert first["test"]["top1"] > 0.9
    for own, other in (("class0", "class1"), ("class1", "class0")):
        for number in range(4):
            shutil.copy(images / f"train/{other}/train00{number}.png", images / f"val/{own}/val00{number}.png")
    (images / "val/class0/val000.png").write_bytes(b"no photo")
    capsys.readouterr()
    assert call(monkeypatch, *command) == 0
    assert "the test photos have changed" in capsys.readouterr().out
    second = read(out / "fit.json")
    assert second["test"]["top1"] < 0.1 and second["test"]["samples"] == 7
    assert second["families"] == first["families"] and files_of(out, "features/*/train.npz") == trained
    assert call(monkeypatch, *command) == 0
    said = capsys.readouterr().out
    assert "have changed" not in said and "all networks are trained already" in said
    (images / "train/class0/train000.png").write_bytes((images / "train/class0/train001.png").read_bytes())
    assert call(monkeypatch, *command) == 2
    assert "was begun with other photos to learn from" in capsys.readouterr().err


def test_an_earlier_plan_serves_other_wishes(tmp_path: Path) -> None:
    """A time that is not named again, a budget, and after a promise anything; never other photos or networks."""
    member = Member("timm/a", 64, 1.0)
    plan = Plan((member,), ("single",), True, 0, 8, 1, 0, "fifth", 60.0, 10.0)
    key = {"photos": "abc", "backbones": ["timm/a"], "time": 1200.0, "quick": False, "device": "cpu"}
    assert known_plan(tmp_path, key, "t", promise=True) is None
    keep_plan(tmp_path, key, "t", plan)
    for asked in (key, {**key, "time": None}):
        assert known_plan(tmp_path, asked, "t", promise=False) == plan == known_plan(tmp_path, asked, "t", promise=True)
    for name, other, words in (
        ("photos", "abd", "photos to learn from"),
        ("time", 60.0, r"options \(--time\)"),
        ("quick", True, r"options \(--quick\)"),
        ("backbones", [], r"options \(--backbone\)"),
        ("device", "cuda", "devices"),
    ):
        with pytest.raises(ValueError, match=f"was begun with other {words}; go on with the same command"):
            known_plan(tmp_path, {**key, name: other}, "t", promise=False)
    for folds in ({"folds": 5}, {"tuned_folds": 5}):
        keep_plan(tmp_path, key, "t", replace(plan, **folds))
        with pytest.raises(ValueError, match="a promise needs some that have not seen the held-out photos"):
            known_plan(tmp_path, key, "t", promise=True)
    earlier = {"schema": 1, "key": {"backbones": ["timm/a"], "time": None, "promise": True}, "plan": plan.to_json()}
    (tmp_path / "plan.json").write_text(json.dumps(earlier))  # as 0.2.0 left it
    assert known_plan(tmp_path, {**key, "time": None}, "t", promise=False) == plan
    assert read(tmp_path / "plan.json")["tested"] == "t" and read(tmp_path / "plan.json")["key"]["photos"] == "abc"


def test_fine_tuning_shares_one_run(
    tmp_path: Path,
    image_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Singles and cascades come apart from one run, exits start from the single network, all of it by folds.

    Stopped before the answers of the folds are put together, the same command goes on.
    """
    images, out = image_folder(classes=2, train=10, val=5), tmp_path / "fitted"
    epochs = ("--set", "train.epochs=1", "--set", "train.batch=8", "--set", "data.augmentation=device-crop", "--anyway")
    params = tmp_path / "params.safetensors"
    write_tensors(params, timm.create_model("test_efficientnet").state_dict())
    own = ("--backbone", "timm/test_efficientnet", "--set", f"model.pretrained={params}", "--set", "data.workers=0")
    put_together = networks._add_held_out
    monkeypatch.setattr("offramp.fitting.plan.FOLDS", 2)
    monkeypatch.setattr(networks, "_add_held_out", interrupted)
    assert call(monkeypatch, "fit", images, "--out", out, *own, *SIZES, *epochs) == 130
    assert not is_written(out / "networks/tuned") and is_written(out / "folds/2/tuned-exits")
    monkeypatch.setattr(networks, "_add_held_out", put_together)
    capsys.readouterr()
    assert call(monkeypatch, "fit", images, "--out", out, *own, *SIZES, *epochs) == 0
    said = capsys.readouterr().out
    assert "then 1 epoch of fine-tuning, 1 more for the exits, 2 times on a part for cross-validation" in said
    assert "splits: 20 to learn from and, by turns, to choose on, 10 kept for the test" in said and "fold 1" not in said
    assert read(out / "fit.json")["held_out"]["samples"] == 20
    families = read(out / "fit.json")["families"]
    names = [family["name"] for family in families]
    at = "test_efficientnet at"
    assert {f"{at} 64 px", f"{at} 32 px", f"{at} 64 px, frozen features"} <= set(names) and "at 64 px" in names[0]
    assert f"{at} 32 px, then {at} 64 px, logits summed" in names and f"exits on {at} 64 px" in names
    pool = read_config(out / "networks/tuned")
    assert pool.model.name == "cascade" and pool.data.calibration == 0
    assert read_config(out / "folds/2/tuned").data.options == {"folds": 2, "fold": 2}
    assert pool.objective.name == "distillation" and pool.train.epochs == 1
    members = pool.model.overrides["members"]  # not the frozen networks, which have seen what is held out here
    assert [member["pretrained"] for member in members] == [str(params)] * 2
    assert pool.train.probe and pool.train.freeze_norms
    exits = read_config(out / "networks/tuned-exits")
    assert str(exits.model.pretrained).endswith("networks/start") and exits.objective.name == "cross_entropy"


def interrupted(*args: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("folds", [True, False])
def test_what_is_put_together_answers_as_it_was_judged(
    folds: bool, tmp_path: Path, image_folder: Callable[..., Path]
) -> None:
    """Every network of a pool, written as a run of its own and evaluated, says what followed from the pool's logits."""
    images = image_folder(classes=2, train=20, val=5)
    name = "timm/test_efficientnet"
    config = starting_config(images, (name,), ("model.pretrained=false", "data.workers=0"))
    config = replace(config, model=replace(config.model, num_classes=2))
    members = tuple(Member(name, size, float(size**2)) for size in (32, 64, 96))
    plan = Plan(members, ("single", "cascade"), True, 5 if folds else 0, 0, 0, 0, "fifth", 0.0, 1.0)
    cpu = networks.torch.device("cpu")
    found = networks.train_networks(plan, config, tmp_path / "out", cpu)
    assert [one.family for one in found] == ["single"] * 3 + ["cascade"] * 6
    assert reference_of(found) is found[0]
    for one in found:
        trained = read_config(one.run)
        write_candidate(one, trained, networks.read_data(trained), cpu)
        before = read_outputs(one.folder, "test").logits.copy()
        again = evaluate_run(one.folder, device="cpu")
        assert again.costs == one.costs and len(again.costs) == len(one.stages or ())
        np.testing.assert_allclose(read_outputs(one.folder, "test").logits, before, atol=2e-4)
        if one.family == "cascade" or one is found[0]:  # a smaller single network reads its images otherwise
            np.testing.assert_allclose(before, one.said("test").logits, atol=2e-4)


def test_one_network_is_a_bundle_like_any_other(
    tmp_path: Path,
    image_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A plain network has one exit: everybody leaves there, in every verb."""
    images, out = image_folder(classes=2, train=12, val=4), tmp_path / "fitted"
    assert call(monkeypatch, "fit", images, "--out", out, *TINY, "--quick") == 0
    found = read(out / "fit.json")
    assert [family["family"] for family in found["families"]] == ["single"] and found["chosen"]["point"] == 0
    assert "the single network test_efficientnet at 32 px itself" in found["sentence"]
    assert len(load_bundle(out / "bundle").costs) == 1
    capsys.readouterr()
    assert call(monkeypatch, "predict", out / "bundle", images / "val", "--json") == 0
    assert json.loads(capsys.readouterr().out)["shares"] == [1.0]
    assert call(monkeypatch, "eval", out / "bundle", "--data", "imagefolder", "--data-dir", images) == 0
    assert call(monkeypatch, "report", out / found["chosen"]["run"], "--out", tmp_path / "again.html") == 0
    assert call(monkeypatch, "calibrate", out / found["chosen"]["run"]) == 0
    assert call(monkeypatch, "bench", "infer", out / "bundle", "--batch", "1", "--repeats", "1") == 0


def test_held_out_images_are_judged_by_networks_that_have_not_seen_them(
    tmp_path: Path, image_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With labels that mean nothing, a head knows what it was fitted to by heart, and of the rest nothing."""
    draw = np.random.default_rng(0)
    features, labels = draw.normal(size=(200, 300)).astype(np.float32), draw.integers(0, 4, 200)
    folds = np.arange(200) % 5 + 1
    head = fitted(features, labels, folds, 4)
    assert (answers(head, features).argmax(1) == labels).mean() > 0.95
    assert (answers(head, features, folds).argmax(1) == labels).mean() < 0.4


def test_whole_networks_by_folds(tmp_path: Path, image_folder: Callable[..., Path]) -> None:
    """Each image is judged by the network of its fold; what is shipped was trained on all of them."""
    images = image_folder(classes=2, train=12, val=4)
    settings = ("model.pretrained=false", "data.workers=0", "train.batch=4")
    config = starting_config(images, ("timm/test_efficientnet",), settings)
    member = Member("timm/test_efficientnet", 32, 1.0)
    plan = Plan((member,), ("single",), False, 0, 1, 1, 2, "fifth", 0.0, 1.0)
    (found,) = networks.train_networks(plan, config, tmp_path / "out", networks.torch.device("cpu"))
    held = read_outputs(found.run, "calibration")
    assert sorted(held.index.tolist()) == list(range(24))
    for fold in (1, 2):
        own = read_outputs(tmp_path / f"out/folds/{fold}/tuned", "calibration")
        rows = np.searchsorted(held.index, own.index)
        assert len(rows) == 12 and np.array_equal(held.logits[:, rows], own.logits)
        assert not (tmp_path / f"out/folds/{fold}/tuned/eval/test").exists()  # nobody asks for that
    assert len(read_outputs(found.run, "test").labels) == 8
    assert read_config(found.run).data.calibration == 0


def test_backbones() -> None:
    """One, two, or those whose params are here."""
    assert chosen_backbones(None, ()) == ("timm/tf_efficientnet_lite0", "timm/tf_efficientnet_lite2")
    assert chosen_backbones(None, ("model.pretrained=false",)) == chosen_backbones(None, ())
    assert chosen_backbones("timm/resnet18, timm/resnet50", ()) == ("timm/resnet18", "timm/resnet50")
    assert chosen_backbones(None, ("model.name=timm/resnet18",)) == ("timm/resnet18",)
    assert chosen_backbones(None, ("model.pretrained=some.safetensors",)) == ("timm/tf_efficientnet_lite0",)
    for asked, settings, sentence in (
        ("timm/resnet18", ("model.name=timm/resnet34",), "name two networks; leave one out"),
        ("timm/a,timm/b,timm/c", (), "takes one network, or two with a comma"),
        ("timm/resnet18,timm/resnet34", ("model.pretrained=some.pth",), "a file of params is for one network"),
    ):
        with pytest.raises(ValueError, match=sentence):
            chosen_backbones(asked, settings)


@pytest.mark.slow
def test_a_promise(tmp_path: Path, image_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is about one network, so a fifth of the images is held out of its training, and nothing is done by folds."""
    images, out = image_folder(classes=2, train=100, val=5), tmp_path / "promised"
    monkeypatch.setattr(shipping, "by_turns", lambda *args: Turns(1.0, 2.0, 3.0))
    asked = ("--risk", "0.3", "--probability", "0.8")
    assert call(monkeypatch, "fit", images, "--out", out, *asked, *TINY, *SIZES) == 0
    found = read(out / "fit.json")
    assert found["held_out"] == {"samples": 40, "folds": 0} and "with probability 0.8" in found["asked"]
    assert found["chosen"]["family"] != "single" and "summed" not in found["chosen"]["name"]
    policy = read_policies(out / found["chosen"]["run"] / "policy.json").policy
    assert policy.promise is not None and (policy.promise.risk, policy.promise.samples) == (0.3, 20)
    assert policy.mul_adds < found["reference"]["mul_adds"] and policy.promise.lost < 6

    nothing = ("--risk", "0.01", "--probability", "0.99")  # that twenty images can certify; the same networks serve it
    assert call(monkeypatch, "fit", images, "--out", out, *nothing, *TINY, *SIZES) == 0
    found = read(out / "fit.json")
    assert found["chosen"]["family"] == "single" and found["drop"]["points"] == 0
    assert "itself (of nothing cheaper could that be promised on 40 held-out images)" in found["sentence"]
    monkeypatch.setattr(fitting, "choose", lambda *args: Choice(2, 0, 0.0, (0.0, 1.0)))  # what certifies nothing
    assert call(monkeypatch, "fit", images, "--out", out, *nothing, *TINY, *SIZES) == 0
    again = read(out / "fit.json")
    assert again["chosen"] == found["chosen"] and again["sentence"].split(" takes ")[0] in found["sentence"]


def test_stopped_it_says_how_to_go_on(
    tmp_path: Path,
    image_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    images, out = image_folder(classes=2, train=10, val=3), tmp_path / "fitted"
    real, calls = networks.extract, []

    def interrupted(*args: Any) -> None:
        calls.append(args[2])
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(*args)

    words = ("fit", images, "--out", out, *TINY, "--quick", "--format", "torch")
    monkeypatch.setattr(networks, "extract", interrupted)
    assert call(monkeypatch, *words) == 130
    said = capsys.readouterr().err
    assert "the same command goes on from there: offramp fit" in said and "--resume" not in said
    kept = out / "features/test_efficientnet-at-32-px/train.npz"
    written = kept.stat().st_mtime_ns
    monkeypatch.setattr(networks, "extract", real)
    assert call(monkeypatch, *words) == 0 and kept.stat().st_mtime_ns == written
    with pytest.raises(Stopped, match="the same command goes on") as stopped, stopped_in_own_words(out):
        raise Stopped(15, "stopped at step 3, saved; go on with the same command and --resume")
    assert stopped.value.signum == 15 and "--resume" not in str(stopped.value)
    monkeypatch.setattr(sys, "argv", ["my_script.py", "--secret"])  # from Python
    with pytest.raises(Stopped, match="and the same call goes on from there$"), stopped_in_own_words(out):
        raise KeyboardInterrupt


def test_a_recipe_is_trained_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for setting in SMALL_RUN for word in ("--set", setting)]
    out = tmp_path / "fitted"
    assert call(monkeypatch, "fit", "digits-learned", "--out", out, *words) == 0
    said = capsys.readouterr().out
    assert "calibration" in said and "test images right (95 % interval " in said
    weights = (out / "run/model.safetensors").read_bytes()
    bundle = load_bundle(out / "bundle")
    budget = (bundle.costs[0] + bundle.costs[1]) / 2
    assert call(monkeypatch, "fit", "digits-learned", "--out", out, "--budget", f"{budget:.0f}", *words) == 0
    assert (out / "run/model.safetensors").read_bytes() == weights
    policies, saved = load_bundle(out / "bundle").policies, read_outputs(out / "run", "test")
    assert policies.policy.mul_adds <= budget
    tested = outcome(Predictions.of(saved.logits, saved.labels), policies.policy.thresholds, policies.costs)
    assert f"has {100 * tested.top1:.1f} % of 60 test images right" in capsys.readouterr().out.replace("\n", " ")
    assert call(monkeypatch, "fit", "digits-learned", "--out", out, "--quick", *words) == 2
    assert "for folders of photos, not for recipes" in capsys.readouterr().err
    assert call(monkeypatch, "fit", "digits-learned", "--out", tmp_path / "new", "--budget", "1k", *words) == 2
    assert "the network is msdnet-tiny, which takes" in capsys.readouterr().err


def test_mistakes_are_told_before_anything_is_trained(
    tmp_path: Path,
    image_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    images, new = image_folder(classes=2, train=10, val=2), tmp_path / "new"
    (tmp_path / "fitted/bundle").mkdir(parents=True)
    (tmp_path / "fitted/bundle/precious.txt").write_text("mine")
    for words, sentence in (
        (("--out", tmp_path / "fitted"), "is not a bundle"),
        (("--out", new, "--format", "onxn"), "did you mean 'onnx'"),
        (("--out", new, "--time", "soon"), "--time must be a time such as 20m"),
        (("--out", new, "--batch", "0"), "--batch must be 1 or more"),
        (("--out", new, "--budget", "1M", "--risk", "0.1"), "ask for one thing at a time"),
        (("--out", new, "--backbone", "resnet18"), "timm/resnet18 or torchvision/resnet18"),
        (("--out", new, "--backbone", "timm/resnet1"), "resnet1"),
        (("--out", new, "--set", "data.calibration=0"), "a choice needs images held out"),
        (("--out", new, *TINY, "--budget", "10"), "below what the network costs at 32 pixels"),
        (("--out", images / "fitted"), "lies inside"),
    ):
        assert call(monkeypatch, "fit", images, *words) == 2
        assert sentence in capsys.readouterr().err, words
    assert (tmp_path / "fitted/bundle/precious.txt").is_file() and not new.exists()
    for name in ("single", "single.new", "bundle.new"):
        other = tmp_path / name.replace(".", "-") / name
        other.mkdir(parents=True)
        assert call(monkeypatch, "fit", images, "--out", other.parent) == 2
        assert f"{name} is there and is not a bundle" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(ValueError, match="single is there and is not a bundle"):
        replace_bundle(tmp_path, tmp_path / "single/single", None)
    with pytest.raises(ValueError, match="nothing is no folder of images here, and no recipe"):
        recipe_config("nothing")
    with pytest.raises(ValueError, match="did you mean the recipe 'digits-learned'"):
        recipe_config("digits-learnd")
    assert recipe_config("digits-learned") == load_recipe("digits-learned").config
