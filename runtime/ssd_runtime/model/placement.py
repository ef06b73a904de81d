"""On which device a part of a model runs: its own, or where accelerate brings it for a moment."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn


def device_of(part: nn.Module) -> torch.device:
    """Where `part` runs.

    Weights that accelerate keeps elsewhere lie on no device until they are needed; the hook that fetches them knows
    where to.
    """
    hooks = (getattr(module, "_hf_hook", None) for module in part.modules())
    for hook in hooks:
        if (device := getattr(hook, "execution_device", None)) is not None:
            # `cuda` and `cuda:0` are not equal, though they are the same.
            return torch.empty(0, device=device).device
    # torch's own quantised modules hold their weights elsewhere, and run on a CPU alone.
    held = next(chain(part.parameters(), part.buffers()), None)
    return torch.device("cpu") if held is None else held.device
