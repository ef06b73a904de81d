"""Decodes prompts with llama.cpp, one per line of standard input, in an environment that has llama-cpp-python.

`bench.harness.peers.llama_cpp` starts it as a program of its own. It imports nothing of this project.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter


def main() -> None:
    """Read {"ids": …, "new": …} and write the seconds of decoding, the prompt's own left out."""
    from llama_cpp import Llama

    model = Llama(sys.argv[1], n_ctx=4096, n_threads=2, n_threads_batch=2, verbose=False)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        model.reset()
        model.eval(asked["ids"])
        began = perf_counter()
        for _ in range(asked["new"]):
            model.eval([model.sample(temp=0.0, top_k=1, repeat_penalty=1.0)])
        print(perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
