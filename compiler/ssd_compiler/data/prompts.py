"""Splits the prompts of each domain between search, anchors and validation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from ssd_compiler.anchors.selection import representatives
from ssd_compiler.data.domains import Warn, packaged_prompts
from ssd_compiler.settings import MIN_PROMPTS, CompileSettings
from ssd_profiles.domain import domain_names, load_domain, starter_set
from ssd_profiles.errors import UserError
from ssd_profiles.prompts import read_prompts
from ssd_runtime.loading.loaded_model import LoadedModel, conversation
from ssd_runtime.model.family.families import max_context

OUT_OF_DOMAIN_PROMPTS = 6
"""Prompts of each packaged domain outside the bundle that serve as out-of-domain examples."""
DEFAULT_NEW_TOKENS = 64
"""Continuation length for the user's own domains, the same as for most domains in KNN-SSD."""

PromptFeatures = dict[str, list[float]]
Survey = Callable[[list[list[int]]], list[PromptFeatures]]
Conversation = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class DomainPrompts:
    """Token ids of a domain's prompts in three disjoint sets."""

    name: str
    max_new_tokens: int
    search: list[list[int]]
    anchors: list[list[int]]
    validation: list[list[int]]
    asked: list[list[int]]
    """The records of `anchors` in the phrasing of users, where it differs from the template with worked examples."""
    anchor_features: list[PromptFeatures]
    """Features of `anchors`; empty when none were computed."""


@dataclass(frozen=True, slots=True)
class PromptPool:
    """Token ids of a domain's prompts before the split, those of validation first."""

    name: str
    max_new_tokens: int
    search: int
    """Number of prompts for the search."""
    validation: int
    prompts: list[list[int]]
    asked: list[list[int] | None]
    """Each prompt in the phrasing of users, or None where it is the same."""


def read_pool(name: str, settings: CompileSettings, loaded: LoadedModel, warn: Warn) -> PromptPool:
    """Read the prompts of a packaged domain or of the user's file, encoded and shuffled by seed.

    Prompts that do not fit the model's context are dropped. Raises UserError when too few remain.
    """
    files = dict(settings.domain_files)
    asked: dict[Conversation, Conversation] = {}
    if name in files:
        new_tokens = DEFAULT_NEW_TOKENS
        prompts = [tuple(conversation(prompt)) for prompt in read_prompts(Path(files[name]))]
    else:
        definition = load_domain(name)
        new_tokens = min(definition.max_new_tokens, settings.max_new_tokens)
        wanted = settings.search_prompts + settings.anchor_prompts + settings.validation_prompts
        for way, (prompt, record) in enumerate(packaged_prompts(definition, wanted, warn)):
            asked[_user(prompt)] = _user(definition.ask(record, way))
        prompts = list(asked)
    random.Random(f"{settings.seed} {name}").shuffle(prompts)
    fitting = fitting_prompts(name, prompts, loaded, new_tokens)
    third = len(fitting) // 3
    search = min(settings.search_prompts, third)
    validation = min(settings.validation_prompts, third)
    used = fitting[: validation + search + settings.anchor_prompts]
    return PromptPool(
        name=name,
        max_new_tokens=new_tokens,
        search=search,
        validation=validation,
        prompts=[ids for _, ids in used],
        asked=[loaded.encode(asked[prompt]) if asked.get(prompt, prompt) != prompt else None for prompt, _ in used],
    )


def split_pool(pool: PromptPool, settings: CompileSettings, survey: Survey | None = None) -> DomainPrompts:
    """Split the pool into search, anchors and validation.

    `survey` computes features of prompts. With it, the search gets the prompts that represent the others best, by
    K-means (KNN-SSD §5.1); without it, the first ones.
    """
    rest = pool.prompts[pool.validation :]
    asked = pool.asked[pool.validation :]
    features = survey(rest) if survey is not None else []
    picked = _representative(features, settings, pool.search) if features else list(range(pool.search))
    others = [place for place in range(len(rest)) if place not in picked]
    return DomainPrompts(
        name=pool.name,
        max_new_tokens=pool.max_new_tokens,
        search=[rest[place] for place in picked],
        anchors=[rest[place] for place in others],
        validation=pool.prompts[: pool.validation],
        asked=[ids for place in others if (ids := asked[place]) is not None],
        anchor_features=[features[place] for place in others] if features else [],
    )


def out_of_domain_prompts(known: Sequence[str], loaded: LoadedModel) -> list[list[int]]:
    """Encode starter prompts of all packaged domains that are not `known`, in the phrasing of users."""
    found = list[list[int]]()
    for name in domain_names():
        if name not in known:
            definition = load_domain(name)
            records = starter_set(name).records[:OUT_OF_DOMAIN_PROMPTS]
            found += [loaded.encode(_user(definition.ask(record, way))) for way, record in enumerate(records)]
    return [ids for ids in found if len(ids) < max_context(loaded.model.config)]


def fitting_prompts(
    name: str, prompts: list[Conversation], loaded: LoadedModel, new_tokens: int
) -> list[tuple[Conversation, list[int]]]:
    """Encode the prompts and keep those that leave room for an answer in the model's context, each once.

    Raises UserError when too few fit, or when the model's chat template rejects one.
    """
    limit = max_context(loaded.model.config) - new_tokens
    # Texts that differ may be the same prompt to the model, and one must not serve both the search and the validation.
    different: dict[tuple[int, ...], Conversation] = {}
    try:
        for prompt in prompts:
            different.setdefault(tuple(loaded.encode(prompt)), prompt)
    except UserError as error:
        raise UserError(f"domain {name}: {error}") from None
    fitting = [(prompt, list(ids)) for ids, prompt in different.items() if len(ids) <= limit]
    if len(fitting) < MIN_PROMPTS:
        raise UserError(
            f"domain {name}: {len(different)} different prompts, of which {len(fitting)} fit this model's context; "
            f"at least {MIN_PROMPTS} are needed, so add some"
        )
    return fitting


def _representative(features: list[PromptFeatures], settings: CompileSettings, count: int) -> list[int]:
    rows = np.asarray([each[settings.feature] for each in features], np.float32)
    found: list[int] = representatives(rows, count, settings.seed).tolist()
    # One prompt may be nearest to two centres, so the rest is filled up.
    others = (place for place in range(len(rows)) if place not in found)
    return [*found, *islice(others, count - len(found))]


def _user(text: str) -> Conversation:
    return (("user", text),)
