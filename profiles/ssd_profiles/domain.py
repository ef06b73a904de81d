"""Domains: what kind of prompts they hold, how those are phrased, and where they come from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ssd_profiles.errors import UserError

Record = Mapping[str, str]


class HubDataset(BaseModel):
    """Where the Hub keeps a domain's data set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    worked_examples: bool = True
    """Whether its records have the answers that worked examples need; else the package's examples are shown."""


class DomainDefinition(BaseModel):
    """A domain's YAML file: its data set, its prompt and the length of its continuations.

    `prompt`, `shot` and `asked` are Python format strings over the fields of a record; a prompt is `instruction`,
    then `shots` worked examples, then the record itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    title: str
    source: str
    """Which paper's settings these are."""
    dataset: HubDataset
    fields: dict[str, str]
    """Our field names to the data set's columns; a dot leads into a column that holds a mapping."""
    first_words: dict[str, int] = {}
    """Fields of which only so many words are kept."""
    instruction: str = ""
    shot: str
    prompt: str
    asked: list[str] = Field(min_length=1)
    """How people ask for the same without a template and worked examples."""
    shots: int = Field(ge=0)
    max_new_tokens: int = Field(gt=0)

    def render(self, record: Record, shots: list[Record]) -> str:
        """The prompt text of `record` behind the first `self.shots` of `shots`."""
        parts = [self.instruction] if self.instruction else []
        parts += [self.shot.format_map(shot) for shot in shots[: self.shots]]
        return "\n\n".join([*(part.strip() for part in parts), self.prompt.format_map(record).strip()])

    def ask(self, record: Record, way: int) -> str:
        """The record as people would send it, in one of several ways."""
        return self.asked[way % len(self.asked)].format_map(record).strip()

    def record(self, row: Mapping[str, Any]) -> Record:
        """Our fields of a row of the data set. Raises KeyError when the row lacks one."""
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
    """Records that ship with the package, for when the data set itself cannot be had."""

    records: list[Record]
    shots: list[Record]


def domain_names() -> list[str]:
    """The domains that come with the package."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _data("domains").iterdir())


def load_domain(name: str) -> DomainDefinition:
    """The definition of a packaged domain. Raises UserError naming those there are."""
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
    """The starter records and worked examples of a packaged domain."""
    return StarterSet(_records("starter", name), _records("shots", name))


def _records(folder: str, name: str) -> list[Record]:
    text = (_data(folder) / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _data(folder: str) -> Traversable:
    return resources.files("ssd_profiles") / folder
