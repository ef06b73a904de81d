"""Metrics of several replicas in one text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


class _Replicas(Collector):
    """The metrics of replicas, with a label that tells which."""

    def __init__(self, texts: Sequence[tuple[str, str]]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        """The metrics, each with the samples of all replicas."""
        found = dict[str, Metric]()
        for replica, text in self._texts:
            for family in text_string_to_metric_families(text):
                metric = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                metric.samples += [
                    Sample(each.name, {**each.labels, "replica": replica}, each.value) for each in family.samples
                ]
        yield from found.values()


def merged(texts: Sequence[tuple[str, str]], own: CollectorRegistry) -> bytes:
    """The metrics of replicas, given as names and texts, and those of `own`, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Replicas(texts))
    return generate_latest(own) + generate_latest(registry)
