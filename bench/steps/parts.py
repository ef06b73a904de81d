"""A plain step by part, and steps of several rows, for fp32, bf16 and packed weights in turn.

`python -m bench.steps.parts --model demo@wheel --context 300`

Whole steps, head and choice included, are timed as they are. The parts are timed in other steps, by clocks around the
functions, which take some of the time themselves. What no clock covers is Python and element-wise work.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from bench.harness.provenance import commit
from ssd_runtime import Engine
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.loading.models import load_model
from ssd_runtime.model import decoder as decoder_module
from ssd_runtime.model.cache.kv_cache import KVCache
from ssd_runtime.model.layer import Norm
from ssd_runtime.model.native_attention import NativeAttention
from ssd_runtime.sampling.argmax import argmax
from ssd_runtime.sequence.session import Session
from ssd_runtime.weights.kernels.native import Native
from ssd_runtime.weights.linear import Linear

ROWS = (1, 2, 4, 8, 16, 32)
PARTS: tuple[tuple[Any, str, str], ...] = (
    (Linear, "__call__", "matmul"),
    (decoder_module, "attend", "attention"),
    (KVCache, "write", "attention"),
    (KVCache, "read", "attention"),
    (Norm, "__call__", "norms and rope"),
    (decoder_module, "rotate", "norms and rope"),
    (NativeAttention, "__call__", "whole attention blocks"),
    (Native, "fused_mlp", "whole MLP blocks"),
)
"""Owners, their functions, and the part that these belong to."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--weights", default="fp32,bf16,packed")
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=16)
    arguments = parser.parse_args()
    sessions = {name: opened(arguments.model, name, arguments.context) for name in arguments.weights.split(",")}
    taken = defaultdict[tuple[str, int], list[float]](list)
    parts = defaultdict[tuple[str, str], list[float]](list)
    for number in range(arguments.rounds + 1):
        for name, session in sessions.items():
            for rows in ROWS:
                seconds = step(session, rows)
                if number:  # the first round warms up
                    taken[name, rows].append(seconds)
            with clocks() as spent:
                whole = step(session, 1)
            if number:
                for part, seconds in {**spent, "all": whole}.items():
                    parts[name, part].append(seconds)
    print(f"commit {commit()}; {arguments.context} tokens of context; ms, median (quartiles) of {arguments.rounds}")
    for name, session in sessions.items():
        print(f"{name}: {session.decoder.kernels}")
        print("  whole step:  " + ", ".join(f"{rows} rows {_shown(taken[name, rows])}" for rows in ROWS))
        print("  with clocks: " + ", ".join(f"{part} {_shown(each)}" for (n, part), each in parts.items() if n == name))


def opened(model: str, weights: str, context: int) -> Session:
    """A session after `context` tokens."""
    packed = weights == "packed"
    loaded = load_model(model, "cpu", None if packed else weights, "packed" if packed else "dense")
    session = Session(Engine(loaded).decoder)
    session.prefill([17 + 31 * i % 1000 for i in range(context)])
    return session


@torch.inference_mode()
def step(session: Session, rows: int) -> float:
    """Seconds of a forward of some rows with the choice of their tokens; nothing is committed."""
    began = perf_counter()
    argmax(session.decoder.logits(session.forward([19 + 31 * i for i in range(rows)]))).tolist()
    return perf_counter() - began


@contextmanager
def clocks() -> Iterator[dict[str, float]]:
    """Sum the seconds of each part within the context."""
    spent = dict.fromkeys((part for _, _, part in PARTS), 0.0)

    def timed(original: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = perf_counter()
            try:
                return original(*arguments, **options)
            finally:
                spent[part] += perf_counter() - began

        return call

    with ExitStack() as stack:
        for owner, function, part in PARTS:
            stack.enter_context(patch.object(owner, function, timed(getattr(owner, function), part)))
        yield spent


def _shown(seconds: list[float]) -> str:
    low, half, high = np.percentile(np.asarray(seconds) * 1e3, [25, 50, 75])
    return f"{half:.2f} ({low:.2f}–{high:.2f})"


if __name__ == "__main__":
    run_guarded(main)
