"""Loads the prompts of packaged domains, from data sets on the Hub or from the package's starter sets."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from ssd_artifacts.sharing.reachable import hub_reachable
from ssd_profiles.domain import DomainDefinition, Record, starter_set

Warn = Callable[[str], None]


def packaged_prompts(definition: DomainDefinition, wanted: int, warn: Warn) -> list[tuple[str, Record]]:
    """Load `wanted` records of a domain and render each as a prompt.

    Records come from the Hub's data set, else from the starter set, which may hold fewer; `warn` is told so, in the
    same words for all domains.
    """
    try:
        records, shots = _from_hub(definition, wanted)
    except _UnreachableError as error:
        starter = starter_set(definition.name)
        records = starter.records
        shots = starter.shots
        warn(f"starter prompts that come with the package, as the data set cannot be loaded ({error})")
    return [(definition.render(record, shots), record) for record in records]


class _UnreachableError(Exception):
    """The Hub cannot be reached, or the library that reads its data sets is not installed."""


def _from_hub(definition: DomainDefinition, wanted: int) -> tuple[list[Record], list[Record]]:
    try:
        import datasets
    except ImportError:
        raise _UnreachableError("pip install datasets would allow it") from None
    if not hub_reachable():
        raise _UnreachableError("no connection to the Hub")
    source = definition.dataset
    own = definition.shots if definition.dataset.worked_examples else 0
    try:
        rows = datasets.load_dataset(
            source.name, source.config, split=source.split, revision=source.revision, streaming=True
        )
        records = [definition.record(row) for row in islice(rows, wanted + own)]
    except Exception as error:  # the library raises many kinds of network error
        raise _UnreachableError(type(error).__name__) from None
    return records[own:], records[:own] if source.worked_examples else starter_set(definition.name).shots
