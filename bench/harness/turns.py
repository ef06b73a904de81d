"""Contenders decode the same prompts in turn."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from time import sleep

from rich.console import Console
from rich.progress import track

from bench.harness.contenders import GREEDY, PLAIN, Decode, Timed, difference
from bench.harness.ledger import NOT_COMPARED, Ledger, Row
from bench.harness.provenance import Watch
from ssd_profiles.prompts import Prompt
from ssd_runtime import Engine, SamplingParams
from ssd_runtime.loading.loaded_model import conversation

Make = Callable[[str], Decode]
"""Makes a contender afresh for a stream of this name."""
WARM_UP = 8
"""Tokens of the answer that warms up."""


def decode_in_turn(
    ledger: Ledger,
    engine: Engine,
    contenders: Mapping[str, Make],
    prompts: Sequence[Prompt],
    new: int,
    *,
    compared: Collection[str],
    sampling: SamplingParams = GREEDY,
    settle: float = 0.0,
    console: Console,
) -> None:
    """Add the rows of all prompts of which the ledger has none; the order of contenders rotates from prompt to prompt.

    Each contender has a stream of its own, since one stream keeps the keys of its prompts. It warms up in another.
    The outputs of those `compared` are compared with plain decoding's. `settle` is the pause before each in seconds.
    """
    todo = [(number, prompt) for number, prompt in enumerate(prompts) if not ledger.has(prompt.id, 0)]
    if not todo:
        return
    names = list(contenders)
    warm_up = engine.loaded.encode([("user", "Hi there")])
    for name, make in contenders.items():
        make(f"{name}, warm-up")(warm_up, min(new, WARM_UP))
    decoders = {name: make(name) for name, make in contenders.items()}
    for number, prompt in track(todo, "decoding", console=console, disable=not console.is_terminal):
        ids = engine.loaded.encode(conversation(prompt))
        shift = number % len(names)
        watch = Watch()
        answers = dict[str, Timed]()
        for name in names[shift:] + names[:shift]:
            sleep(settle)
            answers[name] = decoders[name](ids, new)
        stolen = watch.stolen()
        plain = answers[PLAIN].token_ids
        kinds = {name: difference(engine, ids, plain, answers[name].token_ids, sampling).value for name in compared}
        ledger.add(
            [
                Row(
                    prompt=prompt.id,
                    category=prompt.category or "all",
                    contender=name,
                    repeat=0,
                    divergence=kinds.get(name, NOT_COMPARED),
                    tokens=len(timed.token_ids),
                    first_seconds=timed.first_seconds,
                    seconds=timed.seconds,
                    counted=timed.counted,
                    cycles=timed.cycles,
                )
                for name in names
                for timed in [answers[name]]
            ],
            stolen,
        )
