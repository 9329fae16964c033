"""Images on their way to a GPU, through pinned memory that is used again and again.

A copy from ordinary memory waits for all that the device was told before it; one from pinned memory does not. But to
pin memory takes milliseconds, so a few pieces of it take turns.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

TURNS = 4  # more copies than a pool has under way
SMALL_BYTES = 1 << 16  # what is smaller is copied at once, wherever it lies


class Staging:
    """Sends tensors of the host to a GPU; the host waits only if `TURNS` of them are under way."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.turns: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def send(self, tensor: Tensor) -> Tensor:
        """A copy on the device, in order with what it is told later; `tensor` may be written to at once."""
        if tensor.nbytes <= SMALL_BYTES:
            return tensor.to(self.device)
        room, sent = self._turn(tensor)
        staged = room[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        copy = staged.to(self.device, non_blocking=True)
        sent.record()
        self.turns.append((room, sent))
        return copy

    def _turn(self, tensor: Tensor) -> tuple[Tensor, torch.cuda.Event]:
        """Pinned bytes, enough for the tensor, that no copy reads any more."""
        if len(self.turns) < TURNS:
            return _pinned(tensor.nbytes), torch.cuda.Event()
        room, sent = self.turns.popleft()
        sent.synchronize()
        return room if len(room) >= tensor.nbytes else _pinned(tensor.nbytes), sent


def _pinned(size: int) -> Tensor:
    """At least so many bytes: a power of two, so that sizes that vary soon fit."""
    return torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
