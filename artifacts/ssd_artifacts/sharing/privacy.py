"""Names the parts of a bundle that come from its prompts and its machine, and leaves them out if asked."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from ssd_artifacts.bundle import ANCHORS, SUCCESSORS, Bundle
from ssd_artifacts.manifest import REPORT


def private_parts(bundle: Bundle) -> list[str]:
    """Sentences on what leaves the machine with a bundle, one for each part."""
    anchors = bundle.anchors
    parts = [f"{ANCHORS}: vectors of {len(anchors.features)} prompts, by which prompts find their domain"]
    if len(anchors.others):
        parts.append(f"{ANCHORS}: vectors of {len(anchors.others)} more prompts, for domains that join later")
    if bundle.successors is not None:
        parts.append(
            f"{SUCCESSORS}: {len(bundle.successors.pairs)} token pairs, which give back much of the calibration text"
        )
    if bundle.report is not None:
        parts.append(f"{REPORT}: the options of the compile, with paths on the machine that made it")
    if os.path.isabs(bundle.model.name):
        parts.append(f"manifest.yaml: the model's path, {bundle.model.name}")
    parts.append("latency: the names of the devices that it was measured on")
    return parts


def stripped(bundle: Bundle) -> Bundle:
    """The bundle without its optional parts.

    Token pairs, the vectors that only joining domains need, the report and the folder of the model's path are left
    out. `auto` then begins a stream without guesses. Anchors, latencies and figures stay.
    """
    name = bundle.model.name
    # A leading dot keeps a folder's name from being taken for a Hub id.
    name = f"./{Path(name).name}" if os.path.isabs(name) else name
    anchors = bundle.anchors
    return replace(
        bundle,
        model=bundle.model.model_copy(update={"name": name}),
        anchors=replace(anchors, others=anchors.others[:0], other_labels=anchors.other_labels[:0]),
        report=None,
        successors=None,
    )
