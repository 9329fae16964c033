"""Where and how precisely things are computed."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offramp.common.allocator import keep_freed_memory
from offramp.common.names import check_device_name


def pick_device(name: str = "auto") -> torch.device:
    """`auto` is the GPU if there is one; under torchrun each process takes its own."""
    check_device_name(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:  # torchrun: one GPU per process
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    device, gpus = torch.device(name), torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ValueError(f"device {name!r} was asked for, but torch sees {gpus or 'no'} GPUs here")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # streams, graphs and kernels of our own go to the current one
    if device.type == "cpu":
        keep_freed_memory()
    return device


def device_name(device: torch.device) -> str:
    """What people call it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()} CPU, {torch.get_num_threads()} threads"


def training_dtype(precision: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on GPUs that have it and float32 elsewhere."""
    if precision == "auto":
        fast = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all that it was told to; on the CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def suits_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether our kernels are made for training in such a precision: 16 bits, on GPUs of capability 8 or more."""
    sixteen_bits = device.type == "cuda" and dtype != torch.float32
    return sixteen_bits and torch.cuda.get_device_capability(device) >= (8, 0)


@contextmanager
def exact_float32() -> Iterator[None]:
    """float32 means float32: no TF32 in matrix products and convolutions."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
