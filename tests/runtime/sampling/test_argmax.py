"""The fast search for the most probable tokens, and the repetition penalty, against torch and transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from ssd_runtime.sampling.argmax import argmax, candidates, with_nll
from ssd_runtime.sampling.seen_tokens import SeenTokens


@given(st.integers(1, 5), st.integers(1, 1500), st.integers(0, 99), st.sampled_from([torch.float32, torch.float64]))
def test_it_finds_what_torch_finds(rows: int, width: int, seed: int, dtype: torch.dtype) -> None:
    # A permutation: no two are equal, so there is one right answer.
    generator = torch.Generator().manual_seed(seed)
    logits = torch.stack([torch.randperm(width, generator=generator) for _ in range(rows)]).to(dtype)
    assert torch.equal(argmax(logits), logits.argmax(-1))
    assert candidates(logits, range(rows), 4) == logits.topk(min(4, width)).indices.tolist()


def test_the_first_of_equals_wins_and_the_logits_stay_as_they_are() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    kept = logits.clone()
    assert argmax(logits).tolist() == [1]
    assert candidates(logits, [0], 3) == [[1, 2, 3]]
    filtered = torch.tensor([[-torch.inf, 2.0, -torch.inf, 1.0]])
    assert candidates(filtered, [0], 3) == candidates(filtered.double(), [0], 3) == [[1, 3]]
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_logit_is_the_highest_as_in_torch(broken: float) -> None:
    logits = torch.tensor([[1.0, broken, 3.0]])
    assert argmax(logits).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_nll_is_that_of_a_softmax(temperature: float, dtype: torch.dtype) -> None:
    logits = (5 * torch.randn(400, generator=torch.Generator().manual_seed(1))).to(dtype)
    logits[100:200] = -torch.inf
    token, nll = with_nll(logits, argmax(logits[None]), temperature)
    assert token == int(logits.argmax())
    assert nll == pytest.approx(-float((logits.double() / temperature).log_softmax(-1)[token]), rel=1e-5)


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
