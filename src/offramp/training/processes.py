"""The processes of a run. Alone, everything here is the identity.

Small things (losses, confidences, tangents) are gathered, so that every process allocates, centres and trains
the weight net on the global batch; gradients are summed. So N processes compute what one would.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Processes:
    """This process is number `rank` of `size`."""

    rank: int = 0
    size: int = 1

    def own_slice(self, total: int) -> slice:
        """Which of `total` rows of a global batch are this process's."""
        if total % self.size:
            raise ValueError(f"{total} samples cannot be shared evenly by {self.size} processes")
        each = total // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def own_places(self, batch: int) -> Tensor:
        """Which places of a loader batch are this process's: its share of either half."""
        if batch % (2 * self.size):
            raise ValueError(f"a batch of {batch} cannot be shared evenly by {self.size} processes in two halves")
        return torch.arange(batch).view(2, self.size, -1)[:, self.rank].reshape(-1)

    def own_part(self, total: int) -> range:
        """Which of `total` rows are this process's, where the parts need not be of one size."""
        return range(self.rank * total // self.size, (self.rank + 1) * total // self.size)

    def own_rows(self, rows: Tensor) -> Tensor:
        """This process's part of what `gather` gave."""
        return rows if self.size == 1 else rows[self.own_slice(len(rows))]

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all processes, one after another."""
        if self.size == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def sum_all(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The sums of several tensors, in one message."""
        if self.size == 1 or not values:
            return list(values)
        flat = self.sum(torch.cat([v.reshape(-1) for v in values]))
        parts = flat.split([v.numel() for v in values])
        return [part.view(v.shape) for part, v in zip(parts, values, strict=True)]

    def take_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Fill tensors with what the first process has in them."""
        for tensor in tensors if self.size > 1 else ():
            tensor.copy_(self.sum(tensor if self.rank == 0 else torch.zeros_like(tensor)))

    def sum_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Add up the processes' gradients; their losses are shares of one mean already."""
        if self.size == 1:
            return
        owners = [p for p in params if p.grad is not None]
        for param, total in zip(owners, self.sum_all([p.grad for p in owners if p.grad is not None]), strict=True):
            param.grad = total

    def wait(self) -> None:
        """Until all processes are here."""
        self.any([True])

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set in any process."""
        if self.size == 1:
            return list(flags)
        counts = torch.tensor(flags, dtype=torch.int32)  # on the CPU: flags never wait for the device
        dist.all_reduce(counts)
        return [bool(count) for count in counts.tolist()]


@contextmanager
def joined_processes(device: torch.device) -> Iterator[Processes]:
    """The processes that `torchrun` started, or this one alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Processes()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # The first process fits probes and writes files alone while the others wait: that may take longer than ten minutes.
    patience = timedelta(hours=6)
    # The group must end with this block: threads of one that outlives it abort the process if they let go of a tensor
    # while the interpreter shuts down. So there is only one, which nobody holds; and a module whose functions keep the
    # group that they find when it is first imported (an optimiser's step imports it) finds none.
    import_module("torch.distributed.nn")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=patience)
    try:
        yield Processes(dist.get_rank(), size)
    finally:
        dist.destroy_process_group()
