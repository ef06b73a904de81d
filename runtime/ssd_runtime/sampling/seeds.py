"""Seeds random generators with all 64 bits of a seed."""

from __future__ import annotations

import numpy as np
import torch

HALF = (1 << 32) - 1
STATE_OFFSET = 24
"""Bytes before the words of a Mersenne Twister in the state of torch's CPU generator."""
STATE_WORDS = 624


def seed_generator(generator: torch.Generator, seed: int) -> None:
    """Seed `generator` so that seeds between -(2^63) and 2^64 - 1 have streams of their own, modulo 2^64.

    torch's CPU generator keeps the lower 32 bits of a seed alone. Larger seeds therefore initialise all its words, as
    the Mersenne Twister's authors do for a key of several words (Matsumoto and Nishimura's `init_by_array`).
    """
    low, high = seed & HALF, seed >> 32 & HALF
    generator.manual_seed(high << 32 | low)
    if high and generator.device.type == "cpu":
        _, words, *_ = np.random.RandomState([low, high]).get_state(legacy=True)
        state = generator.get_state()
        place = slice(STATE_OFFSET, STATE_OFFSET + 8 * STATE_WORDS)
        state[place] = torch.from_numpy(np.asarray(words, np.int64)).view(torch.uint8)
        generator.set_state(state)
