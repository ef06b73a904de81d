"""Streams one sampled answer, then decodes several prompts at once.

python examples/stream_and_sample.py --model ./my-model
"""

import argparse
from functools import partial

from ssd_runtime import Engine, RunSettings, SamplingParams

parser = argparse.ArgumentParser(description="Streaming, sampling and several prompts at once.")
parser.add_argument("--model", default="demo")
parser.add_argument("--max-new-tokens", type=int, default=64)
arguments = parser.parse_args()

engine = Engine.open(model=arguments.model)

# A seed's output does not depend on the strategy: it is what plain decoding draws with that seed.
settings = RunSettings(
    max_new_tokens=arguments.max_new_tokens,
    sampling=SamplingParams(temperature=0.8, top_p=0.95, seed=7),
)
runner = engine.runner(settings, write=partial(print, end="", flush=True))
runner.answer("Write a haiku about the sea.")  # the text is printed as it comes
print("\n")

# Up to `max_sequences` prompts share every forward of the model; the answers are those of one by one.
engine.max_sequences = 4
questions = ["Why is the sky blue?", "Why is the sea salty?", "What is a glacier?"]
for answer in engine.generate(questions, RunSettings(max_new_tokens=arguments.max_new_tokens)):
    print(f"{answer.prompt.turns[0]}\n  {answer.text.strip()}\n")
