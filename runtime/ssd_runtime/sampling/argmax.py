"""Fast argmax and top-k over rows of logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ssd_runtime.devices.transfer import take_rows


def argmax(logits: Tensor) -> Tensor:
    """Argmax [n] of `logits` [n, vocabulary]; the first of equal values wins.

    On a CPU, torch scans a row one number at a time. For 12 rows of 49k tokens that takes a fiftieth of a small model's
    step, and numpy takes a tenth of it.
    """
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        return logits.argmax(-1)
    return torch.from_numpy(logits.numpy().argmax(-1))


def argmax_with_logit(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Argmax [n] of `logits` [n, vocabulary], and the logits there [n]."""
    best = argmax(logits)
    return best, logits.gather(1, best[:, None])[:, 0]


def with_nll(logits: Tensor, best: Tensor, temperature: float) -> tuple[int, float]:
    """The argmax `best` [1] of `logits` [vocabulary], and its nll in the softmax of `logits` ÷ `temperature`.

    On a CPU, torch's threads would take turns with those of our own kernels, which wait for the next call. With 152k
    tokens that takes a fiftieth of a step of 1.5B packed weights, and numpy a tenth of it.
    """
    if logits.device.type == "cpu":
        row = logits.float().numpy()
        token = int(best)
        with np.errstate(invalid="ignore"):  # an infinite logit has no confidence
            return token, float(np.log(np.exp((row - row[token]) / temperature).sum()))
    wide = logits.float()
    # Both are read at once; fp32 holds token ids up to 16 million.
    both = torch.cat([best.float(), ((wide - wide[best]) / temperature).logsumexp(-1, keepdim=True)]).tolist()
    return int(both[0]), both[1]


def candidates(logits: Tensor, rows: Sequence[int], count: int) -> list[list[int]]:
    """The `count` most probable tokens for some rows of `logits` [n, vocabulary], best first.

    Tokens at minus infinity, which a filter has removed, are left out.
    """
    if logits.device.type != "cpu" or logits.dtype != torch.float32:
        values, tokens = take_rows(logits, rows).topk(min(count, logits.shape[-1]))
        both = zip(tokens.tolist(), values.tolist(), strict=True)
        return [[token for token, value in zip(*row, strict=True) if value > -np.inf] for row in both]
    every = logits.numpy()
    return [_topk(every[row], count) for row in rows]


def _topk(row: NDArray[np.float32], count: int) -> list[int]:
    """Indices of the `count` largest entries.

    Each maximum is masked in place until all are found, because copying the row would double the time.
    """
    found = list[tuple[int, np.float32]]()
    while len(found) < count and (value := row[token := int(row.argmax())]) > -np.inf:
        found.append((token, value))
        row[token] = -np.inf
    for token, value in found:
        row[token] = value
    return [token for token, _ in found]
