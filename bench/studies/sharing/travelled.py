"""Speed with a bundle that has travelled ÷ speed with one that was compiled on this machine, `auto` with both.

`python -m bench.studies.sharing.travelled --native build/native --artifact demo --model demo@wheel --prompts FILE`

What a bundle says of other devices' latencies is left out, so that this device is measured first, as on the first use.
Without `--artifact`, the native bundle itself travels. Both decode with the same weights and kernels, prompt by prompt
in turn; the native one does so twice, and the ratio of the two is the noise.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from bench.fixtures.prompts.prompt_files import SPEC_BENCH, stratified
from bench.harness.contenders import Timed, ours
from ssd_artifacts.sharing.opening import open_bundle
from ssd_profiles.intervals import speedup, speedup_interval
from ssd_runtime.command import run_guarded
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.sequence.output import Limits
from ssd_runtime.loading.models import conversation, load_model
from ssd_runtime.weights.draft_bits import read_draft_bits

NATIVE, AGAIN, TRAVELLED, PLAIN = "native", "native again", "travelled", "plain"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--native", required=True, help="a bundle compiled on this machine")
    parser.add_argument("--artifact", "--bundle", help="one compiled elsewhere; the native one by default")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    parser.add_argument("--count", type=int, default=13)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--draft-bits", default="auto")
    parser.add_argument("--plain", action="store_true", help="time plain decoding, too")
    parser.add_argument("--measure-both", action="store_true", help="measure latency for the native bundle, too")
    arguments = parser.parse_args()
    loaded = load_model(arguments.model, "cpu", None)
    home = open_bundle(arguments.native).bundle
    other = open_bundle(arguments.artifact or arguments.native).bundle
    bits = read_draft_bits(arguments.draft_bits)
    travelled = Engine(loaded, replace(other, latency={}), draft_bits=bits)
    began = perf_counter()
    table = travelled.latency
    print(f"latency measured, or found in the cache, in {perf_counter() - began:.1f} s")
    native = Engine(loaded, replace(home, latency={}) if arguments.measure_both else home, draft_bits=bits)
    native.decoder = travelled.decoder
    if native.latency is not table:
        wide = (native.latency.step_seconds(256, n) / table.step_seconds(256, n) for n in (1, 8))
        print(
            "step by the native bundle's table ÷ by the new one, 1 and 8 rows: " + ", ".join(f"{x:.2f}" for x in wide)
        )
    contenders = {
        NATIVE: ours(native.decoder, native.planners()),
        TRAVELLED: ours(native.decoder, travelled.planners()),
        AGAIN: ours(native.decoder, native.planners()),
    }
    if arguments.plain:
        contenders[PLAIN] = ours(native.decoder, native.planners("plain"))
    found: dict[str, list[Timed]] = {name: [] for name in contenders}
    limits = Limits(arguments.max_new_tokens, loaded.eos_ids)
    names = list(contenders)
    for number, prompt in enumerate(stratified(arguments.prompts, arguments.count)):
        ids = loaded.encode(conversation(prompt))
        if number == 0:  # warms up
            for decode in contenders.values():
                decode(ids, Limits(8, loaded.eos_ids))
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(contenders[name](ids, limits))
        assert all(each[-1].token_ids == found[NATIVE][-1].token_ids for each in found.values()), prompt.id
    seconds = {name: [each.seconds for each in timed] for name, timed in found.items()}
    tokens = sum(each.counted for each in found[NATIVE])
    print(f"{len(found[NATIVE])} prompts, {tokens} tokens, all outputs identical")
    for name, taken in seconds.items():
        print(f"{name:12} {tokens / sum(taken):6.1f} tokens/s")
    pairs = [(TRAVELLED, NATIVE), (TRAVELLED, AGAIN), (AGAIN, NATIVE), *([(NATIVE, PLAIN)] if arguments.plain else [])]
    for name, base in pairs:
        interval = speedup_interval(seconds[base], seconds[name])
        told = f" ({interval[0]:.3f}–{interval[1]:.3f})" if interval else ""
        print(f"{name} ÷ {base}: {speedup(seconds[base], seconds[name]):.3f}{told}")


if __name__ == "__main__":
    run_guarded(main)
