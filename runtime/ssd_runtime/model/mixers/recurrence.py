"""The linear recurrence of gated delta nets and Mamba-2: row by row for a few rows, in chunks for a prompt's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ssd_runtime.model.mixers.mixer import FEW, exact

CHUNK = 64
"""Rows that the chunked form takes at once."""


class Rows(NamedTuple):
    """The rows of a recurrence, in fp32."""

    queries: Tensor
    """[n, heads, key]."""
    keys: Tensor
    """[n, heads, key]."""
    values: Tensor
    """[n, heads, value]."""
    decays: Tensor
    """Logarithms g [n, heads] of the factors by which the state decays, at most 0."""
    betas: Tensor | None = None
    """[n, heads] in a gated delta net; None in Mamba-2."""


def recur(state: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Run S_i = exp(g_i) S_(i-1) + k_i u_iᵀ and out_i = S_iᵀ q_i over n rows from `state` [heads, key, value].

    u_i is v_i, or with betas what the decayed state is wrong about (the gated delta rule): β_i (v_i - exp(g_i)
    S_(i-1)ᵀ k_i). Returns the outputs [n, heads, value] and S_n.
    """
    n = len(rows.keys)
    if n <= FEW:
        return _by_row(state, rows)
    outputs = list[Tensor]()
    for begin in range(0, n, CHUNK):
        out, state = _chunk(state, rows, slice(begin, begin + CHUNK))
        outputs.append(out)
    return torch.cat(outputs), state


def recur_apart(state: Tensor, rows: Rows) -> Tensor:
    """The outputs [n, heads, value] of rows each of which follows `state` itself."""
    queries, keys, added, decays, betas = rows
    factors = decays.exp()[..., None]
    if betas is not None:
        added = (added - factors * _read(state, keys)) * betas[..., None]
    return factors * _read(state, queries) + (queries * keys).sum(-1, keepdim=True) * added


def _read(state: Tensor, keys: Tensor) -> Tensor:
    """Sᵀ k [n, heads, value] of keys [n, heads, key]."""
    return (keys.transpose(0, 1) @ state).transpose(0, 1)


def _by_row(state: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    factors = exact(torch.exp, rows.decays)[..., None, None]
    outputs = list[Tensor]()
    for row in range(len(rows.keys)):
        state = state * factors[row] if row == 0 else state.mul_(factors[row])
        added = rows.values[row, :, None]
        if rows.betas is not None:
            added = (added - rows.keys[row, :, None] @ state) * rows.betas[row, :, None, None]
        state.baddbmm_(rows.keys[row, :, :, None], added)
        outputs.append(rows.queries[row, :, None] @ state)
    return torch.stack(outputs)[:, :, 0], state


def _chunk(state: Tensor, rows: Rows, part: slice) -> tuple[Tensor, Tensor]:
    """`recur` over a part of the rows at once.

    With G_i = g_1 + … + g_i, S_i = exp(G_i) S_0 + Σ_(j ≤ i) exp(G_i - G_j) k_j u_jᵀ. With betas the u solve a unit
    lower triangular system.
    """
    queries, keys, added, decays = (each[part].transpose(0, 1) for each in rows[:4])  # [heads, n, …]
    total = decays.cumsum(1)
    between = (total[:, :, None] - total[:, None]).tril().exp().tril()
    since = total.exp()[:, :, None]
    if rows.betas is not None:
        betas = rows.betas[part].T
        system = betas[:, :, None] * (keys @ keys.transpose(1, 2) * between)  # its diagonal counts as 1
        wrong = betas[:, :, None] * (added - since * (keys @ state))
        added = torch.linalg.solve_triangular(system, wrong, upper=False, unitriangular=True)
    out = since * (queries @ state) + (queries @ keys.transpose(1, 2) * between) @ added
    state = since[:, -1:] * state + (keys * between[:, -1, :, None]).transpose(1, 2) @ added
    return out.transpose(0, 1), state
