"""The choice of tokens from logits."""

from ssd_runtime._moved import moved

PLACES = {"Sampling": "ssd_runtime.sampling.params:SamplingParams", "GREEDY": "ssd_runtime.sampling.params:GREEDY"}
__getattr__ = moved(__name__, PLACES)
