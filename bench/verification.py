"""The cost of verifying several tokens at once in plain steps, and of the kernels that serve the projections.

`python -m bench.verification --model demo@wheel --context 100` times forwards of 1 to 16 tokens after one
context in turn, with head and choice. Then it times every layer's projections alone, with packed copies and with the
model's own modules.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch

from ssd_runtime.commands.command import run_guarded
from ssd_runtime.devices.clock import seconds
from ssd_runtime.loading.models import load_model
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.kernel_choice import fitted_decoder
from ssd_runtime.sampling.argmax import argmax
from ssd_runtime.sequence.session import Session

ROWS = (1, 2, 3, 4, 6, 8, 12, 16)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--dtype")
    parser.add_argument("--weights", default="dense")
    parser.add_argument("--context", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    decoder = fitted_decoder(load_model(arguments.model, None, arguments.dtype, arguments.weights).model)
    print(f"{decoder.memory}; context {arguments.context}, {arguments.rounds} rounds in turn")
    session = Session(decoder)
    session.prefill(_ids(decoder, arguments.context))
    steps = _in_turn({str(n): partial(_step, session, n) for n in ROWS}, arguments.rounds, decoder)
    print(f"{'tokens':>8} {'ms':>8}   ÷ a plain step (95% interval)")
    for name, taken in steps.items():
        # The ratio is of medians, because a round that was held up is no part of a cost.
        ratio, low, high = _ratio(np.asarray(taken), np.asarray(steps["1"]))
        print(f"{name:>8} {np.median(taken) * 1e3:8.2f}   {ratio:.3f} ({low:.3f}–{high:.3f})")

    print("all layers' projections, ms (median)\n" + f"{'tokens':>8}" + "".join(f"{n:8}" for n in ROWS))
    for name, packed in (("packed", True), ("modules", False)):
        decoder.projections.serve([packed])
        alone = _in_turn({str(n): partial(_projections, decoder, n) for n in ROWS}, arguments.rounds, decoder)
        print(f"{name:>8}" + "".join(f"{np.median(taken) * 1e3:8.1f}" for taken in alone.values()))


def _ratio(taken: np.ndarray, plain: np.ndarray) -> tuple[float, float, float]:
    """Ratio of the medians over rounds, with its bootstrap interval."""
    rounds = np.random.default_rng(0).integers(0, len(plain), (2000, len(plain)))
    low, high = np.percentile(np.median(taken[rounds], 1) / np.median(plain[rounds], 1), [2.5, 97.5])
    return float(np.median(taken) / np.median(plain)), float(low), float(high)


def _in_turn(work: Mapping[str, Callable[[], object]], rounds: int, decoder: Decoder) -> dict[str, list[float]]:
    """Seconds of each piece of work in every round, after one warm-up round."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + 1):
        for name, run in work.items():
            elapsed = seconds(run, decoder.device)
            if number:
                taken[name].append(elapsed)
    return taken


def _step(session: Session, n: int) -> None:
    decoder = session.decoder
    argmax(decoder.logits(session.forward(_ids(decoder, n)))).tolist()


def _projections(decoder: Decoder, n: int) -> None:
    shape = decoder.shape
    like = decoder.embed([1])
    x = like.new_ones(n, shape.hidden)
    mixed = like.new_ones(n, shape.heads * shape.head_dim)
    for layer in decoder.layers:
        layer.qkv(x)
        layer.output(mixed)
        layer.down(layer.gate_up(x).chunk(2, -1)[0])


def _ids(decoder: Decoder, n: int) -> list[int]:
    return [(17 + 31 * i) % decoder.shape.vocabulary for i in range(n)]


if __name__ == "__main__":
    run_guarded(main)
