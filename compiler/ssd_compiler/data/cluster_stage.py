"""The compile stage that finds domains in a file of unlabelled prompts."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ssd_compiler.calibrate import features_of
from ssd_compiler.data.clusters import clusters
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


@dataclass(frozen=True, slots=True)
class ClusterStage:
    """Clusters the prompts of one file into domains."""

    loaded: LoadedModel
    decoder: Decoder
    work: Store
    reporter: Reporter

    def find(self, settings: CompileSettings) -> tuple[tuple[str, str], ...]:
        """Cluster the prompts and write each cluster as a prompt file of the workspace.

        Returns (name, path) of each domain, largest first, named NAME-1, NAME-2, …
        """
        [(name, path)] = settings.domain_files
        every = list(dict.fromkeys(tuple(conversation(prompt)) for prompt in read_prompts(Path(path))))
        encoded = dict(fitting_prompts(name, every, self.loaded, DEFAULT_NEW_TOKENS))
        prompts = random.Random(settings.seed).sample(list(encoded), min(len(encoded), MOST_PROMPTS))

        def label() -> list[int]:
            with self.reporter.stage(f"{name}: find domains", len(prompts)) as tick:
                rows = features_of(self.decoder, [encoded[prompt] for prompt in prompts], tick)
            features = np.asarray([row[settings.feature] for row in rows], np.float32)
            found: list[int] = clusters(features, settings.clusters or None, settings.seed).tolist()
            return found

        labels = self.work.stage("clusters", label)
        count = max(labels) + 1
        if settings.clusters and count < settings.clusters:
            self.reporter.warn(f"domain {name}: {count} domains of at least {MIN_PROMPTS} prompts found, no more")
        files = []
        for number in range(count):
            members = [prompt for prompt, own in zip(prompts, labels, strict=True) if own == number]
            found = f"{name}-{number + 1}"
            self.reporter.note(f"{found}: {len(members)} prompts, such as {members[0][-1][1][:SHOWN]!r}")
            files.append((found, str(self.work.file(f"{found}.jsonl", partial(_lines, members)))))
        return tuple(files)


def _lines(members: list[tuple[tuple[str, str], ...]]) -> bytes:
    objects = ({"messages": [{"role": role, "content": text} for role, text in prompt]} for prompt in members)
    return "\n".join(json.dumps(each) for each in objects).encode()
