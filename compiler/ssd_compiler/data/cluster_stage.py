"""The compile stage that finds domains in a file of unlabelled prompts."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import silhouette_score

from ssd_compiler.anchors.selection import Rows, k_means
from ssd_compiler.calibrate import features_of
from ssd_compiler.data.prompts import DEFAULT_NEW_TOKENS, fitting_prompts
from ssd_compiler.progress import Reporter
from ssd_compiler.settings import MIN_PROMPTS, CompileSettings
from ssd_compiler.workspace import Store
from ssd_profiles.prompts import read_prompts
from ssd_runtime.loading.loaded_model import LoadedModel, conversation
from ssd_runtime.model.decoder import Decoder

SHOWN = 60
MOST_PROMPTS = 512
"""Most prompts that are clustered. A domain needs a few dozen, and each prompt costs a prefill."""
MOST_CLUSTERS = 8
LEAST_SILHOUETTE = 0.1
"""Prompts form a single domain if the best partition's mean silhouette is below this."""


def find_domains(
    settings: CompileSettings, loaded: LoadedModel, decoder: Decoder, work: Store, reporter: Reporter
) -> tuple[tuple[str, str], ...]:
    """Cluster the prompts and write each cluster as a prompt file of the workspace.

    Returns (name, path) of each domain, largest first, named NAME-1, NAME-2, …
    """
    [(name, path)] = settings.domain_files
    every = [tuple(conversation(prompt)) for prompt in read_prompts(Path(path))]
    encoded = dict(fitting_prompts(name, every, loaded, DEFAULT_NEW_TOKENS))
    prompts = random.Random(settings.seed).sample(list(encoded), min(len(encoded), MOST_PROMPTS))

    def label() -> list[int]:
        with reporter.stage(f"{name}: find domains", len(prompts)) as tick:
            rows = features_of(decoder, [encoded[prompt] for prompt in prompts], tick)
        features = np.asarray([row[settings.feature] for row in rows], np.float32)
        found: list[int] = clusters(features, settings.clusters or None, settings.seed).tolist()
        return found

    labels = work.stage("clusters", label)
    count = max(labels) + 1
    if settings.clusters and count < settings.clusters:
        reporter.warn(f"domain {name}: {count} domains of at least {MIN_PROMPTS} prompts found, no more")
    files = []
    for number in range(count):
        members = [prompt for prompt, own in zip(prompts, labels, strict=True) if own == number]
        found = f"{name}-{number + 1}"
        reporter.note(f"{found}: {len(members)} prompts, such as {members[0][-1][1][:SHOWN]!r}")
        files.append((found, str(work.file(f"{found}.jsonl", partial(_lines, members)))))
    return tuple(files)


def _lines(members: list[tuple[tuple[str, str], ...]]) -> bytes:
    objects = ({"messages": [{"role": role, "content": text} for role, text in prompt]} for prompt in members)
    return "\n".join(json.dumps(each) for each in objects).encode()


def clusters(features: Rows, count: int | None, seed: int) -> NDArray[np.int64]:
    """Cluster features [prompts, d] and return each prompt's cluster number; 0 is the largest cluster.

    K-means runs on centred directions, whose distance corresponds to the cosine of routing. Without `count`, the number
    of clusters up to `MOST_CLUSTERS` with the highest mean silhouette is used. Clusters too small for a domain are
    merged into the nearest large one.
    """
    centred = features - features.mean(0)
    rows = centred / np.linalg.norm(centred, axis=1, keepdims=True).clip(1e-12)
    most = max(1, len(rows) // MIN_PROMPTS)
    if count is not None:
        return _assigned(rows, min(count, most), seed)
    found = [_assigned(rows, n, seed) for n in range(2, min(MOST_CLUSTERS, most) + 1)]
    scored = [(float(silhouette_score(rows, labels)), labels) for labels in found if len(set(labels.tolist())) > 1]
    best = max(scored, key=lambda each: each[0], default=None)
    return best[1] if best is not None and best[0] >= LEAST_SILHOUETTE else np.zeros(len(rows), np.int64)


def _assigned(rows: Rows, count: int, seed: int) -> NDArray[np.int64]:
    means = k_means(rows, count, seed)
    sizes = np.bincount(means.labels_, minlength=count)
    large = [int(i) for i in np.argsort(-sizes, kind="stable") if sizes[i] >= MIN_PROMPTS] or [int(sizes.argmax())]
    distances = np.linalg.norm(rows[:, None] - means.cluster_centers_[large][None], axis=-1)
    nearest = distances.argmin(1)
    by_size = np.argsort(-np.bincount(nearest, minlength=len(large)), kind="stable")
    return np.argsort(by_size)[nearest].astype(np.int64)
