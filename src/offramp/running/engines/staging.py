"""Images on their way to a GPU, through pinned memory that is used again and again.

A copy from ordinary memory waits for all that the device was told before it; one from pinned memory does not. But to
pin memory takes milliseconds, so it is done once for a few rooms, which take turns.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROOMS = 4  # more copies than a pool has under way
SMALL_BYTES = 1 << 16  # so much is taken over at once, wherever it lies
LARGE_BYTES = 1 << 26  # beyond this, waiting costs little beside the copy, and pinned memory is scarce


class Staging:
    """Sends tensors of the host to a GPU; the host waits only if `ROOMS` of them are under way."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.turn = device, 0
        self.rooms = torch.empty(ROOMS, 0, dtype=torch.uint8)
        self.sent = [torch.cuda.Event() for _ in range(ROOMS)]

    def send(self, tensor: Tensor) -> Tensor:
        """A copy on the device, in order with what it is told later; `tensor` may be written to at once."""
        size = tensor.nbytes
        if not SMALL_BYTES < size <= LARGE_BYTES:
            return tensor.to(self.device, non_blocking=True)
        if size > self.rooms.shape[1]:  # a power of two, so that sizes that vary soon fit
            self.rooms = torch.empty(ROOMS, 1 << (size - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
        self.turn = (self.turn + 1) % ROOMS
        self.sent[self.turn].synchronize()
        room = self.rooms[self.turn, :size].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        copy = room.to(self.device, non_blocking=True)
        self.sent[self.turn].record()
        return copy
