"""The filters of sampling, as transformers' `generate` has them."""

from __future__ import annotations

from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ssd_runtime.sampling.params import SamplingParams


def filters_of(sampling: SamplingParams) -> LogitsProcessorList:
    """Build the processors that depend on the scores alone, in `generate`'s order.

    They accept no int in place of a float.
    """
    filters = LogitsProcessorList()
    if sampling.random:
        if sampling.temperature != 1.0:
            filters.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_k > 0:
            filters.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            filters.append(TopPLogitsWarper(float(sampling.top_p)))
        if sampling.min_p > 0.0:
            filters.append(MinPLogitsWarper(float(sampling.min_p)))
    return filters
