"""What can only be seen on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from offramp import create_model, evaluate_run
from offramp.build import new_method, new_model, new_optimizer
from offramp.config import RunConfig
from offramp.data import load_dataset
from offramp.objectives.losses import exit_losses
from offramp.runs import read_metrics
from offramp.step import iterate
from offramp.tally import Tally
from offramp.train import train_run
from offramp.world import World

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("weighting", ["uniform", "selection", "learned"])
def test_a_step_never_waits_for_the_device(small_config: Callable[..., RunConfig], weighting: str) -> None:
    config = small_config("model.num_classes=10", f"weighting.name={weighting}")
    device = torch.device("cuda")
    data = load_dataset("digits", train=256, calibration=0, test=10)
    model = new_model(config).to(device, memory_format=torch.channels_last)
    optimizer, tally = new_optimizer(model, config.train), Tally(model.num_exits, device)
    method = new_method(config, model.num_exits, exit_losses, device, World())
    stream = data.stream(64, 0, device)

    def step(at: int) -> None:
        for half in iterate(model, optimizer, method, *next(stream), at):
            tally.add(half, at)

    step(0)
    try:
        with warnings.catch_warnings(action="ignore"):  # it warns that it is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for at in range(1, 10):
            step(at)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tally.tensors["seen"].item() == 640


def test_training_on_the_gpu_learns_and_evaluates_as_the_cpu_does(
    tmp_path: Path, small_config: Callable[..., RunConfig]
) -> None:
    run = train_run(small_config("train.epochs=20", "data.train=2000"), tmp_path / "run", device="cuda")
    rows = read_metrics(run)
    assert sum(rows[-1]["train_loss"]) < 0.7 * sum(rows[0]["train_loss"])
    evaluate_run(run, device="cuda")
    gpu = np.load(run / "eval/test/logits.npy").copy()
    evaluate_run(run, device="cpu")
    cpu = np.load(run / "eval/test/logits.npy")
    np.testing.assert_allclose(gpu, cpu, atol=2e-4)


def test_captured_stages_answer_as_plain_ones_do() -> None:
    """CUDA graphs per stage and batch size give what the CPU gives, whatever the batch, alone and pooled."""
    from offramp.engines.torch_engine import TorchEngine
    from offramp.models.fold import folded
    from offramp.policy import Policy
    from offramp.pool import Pool, Ticket
    from offramp.runtime import Runtime

    torch.manual_seed(0)
    model = folded(create_model("msdnet5", num_classes=10).eval())
    images = np.random.default_rng(0).normal(size=(300, 3, 32, 32)).astype(np.float32)
    plain = TorchEngine(folded(model))
    sure = []
    with plain.active():
        state = plain.begin(images[:100])
        for k in range(1, 6):
            verdict, state = plain.run(k, state)
            sure.append(plain.judge(k, verdict)[0])
    policy = Policy("q", None, tuple(float(np.median(own)) for own in sure[:-1]), 0.0, (), 0.0)
    near = np.min([np.abs(own - t) for own, t in zip(sure, policy.thresholds, strict=False)], axis=0) < 1e-4
    costs = (1, 2, 3, 4, 5)
    expected = Runtime(plain, policy, costs)(images[:100])
    engine = TorchEngine(folded(model), device="cuda", graphs=True)
    for size in (1, 7, 100):
        runtime = Runtime(engine, policy, costs)
        found = [runtime(images[at : at + size]).exits for at in range(0, 100, size)]
        assert (np.concatenate(found)[:100] == expected.exits)[~near].all()
    assert len(Runtime(engine, policy, costs)(images)) == 300  # more than any captured size
    pool, left = Pool(engine, policy, 16, wait_s=60.0), []
    for at in range(0, 100, 16):
        rows = range(at, min(at + 16, 100))
        pool.add(images[rows.start : rows.stop], [Ticket(row, 5) for row in rows])
        while pool.ready():
            left += pool.work()
    while pool.waiting:
        left += pool.work(flush=True)
    exits = np.zeros(100, np.int64)
    for one in left:
        exits[one.ticket.key] = one.exit
    assert (exits == expected.exits)[~near].all()
