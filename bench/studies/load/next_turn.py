"""Time to the first token of a conversation's second turn, with and without what its first turn has left.

`python -m bench.studies.load.next_turn --tokens 2048`, and the memory of keys and values of a model with sliding
layers: `python -m bench.studies.load.next_turn --sliding 16384`
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.fixtures.prompts.prompt_files import SPEC_BENCH
from bench.harness.provenance import commit
from ssd_profiles.prompts import read_prompts
from ssd_runtime import Engine
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.loop import generate, generating
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.engine.sequence.output import Limits
from ssd_runtime.engine.sequence.session import Session
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.planning.plan import PlainPlanner

ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--tokens", type=int, default=2048, help="of the first turn")
    parser.add_argument("--sliding", type=int, default=0, help="context of a random model of Gemma-3's shape instead")
    arguments = parser.parse_args()
    print(f"commit {commit()}")
    if arguments.sliding:
        sliding(arguments.sliding)
    else:
        second_turn(Engine.open(model=arguments.model), arguments.tokens)


def second_turn(engine: Engine, tokens: int) -> None:
    """Print seconds to the first token of the second turn, and of the whole prompt without a prefix."""
    text = "\n".join(turn for prompt in read_prompts(SPEC_BENCH) for turn in prompt.turns)
    prompt = engine.loaded.encode([("user", text)])[-tokens:]
    further = engine.loaded.encode([("user", "And what follows from that?")])
    taken: dict[str, list[float]] = {"with the prefix": [], "without": []}
    reused = 0
    for _ in range(ROUNDS):
        scheduler = Scheduler(engine.decoder, 1)
        session = scheduler.session()
        first = scheduler.add(session, generating(session, prompt, PlainPlanner(), Limits(64)), prompt)
        ids = [*prompt, *scheduler.finish(first).token_ids, *further]
        session = scheduler.session()
        job = scheduler.add(session, generating(session, ids, PlainPlanner(), Limits(1)), ids)
        again = scheduler.finish(job)
        reused = again.num_cached_tokens
        taken["with the prefix"].append(again.prefill_seconds)
        whole = generate(Session(engine.decoder), ids, PlainPlanner(), Limits(1))
        assert whole.token_ids == again.token_ids
        taken["without"].append(whole.prefill_seconds)
    print(f"second turn of {len(ids)} tokens, {reused} of them reused:")
    for name, seconds in taken.items():
        print(f"  {name}: {median(seconds):.3f} s ({min(seconds):.3f}–{max(seconds):.3f})")


@torch.inference_mode()
def sliding(context: int) -> None:
    """Print the bytes of keys and values at a context: what a sequence holds, and what it would without windows."""
    torch.manual_seed(0)
    # Gemma-3-1B but for what keys and values do not depend on: a narrow model that runs such a context in minutes.
    config = AutoConfig.for_model(
        "gemma3_text",
        num_hidden_layers=26,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        vocab_size=1000,
        max_position_embeddings=32768,
    )
    decoder = Decoder(AutoModelForCausalLM.from_config(config).eval())
    session = Session(decoder)
    session.prefill([1 + i % 900 for i in range(context)], new_tokens=128)
    held = session.cache.bytes
    whole = session.cache.capacity * decoder.kv_layout.bytes_per_slot
    print(f"{context} tokens: {held / 2**20:.1f} MiB of keys and values, {whole / 2**20:.1f} MiB without windows")


if __name__ == "__main__":
    run_guarded(main)
