"""Objectives: smoothing, distillation between exits and from a teacher, and their meta-gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from helpers.nets import OPTIMIZERS, Net, batch, warm_up
from helpers.runs import Config, resumed, same_weights
from helpers.training import problem_of, settings
from offramp import load_model
from offramp.data import load_dataset
from offramp.runs.config import ObjectiveConfig
from offramp.training.meta_gradient import ESTIMATORS
from offramp.training.method import Method
from offramp.training.objectives import Half, Objective, new_objective, num_terms
from offramp.training.teacher import Teacher, _trained_on_held_out, load_teacher
from offramp.training.train import train_run
from offramp.training.weighting import UniformWeighting


def objective(name: str, **options: Any) -> Objective:
    return new_objective(ObjectiveConfig(name, options))


def logits(seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(5, 3, generator=draw, dtype=torch.float64) for _ in range(3)]


LABELS = torch.tensor([0, 1, 2, 0, 1])


def kl(target: Tensor, x: Tensor, temperature: float) -> Tensor:
    p = (target / temperature).softmax(1)
    return temperature**2 * (p * (p.log() - (x / temperature).log_softmax(1))).sum(1)


def test_smoothing_is_torchs() -> None:
    found = objective("cross_entropy", label_smoothing=0.1)(logits(), Half(torch.zeros(5), LABELS))
    for k, x in enumerate(logits()):
        assert torch.equal(found[:, k], F.cross_entropy(x, LABELS, reduction="none", label_smoothing=0.1))


@pytest.mark.parametrize("source", ["last", "mean", "teacher"])
def test_distillation_is_the_formula(source: str) -> None:
    given, teacher = logits(), logits(1)[0]
    more = {"teacher": "somewhere"} if source == "teacher" else {}
    minimised = objective("distillation", source=source, share=0.3, temperature=2.0, **more)
    losses = minimised(given, Half(torch.zeros(5), LABELS, teacher))
    assert losses.shape == (5, 6) and num_terms(minimised) == 2
    target = {"last": given[-1], "mean": torch.stack(given).mean(0), "teacher": teacher}[source]
    for k, x in enumerate(given):
        plain = F.cross_entropy(x, LABELS, reduction="none")
        alone = source == "last" and k == 2
        torch.testing.assert_close(losses[:, k], 0.7 * plain)
        torch.testing.assert_close(losses[:, 3 + k], 0.3 * (plain if alone else kl(target, x, 2.0)))


def test_without_labels_the_target_is_all_there_is() -> None:
    given = [x.requires_grad_() for x in logits()]
    losses = objective("distillation", labels=False)(given, Half(torch.zeros(5), LABELS))
    other = objective("distillation", labels=False)(given, Half(torch.zeros(5), (LABELS + 1) % 3))
    assert torch.equal(losses, other) and not losses[:, -1].any() and losses[:, 0].min() > 0
    losses.sum().backward()
    assert given[0].grad is not None and not given[-1].grad.any()  # a target gets no gradient


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"source": "first"}, "source 'first' is unknown"),
        ({"share": 2.0}, "share must lie between 0 and 1"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"source": "teacher"}, "need each other"),
        ({"source": "mean", "labels": False}, "a mean alone teaches nothing"),
        ({"tempo": 1}, "options do not fit"),
    ],
)
def test_options_that_make_no_sense_are_sentences(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        objective("distillation", **options)


@pytest.mark.parametrize("source", ["last", "mean", "teacher"])
@pytest.mark.parametrize("optimizer", ["nesterov-decay", "adamw"])
def test_the_meta_gradient_is_exact_under_distillation(source: str, optimizer: str) -> None:
    torch.manual_seed(0)
    model = Net(dropout=0.2).double()
    rule = OPTIMIZERS[optimizer](model)
    warm_up(model, rule, 5)
    more = {"teacher": "somewhere"} if source == "teacher" else {}
    minimised = objective("distillation", source=source, label_smoothing=0.1, **more)
    method = Method(UniformWeighting(), settings(), minimised)
    said = torch.randn(16, 4, dtype=torch.float64)
    weights = torch.linspace(0.5, 1.5, 48, dtype=torch.float64).view(16, 3)
    given = problem_of(model, rule, Half(*batch(1), said), weights, Half(*batch(2), said), method)
    torch.manual_seed(1)  # both look ahead with the same draws
    exact = ESTIMATORS["double_backward"](given).weights_BK
    torch.manual_seed(1)
    ours = ESTIMATORS["forward_mode"](given).weights_BK
    torch.testing.assert_close(ours, exact, rtol=1e-8, atol=1e-11)
    torch.manual_seed(1)
    rough = ESTIMATORS["finite_difference"](given).weights_BK
    error = (rough - exact).norm() / exact.norm()
    assert error < 1e-4 if source == "teacher" else error > 1e-2  # differences move the target as well


def test_differences_are_refused_where_they_are_blind(tmp_path: Path, small_config: Config) -> None:
    config = small_config("objective.name=distillation", "weighting.name=learned", "weighting.engine=finite_difference")
    with pytest.raises(ValueError, match="finite_difference cannot see what Distillation does"):
        train_run(config, tmp_path / "run", device="cpu")


def test_each_seed_has_a_teacher_of_its_own(
    tmp_path: Path, small_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    teacher = train_run(small_config("train.epochs=1", "seed=1"), tmp_path / "seed-1", device="cpu")
    data = load_dataset("digits", train=64, calibration=10, test=10, seed=1)
    load_teacher(teacher, data, small_config("seed=1"))
    nothing = load_dataset("digits", train=64, calibration=0, test=10)
    load_teacher(teacher, nothing, small_config("seed=0", "data.calibration=0"))  # holds nothing out
    assert "holds out" not in caplog.text
    data = load_dataset("digits", train=64, calibration=10, test=10)
    load_teacher(teacher, data, small_config("seed=0"))
    load_teacher(teacher, data, small_config("seed=0"))
    assert caplog.text.count("was trained on images that this run holds out (its seed is 1)") == 1
    named = f"objective.options={{source='teacher', teacher='{tmp_path}/seed-{{seed}}'}}"
    student = small_config("objective.name=distillation", named, "seed=1", "train.epochs=1")
    train_run(student, tmp_path / "student", device="cpu")


def test_a_teacher_may_hold_out_more_than_its_student(image_folder: Config) -> None:
    """What counts is whether it learned from what the student holds out."""
    root = image_folder(classes=3, train=20)
    few, many = (load_dataset("imagefolder", data_dir=root, calibration=count) for count in (6, 12))
    assert _trained_on_held_out(few, many) and not _trained_on_held_out(many, few)
    assert not _trained_on_held_out(few, few)


def test_a_run_teaches_another(tmp_path: Path, small_config: Config, caplog: pytest.LogCaptureFixture) -> None:
    """A student of another kind learns from a finished run, with learned weights, and resumes bit for bit."""
    teacher = train_run(small_config(), tmp_path / "teacher", device="cpu")
    taught = (
        "objective.name=distillation",
        "objective.options={source='teacher', labels=false}",
        f"objective.options.teacher={teacher}",
        "weighting.name=learned",
    )
    run = train_run(small_config(*taught), tmp_path / "run", device="cpu")
    assert "holds out" not in caplog.text
    assert same_weights(run, resumed(small_config(*taught), run, tmp_path / "again"))
    plain = train_run(small_config(), tmp_path / "plain", device="cpu")
    assert not same_weights(run, plain)


def test_a_teacher_sees_images_as_it_knows_them(tmp_path: Path, small_config: Config) -> None:
    run = train_run(small_config("train.epochs=1"), tmp_path / "run", device="cpu")
    data = load_dataset("digits", train=64, calibration=10, test=10)
    teacher = load_teacher(run, data, small_config())
    images = next(iter(data.sweep("train", 8, torch.device("cpu")))).images
    model = load_model(run).eval()
    with torch.no_grad():
        expected = model(images)[-1]
        torch.testing.assert_close(teacher.train()(images), expected)
        mean, std = (torch.tensor(x).view(1, -1, 1, 1) for x in (data.mean, data.std))
        other = Teacher(model, (data.mean, data.std), ((0.5,) * 3, (0.25,) * 3))
        torch.testing.assert_close(other((images * std + mean - 0.5) / 0.25), expected, rtol=1e-4, atol=1e-4)
        small = F.interpolate(images, (16, 16))
        assert teacher.as_known(small).shape == images.shape
        assert torch.equal(model.last(images), expected)
    assert not any(p.requires_grad for p in teacher.parameters())
    stranger = replace_classes(data)
    with pytest.raises(ValueError, match="trained on other classes"):
        load_teacher(run, stranger, small_config())


def replace_classes(data: Any) -> Any:
    other = copy.copy(data)
    other.class_names = tuple(reversed(data.class_names))
    return other
