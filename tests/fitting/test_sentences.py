"""What `fit` says at the end, and when it does not ship what was chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from offramp.fitting import sentences
from offramp.fitting.plan import Member, Plan
from offramp.measuring.calibrate import PolicyRequest

HELD_OUT = Plan((Member("timm/a", 192, 1e8),), ("single",), True, 5, 8, 1, 0, "fifth", 1200.0, 50.0)
BY_FOLDS = replace(HELD_OUT, tuned_folds=5)


def test_what_ships_is_worth_its_while() -> None:
    """What is no faster, or promises nothing, is not shipped; what keeps to a budget is."""

    def said(mul_adds: float, ms: float, **asked: float) -> str | None:
        speed = sentences.Speed(mul_adds, ms, reference_mul_adds=100, reference_ms=10)
        seen = 400, 0.9, (0.866, 0.928)
        return sentences.brings_nothing(PolicyRequest(**asked), "cascade", "small, then large", speed, *seen)

    assert said(40, 6) is None and said(40, 9.5) is None and said(40, 6, risk=0.1) is None
    assert said(40, 9.6) == (
        "the cascade small, then large (90.0 % of 400 held-out images right, 86.6 to 92.8 %) needs 60 % fewer mul-adds "
        "and is no faster on this machine"
    )
    assert said(120, 9, risk=0.1) == "of nothing cheaper could that be promised on 400 held-out images"
    assert said(40, 12, budget_mul_adds=50) is None and said(40, 12, budget_ms=11) is None


def test_sentences_at_the_end() -> None:
    tested = sentences.Tested(0.9, (0.88, 0.92), 713, 1e8, 0.91, (0.89, 0.93), 1.0, (-0.5, 2.5))
    speed = sentences.Speed(1e8, 2.0, 2e8, 4.0)

    def said(*one: str, why: str | None = None) -> str:
        return sentences.final_sentence(tested, speed, *one, "large", Path("out/bundle"), why)

    assert "out/bundle, a cascade (both), has 90.0 % of 713" in said("cascade", "both", why="doubted")
    assert "2 times as fast as the single network large (4 ms, 91.0 % right, 89.0 to 93.0 %)" in said("cascade", "both")
    assert "the plain network small, which neither cascades nor exits could beat, has" in said("single", "small")
    assert "the plain network small (614 are too few), has" in said("single", "small", why="614 are too few")
    assert "itself (nothing cheaper was good enough for what was asked)" in said("single", "large")
    asked = sentences.final_sentence(tested, speed, "single", "small", "large", Path("b"), None, in_mul_adds=True)
    assert "and takes 100.00M mul-adds and 2 ms per image" in asked and "mul-adds" not in said("single", "small")
    few = sentences.needed_words(1234, 614, HELD_OUT)
    assert (
        "614 held-out images are too few" in few
        and "about 1,300 (of 6,200 photos to learn from) are needed, or --anyway" in few
    )
    assert "about 1,300 are needed, or --anyway" in sentences.needed_words(1234, 614, BY_FOLDS)
    assert "more than the 5 ms that were asked for, as its later stages see" in sentences.over_budget(6, 5, batch=16)
    assert sentences.slower_than_planned(1000, 900) is None and "16 minutes where" not in str(
        sentences.slower_than_planned(1000, 900)
    )
    assert "training took 30 minutes where about 20 minutes were planned" in str(
        sentences.slower_than_planned(1800, 1200)
    )
