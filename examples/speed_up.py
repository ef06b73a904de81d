"""Measures what self-speculation gains on your own model, without a bundle and without preparation.

    python examples/speed_up.py --model ./my-model "Translate to German: …" "Write a poem about the sea."

Every prompt is decoded with `auto` and plainly, interleaved, and the outputs are compared.
"""

import argparse

from ssd_runtime import Engine, RunSettings

parser = argparse.ArgumentParser(description="Measure the gain on your own model.")
parser.add_argument("--model", default="demo")
parser.add_argument("--max-new-tokens", type=int, default=96)
parser.add_argument("prompts", nargs="*")
arguments = parser.parse_args()
prompts = arguments.prompts or [
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "Write a Python class with getters and setters for name, age and address.",
    "Name three rivers of Africa and the countries that they cross.",
]

engine = Engine.open(model=arguments.model)  # the first run measures the device, for half a minute
runner = engine.runner(RunSettings(max_new_tokens=arguments.max_new_tokens, compare=True))
for prompt in prompts:
    figures = runner.answer(prompt).to_json()
    print(
        f"{figures['tokens_per_second'] or 0:6.1f} tokens/s, plain {figures['plain_tokens_per_second'] or 0:6.1f}: "
        f"{figures['speedup'] or 1:.2f}x, output {'identical' if figures['identical'] else figures['divergence']}: "
        f"{prompt[:60]}"
    )
