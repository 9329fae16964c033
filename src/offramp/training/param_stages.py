"""Which stage each param of a network belongs to: the first exit that reads it.

A copy of the network is walked stage by stage on the meta device, where every operator is seen with what it reads.
"""

from __future__ import annotations

import copy

import torch

from offramp.models.cost import Meter
from offramp.models.exits import ExitNet, State
from offramp.models.modules import floating_dtype


def param_stages(model: ExitNet) -> dict[str, int]:
    """The stage (1..K) of every param, by name; the last one for what no exit reads."""
    twin = copy.deepcopy(model).to("meta").eval()
    state: State = (torch.empty(1, *model.input_shape, device="meta", dtype=floating_dtype(model)),)
    stages = {name: model.num_exits for name, _ in twin.named_parameters()}
    names = {id(param): name for name, param in twin.named_parameters()}
    meter = Meter()
    with torch.no_grad(), meter:
        for k in range(1, model.num_exits + 1):
            _, state = twin.step(k, state)
            stages |= {names.pop(at): k for at in meter.params.keys() & names.keys()}
    return stages
