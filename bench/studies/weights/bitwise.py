"""Tells which kernels compute a row alike to the bit beside others, with `--bitwise` and without, and at what price.

`python -m bench.studies.weights.bitwise --dtypes fp32,bf16,packed`; packed is a `.gguf` file's own weights. The same
tokens run after a prompt one at a time, and 2, 3, … rows at a time. A kernel holds for a number of rows if all logits
are equal. The price is the time of a plain step and of a verification with `--bitwise` ÷ that without, in turn.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median

import torch
from torch import Tensor

from ssd_runtime.command import run_guarded
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.loading.models import load_model
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.clock import seconds
from ssd_runtime.sampling.argmax import argmax

ROWS = (2, 3, 4, 5, 6, 7, 8, 12, 16)
TOKENS = 16
CONTEXT = 300
TIMED = (1, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--dtypes", default="fp32,bf16,packed")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    for dtype in arguments.dtypes.split(","):
        packed = dtype == "packed"
        loaded = load_model(arguments.model, "cpu", None if packed else dtype, "packed" if packed else "dense")
        modules, without, bitwise = Decoder(loaded.model, 0), Decoder(loaded.model), Decoder(loaded.model, bitwise=True)
        ways = {"without": without, "bitwise": bitwise} | ({} if packed else {"modules": modules})
        for name, decoder in ways.items():
            print(f"{dtype}, {decoder.kernels}, {name}: {held(decoder)}", flush=True)
        for rows, price in prices(without, bitwise, arguments.rounds).items():
            print(f"  {rows} rows: bitwise ÷ without {price:.3f}", flush=True)


def held(decoder: Decoder) -> str:
    """For which of `ROWS` the logits are those of plain steps, and the largest difference elsewhere."""
    plain = logits_of(decoder, 1)
    moved = {rows: float((logits_of(decoder, rows) - plain).abs().max()) for rows in ROWS}
    kept = [str(rows) for rows, difference in moved.items() if not difference]
    worst = max(moved.values())
    return f"holds for {', '.join(kept) or 'no'} rows" + (f"; elsewhere up to {worst:.2g}" if worst else "")


@torch.inference_mode()
def logits_of(decoder: Decoder, rows: int) -> Tensor:
    """Logits [TOKENS, vocabulary] of tokens that run so many rows at a time."""
    ids = _ids(decoder, CONTEXT + TOKENS)
    session, parts = Session(decoder), list[Tensor]()
    session.prefill(ids[:CONTEXT])
    for begin in range(CONTEXT, len(ids), rows):
        chunk = ids[begin : begin + rows]
        parts.append(decoder.logits(session.forward(chunk)))
        session.commit(chunk)
    return torch.cat(parts).float()


@torch.inference_mode()
def prices(without: Decoder, bitwise: Decoder, rounds: int) -> dict[int, float]:
    """Median ratios of times over rounds, by number of rows."""
    sessions = [Session(decoder) for decoder in (without, bitwise)]
    for session in sessions:
        session.prefill(_ids(without, CONTEXT))
    taken: dict[int, list[float]] = {rows: [] for rows in TIMED}
    for _ in range(rounds + 1):
        for rows, ratios in taken.items():
            plain, exact = (seconds(partial(_step, session, rows), without.device) for session in sessions)
            ratios.append(exact / plain)
    return {rows: median(ratios[1:]) for rows, ratios in taken.items()}


def _step(session: Session, rows: int) -> list[int]:
    return argmax(session.decoder.logits(session.forward([19 + 31 * i for i in range(rows)]))).tolist()


def _ids(decoder: Decoder, count: int) -> list[int]:
    return [(17 + 31 * i) % decoder.shape.vocabulary for i in range(count)]


if __name__ == "__main__":
    run_guarded(main)
