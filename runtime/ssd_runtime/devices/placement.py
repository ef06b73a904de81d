"""Finds the device that a part of a model runs on: its own, or the one that accelerate moves it to."""

from __future__ import annotations

from itertools import chain

import torch
from torch import nn


def device_of(part: nn.Module) -> torch.device:
    """The device that `part` runs on.

    Weights that accelerate offloads are on no device until they are needed; the hook that fetches them has the device.
    """
    hooks = (getattr(module, "_hf_hook", None) for module in part.modules())
    for hook in hooks:
        if (device := getattr(hook, "execution_device", None)) is not None:
            # A tensor's device has its index: `cuda` and `cuda:0` are unequal names of one device.
            return torch.empty(0, device=device).device
    # torch's own quantised modules have no parameters or buffers, and run on a CPU only.
    held = next(chain(part.parameters(), part.buffers()), None)
    return torch.device("cpu") if held is None else held.device
