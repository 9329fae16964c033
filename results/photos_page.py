"""docs/results/photos.md, from what is kept in results/photos/: single networks, cascades and exits on photos."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from photos import BATCHES, HERE, INT8, KEPT, SHARED, SUMMED, TIMES

from offramp.common.files import read_json, write_bytes
from offramp.common.formatting import counted, millions, to_markdown, with_spread
from offramp.measuring.metrics import Curve
from offramp.reporting.drawing import Panels, save

PAGE = HERE.parent / "docs/results/photos.md"
BUDGETS = tuple(1e6 * m for m in (125, 150, 175, 200, 225, 250, 300, 350, 400))
DATA = {"pets": "Oxford Pets", "clothing": "Clothing"}
UNBALANCED = ("clothing",)  # where classes differ in size, so that the mean over classes tells more
Key = tuple[str, str, str]  # way, family, name
Groups = dict[Key, list["Kept"]]  # the seeds of each


@dataclass(frozen=True)
class Kept:
    """One network of one kept run."""

    run: dict[str, Any]
    network: dict[str, Any]

    @property
    def key(self) -> Key:
        return self.run["way"], self.network["family"], self.network["name"]

    def curve(self, which: str = "curve", value: int = 1) -> Curve:
        """Accuracy (1), or balanced accuracy (2), against mean cost; of what costs the same, the first."""
        found = dict(reversed([(point[0], point[value]) for point in self.network[which]]))
        costs, top1 = zip(*sorted(found.items()), strict=True)
        return Curve(costs, top1)


def read_kept(data: str) -> Groups:
    """All networks that were measured on a data set, by way, family and name, in the order of their seeds."""
    found: dict[Key, list[Kept]] = defaultdict(list)
    for path in sorted(KEPT.glob(f"{data}-*.json")):
        run = read_json(path)
        for network in run["networks"]:
            own = Kept(run, network)
            found[own.key].append(own)
    return {key: sorted(group, key=lambda one: one.run["seed"]) for key, group in found.items()}


def hull(points: Sequence[tuple[float, float]]) -> Curve:
    """The upper hull of single networks: what mixing them at random could reach."""
    best: list[tuple[float, float]] = []
    for point in dict(sorted(points)).items():  # of what costs the same, the better one
        if best and point[1] <= best[-1][1]:
            continue
        while len(best) > 1 and _slope(best[-2], point) >= _slope(best[-2], best[-1]):
            best.pop()
        best.append(point)
    costs, top1 = zip(*best, strict=True)
    return Curve(costs, top1)


def _slope(a: tuple[float, float], b: tuple[float, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])


def singles(groups: Groups, seed: int, value: str = "test") -> Curve:
    """The hull of all single networks of a seed, however they were trained."""
    own = [one for key, group in groups.items() if key[1] == "single" for one in group if one.run["seed"] == seed]
    return hull([(one.network["costs"][0], one.network[value][0]) for one in own])


def above_hull(group: Sequence[Kept], groups: Groups, budgets: Sequence[float]) -> np.ndarray:
    """Points above the hull of the single networks of the same seed, [seeds, budgets]."""
    return 100 * np.array([one.curve().at(budgets) - singles(groups, one.run["seed"]).at(budgets) for one in group])


def chosen_cascade(all_groups: Sequence[Groups], way: str) -> Key:
    """The cascade with the best mean accuracy on held-out images, over all data sets, seeds and budgets."""

    def score(key: Key) -> float:
        return float(np.mean([one.curve("held_out_curve").at(BUDGETS) for groups in all_groups for one in groups[key]]))

    everywhere = set.intersection(*(set(groups) for groups in all_groups))
    own = sorted(key for key in everywhere if key[:2] == (way, "cascade") and not key[2].endswith(SHARED))
    return max((key for key in own if all_groups[0][key][0].network["costs"][0] < BUDGETS[0]), key=score)


def stage_ms(name: str) -> dict[str, list[float]]:
    """Milliseconds per image of each stage of a network, by batch."""
    known = read_json(TIMES)["stage_ms"]
    parts = name.removesuffix(SUMMED).removesuffix(SHARED).split(" + ")
    return {str(b): [ms for part in parts for ms in known[part][str(b)]] for b in BATCHES}


def mean_ms(name: str, shares: Sequence[float], batch: int) -> float:
    """Milliseconds per image under shares that leave at each exit; with batches, as if survivors were pooled."""
    reached = 1 - np.concatenate([[0.0], np.cumsum(shares)[:-1]])
    return float((reached * np.array(stage_ms(name)[str(batch)])).sum())


def percent(values: Sequence[float]) -> str:
    return with_spread([100 * value for value in values], 1)


def singles_table(groups: Groups) -> str:
    rows = []
    for key, group in groups.items():
        if key[1] == "single":
            first, ms = group[0].network, stage_ms(f"{key[2]}, alone")
            top1 = [percent([one.network[what][0] for one in group]) for what in ("test", "balanced")]
            cells = [key[0], millions(first["costs"][0]), *top1, *(f"{ms[str(b)][0]:.2f}" for b in BATCHES)]
            rows.append((first["costs"][0], [key[2], *cells, str(len(group))]))
    columns = [
        "single network",
        "trained by",
        "mul-adds",
        "top-1 %",
        "balanced %",
        "ms, batch 1",
        "ms, batch 64",
        "seeds",
    ]
    return to_markdown(columns, [row for _, row in sorted(rows)])


def budgets_table(groups: Groups, keys: Sequence[Key], what: str = "top-1 % on test") -> str:
    """Accuracy, or `balanced` accuracy, at every budget."""
    value, own = (2, "balanced") if what.startswith("balanced") else (1, "test")
    seeds = sorted({one.run["seed"] for key, group in groups.items() for one in group if key[1] == "single"})
    best = [singles(groups, seed, own).at(BUDGETS) for seed in seeds]
    rows = [["best single networks of the same cost", "all of them", *map(percent, np.transpose(best))]]
    for key in keys:
        at = np.array([one.curve(value=value).at(BUDGETS) for one in groups[key]])
        cells = ["–" if np.isnan(column).any() else percent(column) for column in at.T]
        rows.append([f"{key[2]} ({counted(len(at), 'seed')})", key[0], *cells])
    return to_markdown([what, "trained by", *_budget_columns()], rows)


def ms_table(groups: Groups, keys: Sequence[Key]) -> str:
    """Milliseconds at the same budgets, from the shares that leave at each exit: one image at a time / in batches."""
    rows = []
    for key in keys:
        seeds = [[_ms_curve(key[2], one, batch).at(BUDGETS) for batch in BATCHES] for one in groups[key]]
        rows.append([key[2], key[0], *(" / ".join(f"{ms:.2f}" for ms in each) for each in np.mean(seeds, axis=0).T)])
    columns = [f"ms per image, one at a time / batches of {BATCHES[-1]}", "trained by", *_budget_columns()]
    return to_markdown(columns, rows)


def _ms_curve(name: str, one: Kept, batch: int) -> Curve:
    found = {point[0]: mean_ms(name, point[3], batch) for point in reversed(one.network["curve"])}
    costs, ms = zip(*sorted(found.items()), strict=True)
    return Curve(costs, ms)


def _budget_columns() -> list[str]:
    return [millions(budget).replace(".00", "") for budget in BUDGETS]


def as_good(groups: Groups, key: Key) -> str:
    """A cascade beside the largest single network of its way, at the least cost that is as good on held-out images."""
    largest = max((k for k in groups if k[:2] == (key[0], "single")), key=lambda k: groups[k][0].network["costs"][0])
    rows = []
    singles_by_seed = {one.run["seed"]: one for one in groups[largest]}
    for one in groups[key]:
        whole = singles_by_seed[one.run["seed"]]
        wanted, seen = whole.network["held_out"][0], one.network["held_out_curve"]
        at = next((n for n, point in enumerate(seen) if point[1] >= wanted), len(seen) - 1)
        cost, top1, balance, shares = min(one.network["curve"], key=lambda p: abs(p[0] - seen[at][0]))
        ms = [1 - mean_ms(key[2], shares, b) / stage_ms(f"{largest[2]}, alone")[str(b)][0] for b in BATCHES]
        rows.append([1 - cost / whole.network["costs"][0], *ms, top1 - whole.network["test"][0]])
    less = [f"{100 * value:.0f} %" for value in np.mean(rows, axis=0)[:-1]]
    return (
        f"{key[2]}. Where it is as good as {largest[2]} on held-out images, it takes {less[0]} fewer mul-adds, "
        f"{less[1]} fewer milliseconds one image at a time and {less[2]} fewer in batches of 64. On test images it is "
        f"{_better([100 * row[-1] for row in rows])}."
    )


def _better(points: Sequence[float]) -> str:
    """0.41 points worse (± 0.55)."""
    size, _, spread = with_spread(points).partition(" ± ")
    word = "better" if np.mean(points) >= 0 else "worse"
    return f"{size.lstrip('-')} points {word} (± {spread})"


def middle_gain(groups: Groups, key: Key) -> str:
    """How far above the hull, in the middle between the single networks at both ends and on average."""
    gains = above_hull(groups[key], groups, BUDGETS)
    middle = [at for at, budget in enumerate(BUDGETS) if 2e8 <= budget <= 3e8]
    return (
        "Against the best single networks of the same cost, distilled ones included, it is "
        f"{_better(gains[:, middle].mean(1))} between 200M and 300M, and {_better(gains.mean(1))} over all budgets of "
        "the table."
    )


COLOURS = {"single": "#7c8a98", "cascade": "#2a8f6d", "exits": "#d9601a"}
PLAIN = "labels alone"
MARKS = {PLAIN: ("--", "s"), "distilled from the mean": ("-", "o")}


def draw(groups: Groups, keys: Sequence[Key], axes: Any) -> None:
    """Single networks, the chosen cascades and exits, means over seeds."""
    for way in sorted({key[0] for key in groups if key[1] == "single"}):
        own = sorted(
            (g[0].network["costs"][0], np.mean([o.network["test"][0] for o in g]))
            for k, g in groups.items()
            if k[:2] == (way, "single")
        )
        line, mark = MARKS.get(way, ("-.", "d"))
        costs, top1 = np.array(own).T
        axes.plot(costs / 1e6, 100 * top1, line, marker=mark, color=COLOURS["single"], label=f"single networks, {way}")
    others = [key for key in keys if key[1] == "exits" and key[0] != PLAIN]
    for key in keys:
        at = np.geomspace(max(one.curve().costs[0] for one in groups[key]), 4.2e8, 60)
        mean = np.mean([one.curve().at(at) for one in groups[key]], axis=0)
        if key in others:
            label = f"{key[2]}, {len(others)} other ways of training" if key == others[0] else None
            axes.plot(at / 1e6, 100 * mean, lw=0.8, color=COLOURS[key[1]], label=label)
        else:
            line = ":" if SHARED in key[2] else MARKS.get(key[0], ("-.", "d"))[0]
            axes.plot(at / 1e6, 100 * mean, line, color=COLOURS[key[1]], label=f"{key[2]}, {key[0]}")
    axes.set_xlabel("mean mul-adds per image, millions")
    axes.set_ylabel("top-1 on test images, %")
    low = min(np.mean([o.network["test"][0] for o in g]) for k, g in groups.items() if k[1] == "single")
    axes.set_ylim(100 * low - 4, None)
    axes.figure.legend(loc="outside lower center", fontsize=8)


def section(data: str, groups: Groups, cascades: Sequence[Key]) -> str:
    """Everything about one data set."""
    others = sorted(key for key in groups if key[1] != "single" and len(groups[key][0].run["networks"]) == 1)
    keys = [*cascades, *others]
    save(Panels(f"photos-{data}", "", [partial(draw, groups, keys)], "tall"), PAGE.parent)
    samples = next(iter(groups.values()))[0].run["samples"]
    found = "".join(f"- **{key[0]}**: {as_good(groups, key)} {middle_gain(groups, key)}\n" for key in cascades)
    return "\n".join(
        [
            f"## {DATA[data]}\n",
            f"{samples['test']:,} test images; thresholds from {samples['calibration']} held-out ones.\n",
            f"![Accuracy against mean mul-adds on {DATA[data]}](photos-{data}.png)\n",
            found,
            budgets_table(groups, keys),
            *([budgets_table(groups, keys, "balanced top-1 % on test")] if data in UNBALANCED else []),
            ms_table(groups, [key for key in keys if key[1] == "cascade" or key[0] == PLAIN]),
            singles_table(groups),
        ]
    )


def int8_table() -> str:
    """Single networks in 8 bits: what they take, and what that does to their answers."""
    known, tried = read_json(TIMES)["stage_ms"], read_json(INT8)
    measured = {row["name"]: row for row in tried["networks"]}
    rows = []
    for name in (name for name in known if f"{name}, int8" in known):
        ms = [f"{known[f'{name}, {kind}'][str(b)][0]:.2f}" for b in BATCHES for kind in ("alone", "int8")]
        own = measured.get(name)
        cells = ["", "", ""] if own is None else [f"{100 * own[key]:.1f}" for key in ("top1", "int8", "agree")]
        rows.append([name, *ms, *cells])
    columns = ["", "ms alone", "in int8", "ms of 64", "in int8", "top-1 %", "in int8", "same answer %"]
    return f"## In 8 bits\n\n{INT8_WORDS.format(data=DATA[tried['data']])}\n\n{to_markdown(columns, rows)}"


INT8_WORDS = (
    "The ordinary way to make a network faster is to quantise it. ONNX Runtime does that to weights and activations, "
    "with ranges from 200 training images. Accuracies are those of networks that `offramp fit` trained on {data} in "
    "seven epochs, one seed."
)


def runs_table() -> str:
    rows = []
    for path in sorted(KEPT.glob("*-seed=*.json")):
        run = read_json(path)
        if run["networks"]:
            last = run["networks"][-1] if len(run["networks"]) == 1 else None
            shown = last["test"] if last else [n["test"][0] for n in run["networks"] if n["family"] == "single"]
            name = last["name"] if last else "all members"
            top1 = " ".join(f"{100 * value:.2f}" for value in shown)
            epochs = " + ".join(str(e) for e in run["epochs"] if e)
            seconds = "" if run["seconds"] is None else f"{run['seconds']:.0f}"
            rows.append([run["data"], name, run["way"], str(run["seed"]), epochs, run["device"], seconds, top1])
    columns = ["data", "network", "trained by", "seed", "epochs", "device", "seconds, shared", "top-1 of each, test"]
    return "## All runs\n\n" + to_markdown(columns, rows)


def page() -> None:
    """Write the page from what is kept."""
    machine = read_json(TIMES)["machine"]
    text = (HERE / "photos.md").read_text(encoding="utf-8").replace("MACHINE", machine)
    found = {data: read_kept(data) for data in DATA}
    ways = sorted({key[0] for groups in found.values() for key in groups if key[1] == "single"})
    cascades = [chosen_cascade(list(found.values()), way) for way in ways]
    sections = [section(data, groups, cascades) for data, groups in found.items()]
    first, _, last = text.partition("TABLES\n\n")
    parts = [first.rstrip() + "\n", *sections, int8_table(), last, runs_table()]
    write_bytes(PAGE, "\n".join(parts).encode())


if __name__ == "__main__":
    page()
