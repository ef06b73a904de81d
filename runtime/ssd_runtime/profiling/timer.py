"""Times the works of a measurement that others may interrupt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ssd_runtime.devices.clock import seconds


@dataclass(slots=True)
class Timer:
    """Times works on a device, one after the other, and sums their seconds.

    `between` is called before each work. What it does counts for nothing, and it may raise an error that ends the
    measurement.
    """

    device: torch.device
    between: Callable[[], object] | None = None
    spent: float = 0.0
    """Seconds of all works so far."""

    def __call__(self, work: Callable[[], object]) -> float:
        """The seconds that `work` takes."""
        if self.between is not None:
            with torch.inference_mode(False):  # what it makes must not depend on when it is called
                self.between()
        taken = seconds(work, self.device)
        self.spent += taken
        return taken
