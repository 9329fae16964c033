"""Confidence measures with known answers, extreme logits, and temperatures that can be recovered."""

from __future__ import annotations

import numpy as np
import pytest

from offramp.measuring.confidence import MEASURES, Predictions, confidences, fit_temperatures, predicted_classes

LOG = np.log(np.array([[[0.7, 0.2, 0.1], [0.4, 0.4, 0.2]]], np.float32))  # one exit, two samples, three classes


def test_measures_of_known_probabilities() -> None:
    np.testing.assert_allclose(confidences(LOG, "max_softmax"), [[0.7, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(confidences(LOG, "margin"), [[0.5, 0.0]], atol=1e-6)
    entropy = [-(p * np.log(p)).sum() for p in ([0.7, 0.2, 0.1], [0.4, 0.4, 0.2]) for p in [np.array(p)]]
    np.testing.assert_allclose(confidences(LOG, "entropy"), [1 - np.array(entropy) / np.log(3)], rtol=1e-5)


@pytest.mark.parametrize("measure", sorted(MEASURES))
def test_extreme_logits_give_confidences_between_zero_and_one(measure: str) -> None:
    logits = np.array([[[3e38, -3e38, 0], [1e4, 0, 0], [0, 0, 0], [200, 199.99999, 0]]], np.float32)
    found = confidences(logits, measure)
    assert found.dtype == np.float32 and np.isfinite(found).all()
    assert (found >= 0).all() and (found <= 1).all()
    assert found[0, 0] == found[0, 1] == 1
    assert found[0, 2] == pytest.approx(1 / 3 if measure == "max_softmax" else 0, abs=1e-6)


@pytest.mark.parametrize("measure", sorted(MEASURES))
def test_chunks_do_not_matter(measure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 57, 10)).astype(np.float32)
    whole = confidences(logits, measure)
    monkeypatch.setattr("offramp.measuring.confidence.CHUNK", 100)
    np.testing.assert_array_equal(confidences(logits, measure), whole)


def test_a_temperature_softens_and_keeps_the_answers() -> None:
    warm, cold = confidences(LOG, temperatures=[4.0]), confidences(LOG, temperatures=[0.25])
    assert warm[0, 0] < 0.7 < cold[0, 0]
    powers = np.array([0.7, 0.2, 0.1]) ** 0.25
    assert warm[0, 0] == pytest.approx(powers[0] / powers.sum(), rel=1e-5)


def test_fitted_temperatures_are_those_the_labels_were_drawn_with() -> None:
    draw = np.random.default_rng(0)
    true = np.array([0.5, 1.0, 3.0])
    logits = draw.normal(size=(3, 20_000, 5)) * 2
    labels = np.empty((3, 20_000), np.int64)
    for k in range(3):
        scaled = logits[k] / true[k]
        labels[k] = (scaled + draw.gumbel(size=scaled.shape)).argmax(-1)  # labels drawn from that softmax
    found = [fit_temperatures(logits[k : k + 1].astype(np.float32), labels[k])[0] for k in range(3)]
    np.testing.assert_allclose(found, true, rtol=0.05)


def test_temperatures_are_the_best_there_are() -> None:
    """Also where Newton's own steps would jump to and fro."""
    draw = np.random.default_rng(0)
    for gap, share, classes in ((18.21, 0.75, 1000), (30.0, 0.5, 10), (5.0, 0.99, 3), (0.5, 0.34, 3)):
        labels = draw.integers(0, classes, 400)
        answered = np.where(np.arange(400) < share * 400, labels, (labels + 1) % classes)
        logits = np.zeros((1, 400, classes), np.float32)
        logits[0, np.arange(400), answered] = gap
        found = fit_temperatures(logits, labels)[0]
        grid = np.geomspace(0.05, 20, 4000)
        chance = np.log(np.exp(gap / grid) + classes - 1)
        loss = chance - share * gap / grid
        assert found == pytest.approx(grid[loss.argmin()], rel=5e-3)


def test_a_network_that_is_always_right_gets_the_coldest_temperature_and_random_labels_the_hottest() -> None:
    logits = np.eye(4, dtype=np.float32)[None].repeat(50, 1) * 3
    labels = np.tile(np.arange(4), 50)
    always = np.eye(4, dtype=np.float32)[labels][None]
    assert fit_temperatures(always, labels) == (pytest.approx(0.05),)
    assert fit_temperatures(logits[:, : len(labels)], (labels + 1) % 4)[0] == pytest.approx(20.0)


def test_answers_know_what_is_right() -> None:
    found = Predictions.of(LOG, np.array([0, 2]))
    assert found.right.tolist() == [[True, False]]
    assert (found.num_exits, found.samples) == (1, 2)
    assert found.rows(np.array([1])).right.tolist() == [[False]]
    assert predicted_classes(LOG)[0, 0] == 0


def test_bad_input_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="'max_sofmax' is unknown; did you mean 'max_softmax'"):
        confidences(LOG, "max_sofmax")
    with pytest.raises(ValueError, match="at least two classes"):
        confidences(np.zeros((1, 3, 1), np.float32))
    for bad in (np.nan, np.inf, -np.inf):
        broken = LOG.copy()
        broken[0, 1, 1] = bad
        for call in (confidences, predicted_classes):
            with pytest.raises(ValueError, match="exit 1 has logits that are not finite"):
                call(broken)
