"""Streams a chat from `ssd-serve` with OpenAI's client, then prints its speed and strategy.

ssd-serve --model demo --port 8000          # in another terminal
python examples/server_client.py --url http://127.0.0.1:8000/v1
"""

import argparse
import sys

from openai import APIConnectionError, OpenAI

parser = argparse.ArgumentParser(description="A client of ssd-serve.")
parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
parser.add_argument("--key", default="none", help="A key of `ssd-serve --api-key`.")
parser.add_argument("--max-new-tokens", type=int, default=96)
arguments = parser.parse_args()

client = OpenAI(base_url=arguments.url, api_key=arguments.key)
try:
    model = client.models.list().data[0].id
except APIConnectionError:
    sys.exit(f"error: no server at {arguments.url}; start it with: ssd-serve --model demo --port 8000")
stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Why is the sky blue?"}],
    max_tokens=arguments.max_new_tokens,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        figures = chunk.usage.model_extra["ssd"]
        print(f"\n{model}: {figures['tokens_per_second'] or 0:.1f} tokens/s with {figures['strategy']}")
