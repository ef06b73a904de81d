"""Decodes inside transformers' own `generate`, with its processors, criteria and streamers.

The prompt counts upward, so guesses are nearly always right; try a prompt of your own.

python examples/transformers_generate.py --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

import argparse
import time

from transformers import AutoModelForCausalLM, AutoTokenizer

from ssd_runtime import CustomGenerate

parser = argparse.ArgumentParser(description="Self-speculation inside transformers' generate.")
parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="Hub id or folder.")
parser.add_argument("--max-new-tokens", type=int, default=96)
arguments = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(arguments.model, padding_side="left", trust_remote_code=False)
model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="float32", trust_remote_code=False)
inputs = tokenizer("1, 2, 3, 4, 5, 6, 7, 8,", return_tensors="pt")
options = {"max_new_tokens": arguments.max_new_tokens, "do_sample": False}

fast = CustomGenerate(tokenizer=tokenizer)  # or CustomGenerate("bundle", …); keep it, it holds what is learned
model.generate(**inputs, **options, custom_generate=fast)  # the first call measures the device


def timed(**how):
    """The output of `generate` and its seconds."""
    began = time.perf_counter()
    ids = model.generate(**inputs, **options, **how)
    return ids, time.perf_counter() - began


stock, stock_seconds = timed()
ours, our_seconds = timed(custom_generate=fast)
print(tokenizer.decode(ours[0], skip_special_tokens=True))
print(f"{stock_seconds:.2f} s by transformers, {our_seconds:.2f} s with CustomGenerate; identical: {stock.equal(ours)}")
