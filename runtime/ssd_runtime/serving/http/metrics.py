"""Prometheus metrics of a server: vLLM's names where vLLM has the metric, and `ssd:` names of our own."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ssd_runtime.engine.observed import Observation
from ssd_runtime.serving.http.pending import FINISH_REASONS, End, PendingRequest

log = logging.getLogger("ssd_serve")
MOST_REASONS = 48
"""Distinct reasons of plans that are counted separately; later ones are counted as `other`."""
SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class Metrics:
    """Counts what an engine's thread does; every instance has a registry of its own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._name = model_name
        self._reasons: set[str] = set()
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Drafts that were verified.")
        self._draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Tokens drafted.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.")
        self._accepted_at = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by position in the draft, from 0.",
            "position",
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of ended requests.")
        self._new_tokens = self._counter("vllm:generation_tokens", "New tokens, those of cancelled requests included.")
        self._prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._finished = self._counter("vllm:request_success", "Requests that ended with an answer.", "finished_reason")
        self._ended = self._counter(
            "ssd:requests_without_answer", "Requests that were cancelled, failed or refused.", "why"
        )
        self._cycles = self._counter(
            "ssd:steps", "Cycles by the source of drafts that was chosen, and why.", "source", "reason"
        )
        self._forwards = self._counter("ssd:target_forwards", "Forwards of the full model, counted once per request.")
        self._spent = self._counter("ssd:loss_budget_spent_plain_steps", "Loss budget spent by `auto`, in plain steps.")
        self._reloads = self._counter("ssd:bundle_reloads", "Bundles taken up or refused.", "result")
        self._credit_left = self._gauge(
            "ssd:loss_budget_credit_plain_steps", "Loss budget of the request that was planned last."
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Seconds from a request to its first token, waiting included.", SECONDS
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean seconds per token after the first.", TOKEN_SECONDS
        )
        between = "Seconds since the token before, for every token after the first; tokens of one step share its time."
        self._between = self._histogram("vllm:inter_token_latency_seconds", between, TOKEN_SECONDS)
        # vLLM's former name of `vllm:inter_token_latency_seconds`, which dashboards still use.
        self._between_by_former_name = self._histogram("vllm:time_per_output_token_seconds", between, TOKEN_SECONDS)
        self._whole = self._histogram("vllm:e2e_request_latency_seconds", "Seconds of a whole request.", SECONDS)
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Seconds until a request's first step.", SECONDS
        )
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "Seconds of a request's prefill.", SECONDS)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "Seconds of a request's decoding.", SECONDS)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        """This model's counter; with further `labels`, one whose `labels()` takes the model and their values."""
        found = Counter(name, help_text, ["model_name", *labels], registry=self.registry)
        return found if labels else found.labels(self._name)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        kind = Histogram(name, help_text, ["model_name"], buckets=buckets, registry=self.registry)
        return kind.labels(self._name)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(name, help_text, ["model_name"], registry=self.registry).labels(self._name)

    def gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read whenever the metrics are."""
        self._gauge(name, help_text).set_function(read)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def on_cycle(self, observation: Observation) -> None:
        """Count a cycle's drafts, what was chosen and why, and the loss budget."""
        cycle = observation.cycle
        self._forwards.inc()
        self._new_tokens.inc(len(cycle.tokens))
        if cycle.num_draft_tokens:
            self._drafts.inc()
            self._draft_tokens.inc(cycle.num_draft_tokens)
            self._accepted.inc(cycle.num_accepted_tokens)
            for position in range(cycle.num_accepted_tokens):
                self._accepted_at.labels(self._name, position).inc()
        reason = self._reason(cycle.plan.reason)
        self._cycles.labels(self._name, source_of(cycle.plan.reason, cycle.plan.mask is not None), reason).inc()
        if observation.credit is not None:
            self._spent.inc(observation.spent)
            self._credit_left.set(observation.credit)

    def _reason(self, reason: str) -> str:
        """A plan's reason without its figures, so that there are few of them."""
        phrase = re.sub(r"\d+(\.\d+)?", "N", reason)
        if phrase not in self._reasons and len(self._reasons) >= MOST_REASONS:
            return "other"
        self._reasons.add(phrase)
        return phrase

    def on_tokens(self, tokens: int, seconds: float) -> None:
        """Count the seconds between tokens."""
        for _ in range(tokens):
            self._between.observe(seconds / tokens)
            self._between_by_former_name.observe(seconds / tokens)

    def on_end(self, pending: PendingRequest, end: End) -> None:
        """Count a request and its times."""
        if pending.first is not None:
            self._new_tokens.inc()  # the first token comes from the prefill, not from a cycle
        if end.outcome is None:
            self.count_without_answer("cancelled" if end.cancelled else "failed")
            if end.error is not None:
                log.error("a request failed: %s: %s", type(end.error).__name__, end.error)
            return
        generation = end.outcome.generation
        self._finished.labels(self._name, FINISH_REASONS[generation.finish_reason]).inc()
        self._prompt_tokens.inc(generation.prompt_tokens)
        self._prefix_queries.inc(generation.prompt_tokens)
        self._prefix_hits.inc(generation.num_cached_tokens)
        self._prefill.observe(generation.prefill_seconds)
        self._decode.observe(generation.decode_seconds)
        assert pending.ended is not None, "the request has ended"
        self._whole.observe(pending.ended - pending.submitted)
        if pending.begun is not None:
            self._queue.observe(pending.begun - pending.submitted)
        if (first := pending.seconds_to_first_token) is not None:
            self._first_token.observe(first)
        if pending.first is not None and generation.decoded > 1:
            self._per_token.observe((pending.ended - pending.first) / (generation.decoded - 1))

    def on_defect(self, error: Exception) -> None:
        """Log an error that belongs to no request."""
        log.error("a defect: %s: %s", type(error).__name__, error)

    def count_without_answer(self, why: str) -> None:
        """Count a request that was cancelled, failed or refused."""
        self._ended.labels(self._name, why).inc()

    def count_reload(self, result: str) -> None:
        """Count a bundle that was `taken_up` or `refused`."""
        self._reloads.labels(self._name, result).inc()


def source_of(reason: str, masked: bool) -> str:
    """The source of a plan's drafts, one of a few words."""
    if masked:
        return "masked"
    named = (source for source in ("plain", "light", "mtp", "lookup") if reason.startswith(source))
    return next(named, "early_exit")
