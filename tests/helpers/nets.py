"""Networks that are none of ours, batches for them, and the problem of a meta-gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from helpers.training import settings
from offramp.training.meta_gradient import Problem
from offramp.training.method import Method
from offramp.training.objectives import Half, exit_losses
from offramp.training.step import forward
from offramp.training.weighting import UniformWeighting


class Net(nn.Module):
    """Not one of ours: BatchNorm, dropout if asked for, a frozen and an unused param."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        sizes = (6, 7, 8, 9)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.Tanh(), nn.Dropout(dropout))
            for a, b in zip(sizes, sizes[1:], strict=False)
        )
        self.heads = nn.ModuleList(nn.Linear(b, 4) for b in sizes[1:])
        self.unused = nn.Parameter(torch.ones(3))
        self.blocks[0][0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> list[Tensor]:
        out = []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            out.append(head(x))
        return out


def batch(seed: int, shape: tuple[int, ...] = (6,)) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(16, *shape, generator=draw, dtype=torch.float64), torch.randint(0, 4, (16,), generator=draw)


def problem(
    model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...] = (6,), **more: object
) -> Problem:
    method = Method(UniformWeighting(), settings(**more))
    train = forward(model, method, Half(*batch(1, shape)), keeps=False)
    draw = torch.Generator().manual_seed(9)
    weights = 0.5 + torch.rand(train.losses_BK.shape, generator=draw, dtype=torch.float64)
    return Problem(model, optimizer, method, train, weights, Half(*batch(2, shape)))


def warm_up(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, shape: tuple[int, ...] = (6,)) -> None:
    for seed in range(steps):
        x, y = batch(100 + seed, shape)
        optimizer.zero_grad()
        exit_losses(model(x), y).sum(1).mean().backward()
        optimizer.step()


def two_groups(model: Net) -> list[dict[str, object]]:
    heads = list(model.heads.parameters())
    return [{"params": list(model.blocks.parameters()) + [model.unused]}, {"params": heads, "lr": 0.03}]


Make = Callable[[Net], torch.optim.Optimizer]


OPTIMIZERS: dict[str, Make] = {
    "plain": lambda m: torch.optim.SGD(two_groups(m), lr=0.1),
    "decay": lambda m: torch.optim.SGD(two_groups(m), lr=0.1, weight_decay=0.01),
    "momentum": lambda m: torch.optim.SGD(two_groups(m), lr=0.1, momentum=0.9),
    "momentum-decay": lambda m: torch.optim.SGD(two_groups(m), lr=0.1, momentum=0.9, weight_decay=0.01),
    "dampening": lambda m: torch.optim.SGD(two_groups(m), lr=0.1, momentum=0.9, dampening=0.3),
    "nesterov": lambda m: torch.optim.SGD(two_groups(m), lr=0.1, momentum=0.9, nesterov=True),
    "nesterov-decay": lambda m: torch.optim.SGD(two_groups(m), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda m: torch.optim.AdamW(two_groups(m), lr=0.01, weight_decay=0.05),
}


class Theirs(nn.Module):
    """Somebody's multi-exit module: nothing of ours in it."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1))
        self.two = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.a, self.b = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.one(x)
        return [self.a(h), self.b(self.two(h))]


def loader(steps: int, n: int = 32) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(3, 8, generator=draw)
    batches = []
    for _ in range(steps):
        y = torch.randint(3, (n,), generator=draw)
        batches.append((centres[y] + 0.7 * torch.randn(n, 8, generator=draw), y))
    return batches


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
