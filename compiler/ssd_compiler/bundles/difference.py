"""Lists the differences between two bundles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ssd_artifacts.bundle import Bundle
from ssd_artifacts.domain_config import DomainConfig
from ssd_compiler.report.summary import speedup_text

MODEL_PARTS = ("name", "revision", "architecture", "num_layers", "dtype", "quantization")
HASHES = {"config": ("config",), "tokenizer": ("tokenizer",), "weights": ("weights", "weights_sample")}


def differences(one: Bundle, other: Bundle) -> list[str]:
    """Sentences on what differs, the model first; empty where the bundles say the same."""
    return [*_model(one, other), *_domains(one, other), *_parts(one, other)]


def _model(one: Bundle, other: Bundle) -> Iterator[str]:
    yield from (f"model.{part}: {change}" for part, change in _changes(one.model, other.model, MODEL_PARTS))
    for part, hashes in HASHES.items():
        if any(getattr(one.model, f"{name}_sha256") != getattr(other.model, f"{name}_sha256") for name in hashes):
            yield f"model: other {part}"
    yield from (f"{part}: {change}" for part, change in _changes(one, other, ("tool_version", "created")))


def _domains(one: Bundle, other: Bundle) -> Iterator[str]:
    for name in one.domains.keys() - other.domains.keys():
        yield f"{name}: in the first alone"
    for name in other.domains.keys() - one.domains.keys():
        yield f"{name}: in the second alone"
    layers = one.model.num_layers
    for name in sorted(one.domains.keys() & other.domains.keys()):
        before, after = one.domains[name], other.domains[name]
        if before == after:
            continue
        yield from (f"{name}: {line}" for line in _domain(before, after, layers, other.model.num_layers))


def _domain(before: DomainConfig, after: DomainConfig, layers: int, other_layers: int) -> Iterator[str]:
    if before.choice != after.choice or before.frontier != after.frontier:
        first, second = (
            config.frontier[config.choice.entry].sub_layer_plan(of) if config.choice is not None else None
            for config, of in ((before, layers), (after, other_layers))
        )
        if first is not None and second is not None:
            shared = f", {first.jaccard(second):.0%} shared" if layers == other_layers else ""
            yield f"chosen mask skips {len(list(first))} → {len(list(second))} sub-layers{shared}"
        else:
            yield f"a chosen mask: {'yes' if first else 'no'} → {'yes' if second else 'no'}"
        yield f"frontier of {len(before.frontier)} → {len(after.frontier)} masks"
    if before.choice is not None and after.choice is not None:
        parts = ("draft_length", "threshold", "predicted_speedup")
        yield from map(" ".join, _changes(before.choice, after.choice, parts))
    yield from map(" ".join, _changes(before, after, ("context", "oracle_speedup", "pays")))
    if before.validation != after.validation:
        yield f"measured {_measured(before)} → {_measured(after)}"
    if before.exit != after.exit:
        yield "other exits"
    if before.search != after.search:
        yield "another search"


def _changes(before: object, after: object, parts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The parts that differ, each with a text of both values."""
    for part in parts:
        old, new = getattr(before, part), getattr(after, part)
        if old != new:
            yield part, f"{old} → {new}"


def _measured(config: DomainConfig) -> str:
    return speedup_text(config.validation) if config.validation is not None else "nothing"


def _parts(one: Bundle, other: Bundle) -> Iterator[str]:
    old, new = one.anchors, other.anchors
    if replace(old, others=new.others, other_labels=new.other_labels).to_bytes() != new.to_bytes():
        yield f"anchors: {len(old.features)} → {len(new.features)}, with other vectors or labels"
    if old.others.tobytes() != new.others.tobytes():
        yield f"further prompts for later domains: {len(old.others)} → {len(new.others)}"
    for name in ("exits", "successors"):
        before, after = getattr(one, name), getattr(other, name)
        if (before.to_bytes() if before is not None else b"") != (after.to_bytes() if after is not None else b""):
            yield f"{name}: {'some' if before is not None else 'none'} → {'others' if after is not None else 'none'}"
    if one.report != other.report:
        yield "report.json: another one"
    for slug in sorted(one.latency.keys() ^ other.latency.keys()):
        yield f"latency/{slug}.json: in the {'first' if slug in one.latency else 'second'} alone"
    for slug in sorted(one.latency.keys() & other.latency.keys()):
        if one.latency[slug].to_json() != other.latency[slug].to_json():
            yield f"latency/{slug}.json: other times"
