"""A step with the same operations, shapes and addresses at every position, which a device can replay as a graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssd_runtime.model.batch import Batch
from ssd_runtime.model.cache.kv_cache import KVCache
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.devices.transfer import to_device
from ssd_runtime.sampling.argmax import argmax


class StaticStep:
    """A forward of the full model over a fixed number of consecutive rows of one sequence, and their argmax.

    Tokens and positions are numbers in memory that never moves, not arguments of kernels. Rows see a fixed number of
    slots, and a bias hides those after their own. So `run` queues the same operations at every position, and a graph
    that was captured from one of them serves all. Nothing in the engine uses it yet: capturing needs a card.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, rows: int, slots: int) -> None:
        """Reserve `slots` slots, which must not move while the step is used; no layer may have dropped keys.

        Raises ValueError if angles would change on the way (longrope), since keys are then computed again.
        """
        switch = decoder.rope_switch
        if switch is not None and not cache.long and slots > switch:
            raise ValueError(f"expected at most {switch} slots, beyond which angles change (longrope), got {slots}")
        cache.reserve(slots)
        self._decoder = decoder
        self._cache = cache
        self._slots = slots
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=decoder.device)
        """The rows' tokens [rows]."""
        self.positions = torch.arange(rows, device=decoder.device)
        """The rows' positions [rows], which are the numbers of their slots too."""
        self._keys = torch.arange(slots, device=decoder.device)

    @torch.inference_mode()
    def clear(self, committed: int) -> None:
        """Set the slots from `committed` on to zero: hidden keys count 0 times their values, which must be numbers."""
        for layer in range(self._decoder.shape.num_layers):
            for part in self._cache.read(layer, committed, self._slots):
                part.zero_()

    @torch.inference_mode()
    def place(self, tokens: Sequence[int] | Tensor, position: int) -> None:
        """Set the rows' tokens [rows], the first of which is at `position`; the host does not wait."""
        device = self._decoder.device
        self.tokens.copy_(tokens if isinstance(tokens, Tensor) else to_device(tokens, device))
        self.positions.copy_(torch.arange(position, position + len(tokens), device=device))

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Queue the forward, which writes the rows' keys; returns the argmax [rows] of each row's logits."""
        decoder = self._decoder
        segment = decoder.batches.tree(
            cache=self._cache,
            positions=self.positions,
            span=range(self._slots),
            slot=self.positions,
            visible=self._keys <= self.positions[:, None],
            key_positions=self._keys,
        )
        return argmax(decoder.logits(decoder.run(decoder.embed(self.tokens), Batch.of([segment]))))
