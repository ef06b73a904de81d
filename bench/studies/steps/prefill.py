"""Time and KV memory of a prompt's prefill.

`python -m bench.studies.steps.prefill --model demo@wheel --lengths 2000,7500` prefills each length in turn with tokens
that differ from their neighbours. `--yarn 8` first extends the model's context by YaRN's factor, which is for timing
only: the weights were not trained for it.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from transformers import PreTrainedConfig

from ssd_runtime.command import run_guarded
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.loading.models import load_model
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.clock import seconds
from ssd_runtime.profiling.memory import gib
from ssd_runtime.weights.kernel_choice import fitted_decoder

NEW_TOKENS = 128
"""Number of new tokens for which memory is reserved."""


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--lengths", default="2000,7500")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--yarn", type=float, help="YaRN's factor, of the context that the model has")
    arguments = parser.parse_args()
    model = load_model(arguments.model, "cpu", "fp32").model
    if arguments.yarn:
        stretch(model.config, arguments.yarn)
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    decoder = fitted_decoder(model)
    for number in range(arguments.rounds):
        for length in map(int, arguments.lengths.split(",")):
            session = Session(decoder)
            taken = seconds(partial(session.prefill, ids(decoder, length), new_tokens=NEW_TOKENS), decoder.device)
            slots = session.cache.capacity
            held = session.cache.capacity * session.cache.bytes_per_slot
            print(
                f"round {number}: {length} tokens in {taken:.2f} s, {slots} slots, {gib(held)} ({held} bytes)",
                flush=True,
            )


def stretch(config: PreTrainedConfig, factor: float) -> None:
    """Give a configuration YaRN's rotary embedding with `factor` times as many positions."""
    original = config.max_position_embeddings
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": config.rope_parameters["rope_theta"],
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    config.max_position_embeddings = int(factor * original)


def ids(decoder: Decoder, length: int) -> list[int]:
    """Token ids spread over the vocabulary."""
    return [(17 + 31 * i) % decoder.shape.vocabulary for i in range(length)]


if __name__ == "__main__":
    run_guarded(main)
