"""`plan.json`: the plan of an earlier call, and what that call was asked and saw, so that this one goes on with it.

What is wanted of the networks (a budget, a drop) is no part of it: networks that are trained serve every wish, except
that a promise needs some that have not seen the held-out photos. Where photos to learn from have changed, nothing can
be gone on with; where photos to test on have, only what was answered to them is computed again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from offramp.common.console import say
from offramp.common.files import read_json, short_digest, write_json
from offramp.data.listing import FileSplit
from offramp.fitting.plan import Plan
from offramp.runs.outputs import EVAL

PLAN = "plan.json"
CHANGED = {
    "data": "photos to learn from",
    "photos": "photos to learn from",
    "backbones": "options (--backbone)",
    "settings": "options (--set)",
    "time": "options (--time)",
    "quick": "options (--quick)",
    "device": "devices",
}


def digest_of(splits: Iterable[FileSplit], root: Path) -> str:
    """A digest of files: their labels, paths, lengths and times."""
    return short_digest(
        f"{label} {path.relative_to(root).as_posix()} {_version(path)}"
        for split in splits
        for path, label in sorted(zip(split.paths, split.labels.tolist(), strict=True))
    )


def _version(path: Path) -> str:
    """When a file was last changed, and its length; empty for one that is not there."""
    try:
        about = path.stat()
    except OSError:
        return ""
    return f"{about.st_size} {about.st_mtime_ns}"


def known_plan(out: Path, key: Mapping[str, Any], tested: str, promise: bool) -> Plan | None:
    """The plan of an earlier call, if there is one; a sentence if this call needs another.

    `tested` is the digest of the photos to test on. A call that names no time goes on with any.
    """
    if not (out / PLAN).is_file():
        return None
    known = read_json(out / PLAN)
    before, plan = known["key"], Plan.from_json(known["plan"])
    for name, now in key.items():
        if before.get(name, now) != now and not (name == "time" and now is None):
            raise ValueError(
                f"{out} was begun with other {CHANGED[name]}; go on with the same command, or choose a new --out"
            )
    if promise and (plan.folds or plan.tuned_folds):
        raise ValueError(
            f"the networks in {out} were trained on all photos and judged by folds, which gives estimates; a promise "
            "needs some that have not seen the held-out photos: choose a new --out for --risk"
        )
    if known.get("tested", tested) != tested:
        forget_tested(out)
    keep_plan(out, {**key, **before}, tested, plan)
    return plan


def keep_plan(out: Path, key: Mapping[str, Any], tested: str, plan: Plan) -> None:
    """Write it down for later calls."""
    write_json(out / PLAN, {"schema": 1, "key": key, "tested": tested, "plan": plan.to_json()})


def forget_tested(out: Path) -> None:
    """Remove what the networks answered to other test photos; training is left alone."""
    say("the test photos have changed: what is answered to them is computed again")
    for features in out.glob("features/*/test.npz"):
        features.unlink()
    for answers in out.glob(f"networks/*/{EVAL}"):
        shutil.rmtree(answers)
