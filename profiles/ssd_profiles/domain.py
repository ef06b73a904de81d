"""Packaged domains: their data sets, prompt templates and starter prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError

from ssd_profiles.errors import UserError

Record = Mapping[str, str]


class HubDataset(BaseModel, extra="forbid", frozen=True):
    """Location of a domain's data set on the Hub."""

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    worked_examples: bool = True
    """Whether its records have the answers that worked examples need; otherwise the package's examples are used."""


class DomainDefinition(BaseModel, extra="forbid", frozen=True):
    """Schema of a domain's YAML file: its data set, prompt template and continuation length.

    `prompt`, `shot` and `asked` are Python format strings over the fields of a record. A prompt is `instruction`, then
    `shots` worked examples, then the record itself.
    """

    name: str
    title: str
    source: str
    """Paper whose settings these are."""
    dataset: HubDataset
    fields: dict[str, str]
    """Field names to columns of the data set; a dot descends into a column that holds a mapping."""
    first_words: dict[str, int] = {}
    """Fields that are cut to this many words."""
    instruction: str = ""
    shot: str
    prompt: str
    asked: list[str] = Field(min_length=1)
    """Phrasings in which users ask for the same without template and worked examples."""
    shots: int = Field(ge=0)
    max_new_tokens: int = Field(gt=0)

    def render(self, record: Record, shots: list[Record]) -> str:
        """Format `record` as a prompt, preceded by the first `self.shots` of `shots` as worked examples."""
        parts = [self.instruction] if self.instruction else []
        parts += [self.shot.format_map(shot) for shot in shots[: self.shots]]
        return "\n\n".join([*(part.strip() for part in parts), self.prompt.format_map(record).strip()])

    def ask(self, record: Record, way: int) -> str:
        """Format the record as a user would phrase it; `way` selects among the phrasings, modulo their number."""
        return self.asked[way % len(self.asked)].format_map(record).strip()

    def record(self, row: Mapping[str, Any]) -> Record:
        """Convert a row of the data set to a record. Raises KeyError when a column is missing."""
        found = {}
        for ours, theirs in self.fields.items():
            value: Any = row
            for part in theirs.split("."):
                value = value[part]
            words = self.first_words.get(ours)
            found[ours] = str(value) if words is None else " ".join(str(value).split()[:words])
        return found


@dataclass(frozen=True, slots=True)
class StarterSet:
    """Records shipped with the package, for use when the data set cannot be loaded."""

    records: list[Record]
    shots: list[Record]


def domain_names() -> list[str]:
    """Names of the packaged domains."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _data("domains").iterdir())


def load_domain(name: str) -> DomainDefinition:
    """Load a packaged domain. Raises UserError that lists the known ones."""
    if name not in domain_names():
        raise UserError(
            f"unknown domain {name!r}: known are {', '.join(domain_names())}; "
            f"for your own prompts use --domain-file {name}=prompts.jsonl"
        )
    text = (_data("domains") / f"{name}.yaml").read_text(encoding="utf-8")
    try:
        return DomainDefinition.model_validate(yaml.safe_load(text))
    except ValidationError as error:
        raise ValueError(f"packaged domain {name} is damaged: {error}") from error


def starter_set(name: str) -> StarterSet:
    """Load the starter records and worked examples of a packaged domain."""
    return StarterSet(_records("starter", name), _records("shots", name))


def _records(folder: str, name: str) -> list[Record]:
    text = (_data(folder) / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _data(folder: str) -> Traversable:
    return resources.files("ssd_profiles") / folder
