"""A record of log-probabilities keeps few numbers per token, however long the answer is."""

from __future__ import annotations

import pytest
import torch

from ssd_runtime.serving.http.logits import LogprobRecorder


def test_a_record_keeps_the_whole_distribution_of_its_last_token_alone() -> None:
    recorder = LogprobRecorder(2)
    scores = torch.randn(20, 1, 50, generator=torch.Generator().manual_seed(1))
    tokens = list(range(20))
    for step in range(20):
        recorder(torch.tensor([[3, *tokens[:step]]]), scores[step])
    held = [row for row in recorder._rows if row.values is not None]
    assert held == recorder._rows[-1:]
    entries = recorder.read(5, tokens[5:])
    for entry, row in zip(entries, scores[5:, 0].log_softmax(-1), strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-5)
        assert [token for token, _ in entry.top] == row.topk(2).indices.tolist()
    assert recorder._rows[-1].values is None
