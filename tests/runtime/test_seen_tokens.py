"""The repetition penalty is transformers', and its cost does not grow with the context."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import RepetitionPenaltyLogitsProcessor

from ssd_runtime.sampling.params import SamplingParams
from ssd_runtime.sampling.sampler import Sampler
from ssd_runtime.sampling.seen_tokens import SeenTokens

VOCABULARY = 40
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=30)


@given(tokens, st.lists(tokens, min_size=1, max_size=4), st.lists(tokens, min_size=1, max_size=4), st.integers(0, 9))
def test_the_penalty_is_that_of_transformers(
    prompt: list[int], steps: list[list[int]], paths: list[list[int]], seed: int
) -> None:
    """After every step of a growing sequence, for rows that stand after different drafts."""
    processor, seen, known = RepetitionPenaltyLogitsProcessor(1.3), SeenTokens(1.3, "cpu"), list(prompt)
    logits = torch.randn(len(paths), VOCABULARY, generator=torch.Generator().manual_seed(seed))
    before = logits.clone()
    for step in steps:
        known += step
        got = seen.penalised(logits, known, paths)
        for row, path in enumerate(paths):
            context = torch.tensor([[*known, *path]], dtype=torch.long)
            assert torch.equal(got[row], processor(context, logits[row : row + 1])[0])
    assert torch.equal(logits, before)
    other = [*prompt[:1], 7]
    context = torch.tensor([other], dtype=torch.long)
    assert torch.equal(seen.penalised(logits[:1], other, [[]])[0], processor(context, logits[:1])[0])


class Recorded(TorchDispatchMode):
    """Counts reads by the host, and the most indices of one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.indices = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        if isinstance(out, torch.Tensor) and out.dtype == torch.long:
            self.indices = max(self.indices, out.numel())
        return out


def test_a_step_costs_neither_the_context_nor_a_read_a_row() -> None:
    sampler, known = Sampler(SamplingParams(repetition_penalty=1.1)), [i % 25 for i in range(5000)]
    logits, paths = torch.randn(8, VOCABULARY), [[30 + i for i in range(row + 1)] for row in range(8)]
    with Recorded() as recorded:
        chosen = sampler.choose(logits, known, lambda: paths)
        tokens = [chosen(row) for row in range(8)]
        known += tokens
        sampler.propose(logits[0], known, lambda: [31])
    assert recorded.indices < 100
    assert recorded.reads <= 1, "one of the draft step"
