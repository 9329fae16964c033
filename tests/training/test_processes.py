"""Several processes compute what one does: two gloo processes against one, in float64, without BatchNorm."""

from __future__ import annotations

import copy
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from helpers.runs import SMALL_RUN
from helpers.training import by, learned
from offramp.data import ArrayDataset, Batch, Dataset, load_dataset
from offramp.models.weights import read_tensors
from offramp.runs.folder import read_metrics
from offramp.training.objectives import Distillation, cross_entropy
from offramp.training.processes import Processes, joined_processes
from offramp.training.step import train_step
from offramp.training.weighting import CENTRINGS


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 12), nn.Linear(12, 12)
        self.a, self.b = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.one(x).tanh()
        return [self.a(h), self.b(self.two(h).tanh())]


def train(processes: Processes, way: dict[str, str], steps: int = 6) -> dict[str, Tensor]:
    """Several iterations on this process's part of the same batches."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=1e-3)
    weighting = learned(2, learning_rate=0.01, bound=True, double=True, **way)
    objective = Distillation("mean") if "terms" in way else cross_entropy
    method = by(weighting, processes=processes, objective=objective)
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(24, 6, generator=draw, dtype=torch.float64)
        y = torch.randint(4, (24,), generator=draw)
        places = processes.own_places(24)
        halves = train_step(model, optimizer, method, x[places], y[places], step)
    found = {f"model.{k}": v for k, v in model.state_dict().items()}
    found |= {f"net.{k}": v for k, v in weighting.net.state_dict().items()}
    return found | {"loss": halves[-1].loss, "meta_loss": halves[-1].meta_loss}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: list[str], size: int, code: int = 0, **environment: str) -> None:
    """Run a command in several processes, as torchrun would, and wait until all of them end with this exit code."""
    port = str(free_port())
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    common |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                **common,
                **environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [p.communicate(timeout=240)[0] for p in processes]
    assert [p.returncode for p in processes] == [code] * size, "\n".join(outputs)


WAYS: dict[str, dict[str, str]] = {
    **{centring: {"centring": centring} for centring in CENTRINGS},
    "terms": {"terms": "each", "objective": "policy", "order": "delayed"},
}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes computed, in every way."""
    folder = tmp_path_factory.mktemp("together")
    start([sys.executable, __file__, str(folder)], 2)
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_give_what_one_gives(together: Path, way: str) -> None:
    alone = train(Processes(), WAYS[way])
    for rank in range(2):
        found = torch.load(together / f"{way}-{rank}.pt", weights_only=True)
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


def test_an_imagenet_recipe_trains_in_two_processes(tmp_path: Path, image_folder: Callable[..., Path]) -> None:
    root = image_folder(classes=3, train=20, val=4)
    small = "model.overrides={image_size=64, blocks=[1, 1], factors=[1, 2], base_width=4, growth=4, stem='strided'}"
    words = ["train", "imagenet-msdnet-s4-learned", "--out", str(tmp_path / "run"), "--device", "cpu"]
    settings = [small, "data.image_size=64", "data.calibration=6", "data.workers=1", "train.batch=16"]
    settings += ["train.epochs=2", "weighting.interval=2", "train.learning_rate=0.05"]
    command = [sys.executable, "-m", "offramp", *words, "--data-dir", str(root)]
    start([*command, *(word for setting in settings for word in ("--set", setting))], 2)
    rows = read_metrics(tmp_path / "run")
    assert [row["epoch"] for row in rows] == [1, 2]
    assert "meta_loss" in rows[-1] and "calibration_top1" in rows[-1]
    assert (tmp_path / "run" / "model.safetensors").is_file()


def test_both_phases_of_imta_train_in_two_processes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [*SMALL_RUN, "train.epochs=1", "imta.equilibrium=true", "imta.collaboration=true"]
    command = [sys.executable, "-m", "offramp", "train", "digits-learned", "--out", str(run), "--device", "cpu"]
    start([*command, *(word for setting in settings for word in ("--set", setting))], 2)
    first, both = (read_tensors(folder / "model.safetensors") for folder in (run / "phase1", run))
    shared = [name for name in first if f"base.{name}" in both]
    assert shared and all(torch.equal(first[name], both[f"base.{name}"]) for name in shared)
    for folder in (run / "phase1", run):
        (row,) = read_metrics(folder)
        assert row["epoch"] == 1 and "meta_loss" in row and len(row["calibration_top1"]) == 2


def test_everything_at_once_trains_in_two_processes(tmp_path: Path) -> None:
    """The network alone first, probed heads, distillation, mixing, an average of the params."""
    run = tmp_path / "run"
    settings = [*SMALL_RUN, "train.epochs=2", "train.network_epochs=1", "train.parts=inner_heads", "train.probe=true"]
    settings += ["train.mixup=0.2", "train.cutmix=1.0", "train.ema=0.9", "objective.name=distillation"]
    command = [sys.executable, "-m", "offramp", "train", "digits-learned", "--out", str(run), "--device", "cpu"]
    start([*command, *(word for setting in settings for word in ("--set", setting))], 2)
    first, both = (read_tensors(folder / "model.safetensors") for folder in (run / "phase1", run))
    moved = {name for name in first if not torch.equal(first[name], both[name])}
    assert "heads.0.linear.weight" in moved and all(name.startswith("heads.0") for name in moved)
    assert len(read_metrics(run)) == 2 and "meta_loss" in read_metrics(run)[-1]


PLAIN_NET = """
import os, signal
import torch
from torch import nn
import offramp

STOP_AT = int(os.environ.get("STOP_AT", "0"))


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(3 * 32 * 32, 16), 0

    def forward(self, images):
        self.calls += self.training
        if STOP_AT and self.calls == STOP_AT and os.environ.get("RANK") == "0":
            os.kill(os.getpid(), signal.SIGTERM)
        return self.linear(images.double().flatten(1)).tanh()


@offramp.register_model("plain-double", num_classes=10, about="two layers in float64, without BatchNorm")
def plain(num_classes):
    torch.set_default_dtype(torch.float64)  # for the weight net too
    stages = [First(), nn.Sequential(nn.Linear(16, 16), nn.Tanh())]
    return offramp.ExitNet.from_parts(stages, [nn.Linear(16, num_classes) for _ in stages])
"""


def train_plain(folder: Path, sizes: Sequence[int], stops: Sequence[int]) -> Path:
    """A run in float64 that goes on with other numbers of processes after each stop."""
    (folder / "plain_double.py").write_text(PLAIN_NET)
    settings = ["model.name=plain-double", "model.overrides={}", "data.train=240", "data.calibration=37", "data.test=8"]
    settings += ["train.epochs=4", "train.batch=48", "train.save_seconds=3600", "train.ema=0.9"]
    run = folder / "-".join(map(str, sizes))
    words = [
        "train",
        "digits-learned",
        "--out",
        str(run),
        "--device",
        "cpu",
        "--import",
        str(folder / "plain_double.py"),
    ]
    command = [sys.executable, "-m", "offramp", *words, *(w for setting in settings for w in ("--set", setting))]
    for at, size in enumerate(sizes):
        last = at == len(sizes) - 1
        stop = {} if last else {"STOP_AT": str(stops[at])}
        start([*command, *(["--resume"] if at else [])], size, code=0 if last else 128 + signal.SIGTERM, **stop)
        assert (run / "model.safetensors").is_file() == last
    return run


def assert_same_run(one: Path, other: Path) -> None:
    left, right = (read_tensors(run / "model.safetensors") for run in (one, other))
    for name, value in left.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(right[name], value, rtol=1e-10, atol=1e-12, msg=name)
    for a, b in zip(read_metrics(one), read_metrics(other), strict=True):
        for key in ("epoch", "step", "train_loss", "train_top1", "meta_loss", "calibration_top1"):
            assert a[key] == pytest.approx(b[key], rel=1e-9), key


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    """Stopped in the midst of an epoch: it ends where one that did not stop ends."""
    assert_same_run(train_plain(tmp_path, [1], []), train_plain(tmp_path, [2, 1], [14]))


@pytest.mark.slow
def test_a_run_goes_on_with_more_processes_and_with_fewer(tmp_path: Path) -> None:
    assert_same_run(train_plain(tmp_path, [1], []), train_plain(tmp_path, [1, 4, 3, 2], [6, 11, 8]))


@pytest.mark.slow
def test_torchrun_on_two_machines(tmp_path: Path) -> None:
    """The command of docs/training.md, with both machines here and a smaller run."""
    text = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    [command] = re.findall(r"^    (torchrun --nnodes .*?)\n\n", text, re.DOTALL | re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " ").replace("$MACHINE", "0"))
    assert words[words.index("-m") + 1 : words.index("-m") + 3] == ["offramp", "train"]
    run = tmp_path / "run"
    swaps = {"--nproc-per-node": "1", "--master-addr": "127.0.0.1", "--master-port": str(free_port())}
    for option, value in swaps.items():
        words[words.index(option) + 1] = value
    settings = [*SMALL_RUN, "train.epochs=1"]
    words[words.index("train") + 1 :] = ["digits-learned", "--out", str(run), "--device", "cpu"]
    words += [word for setting in settings for word in ("--set", setting)]
    words[0:1] = [sys.executable, "-m", "torch.distributed.run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    machines = []
    for machine in "01":
        words[words.index("--node-rank") + 1] = machine
        machines.append(
            subprocess.Popen(list(words), env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        )
    said = [machine.communicate(timeout=240)[0].decode() for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(said)
    assert len(read_metrics(run)) == 1 and (run / "model.safetensors").is_file()


def test_each_process_evaluates_its_part() -> None:
    """Parts are disjoint and exhaustive, also where a process has none; data that know no rows are cut."""

    class Sweeping(ArrayDataset):
        sweep_rows = Dataset.sweep_rows

        def sweep(self, split: str, batch_size: int, device: torch.device) -> Iterator[Batch]:
            return ArrayDataset.sweep_rows(self, split, range(self.size(split)), batch_size, device)

    for size, total in ((1, 5), (2, 5), (3, 7), (4, 2)):
        parts = [Processes(rank, size).own_part(total) for rank in range(size)]
        assert [row for part in parts for row in part] == list(range(total))
    data = load_dataset("digits", train=32, calibration=23, test=8)
    assert isinstance(data, ArrayDataset)
    cut = copy.copy(data)
    cut.__class__ = Sweeping
    for rows in (range(0, 11), range(11, 23), range(5, 5)):
        for one in (data, cut):
            found = list(one.sweep_rows("calibration", rows, 4, torch.device("cpu")))
            index = [int(number) for batch in found for number in batch.index]
            assert index == data.index("calibration")[rows.start : rows.stop].tolist()


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(ValueError, match="shared evenly by 3 processes"):
        Processes(0, 3).own_places(16)
    assert Processes(1, 2).own_places(8).tolist() == [2, 3, 6, 7]


if __name__ == "__main__":
    with joined_processes(torch.device("cpu")) as everyone:
        for asked, own in WAYS.items():
            torch.save(train(everyone, own), Path(sys.argv[1]) / f"{asked}-{everyone.rank}.pt")
    left = [name for task in Path("/proc/self/task").glob("*/comm") if "gloo" in (name := task.read_text())]
    assert not left, f"threads that outlive their group may abort the process: {left}"
