"""The schema of `domains/NAME.yaml`: a domain's frontier of masks, the compiler's choice and its validation."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field, model_validator

from ssd_artifacts.fingerprint import MAX_LAYERS
from ssd_profiles.acceptance import AcceptanceProfile
from ssd_profiles.mask import SubLayerPlan
from ssd_profiles.printable import Printable

MIXTURE = "mix"
"""Name of the domain that stands for all domains together."""
MAX_FRONTIER, MAX_PROGRESS = 64, 4096
MAX_CONCURRENCY = 256
MAX_DRAFT = 64
"""Longest draft that a bundle may plan."""
Finite = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
# The bound is far above anything measurable, so that planning with such numbers cannot overflow.
Speedup = Annotated[float, Field(ge=0.0, le=1e6)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Seconds = Annotated[float, Field(ge=0.0, le=1e12)]
MAX_CONTEXT = 1 << 30
# One hexadecimal digit holds two layers, or for precisions a layer and a bit of the head.
MaskText = Annotated[
    str, Field(pattern=r"^[0-9a-f]+(\.[0-9a-f]+\.[0-9a-f]+)?$", max_length=3 * (MAX_LAYERS // 2 + 1) + 2)
]
"""A mask as `SubLayerPlan.hex` writes it."""
Origin = Annotated[str, Field(max_length=64)]


class FrontierEntry(BaseModel, extra="forbid", frozen=True):
    """One mask of a domain's frontier and its acceptance on calibration text.

    `tokens` and `steps` [draft_lengths, thresholds] are tokens and draft steps per cycle. A cycle drafts at least one
    token and yields one more than it accepts. `draft_lengths` and `thresholds` ascend.
    """

    mask: MaskText
    origin: Printable
    """Name of the search that found the mask: knapsack, light, uniform, random, bayesian or self-sd."""
    token_agreement: Share
    draft_cost: Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
    """Draft step ÷ plain step, on the compiling device at the domain's context length."""
    draft_lengths: list[Annotated[int, Field(gt=0, le=MAX_DRAFT)]] = Field(min_length=1, max_length=64)
    thresholds: list[Share] = Field(min_length=1, max_length=64)
    tokens: list[list[Finite]]
    steps: list[list[Finite]]

    @model_validator(mode="after")
    def _profile_is_possible(self) -> FrontierEntry:
        for name, grid in (("draft_lengths", self.draft_lengths), ("thresholds", self.thresholds)):
            if any(after <= before for before, after in pairwise(grid)):
                raise ValueError(f"{name}: expected ascending numbers")
        for name, values, bonus in (("tokens", self.tokens, 1), ("steps", self.steps, 0)):
            if [len(row) for row in values] != [len(self.thresholds)] * len(self.draft_lengths):
                raise ValueError(f"{name}: expected {len(self.draft_lengths)} rows of {len(self.thresholds)} numbers")
            for length, row in zip(self.draft_lengths, values, strict=True):
                if not all(1.0 <= value <= length + bonus for value in row):
                    raise ValueError(f"{name}: expected 1 to {length + bonus} per cycle for draft length {length}")
        return self

    @classmethod
    def of(cls, mask: SubLayerPlan, origin: str, profile: AcceptanceProfile, draft_cost: float) -> FrontierEntry:
        """Build the entry of an evaluated mask; `draft_cost` is a draft step ÷ a plain step."""
        return cls(
            mask=mask.hex(),
            origin=origin,
            token_agreement=round(profile.token_agreement, 5),
            draft_cost=round(draft_cost, 5),
            draft_lengths=list(profile.draft_lengths),
            thresholds=list(profile.thresholds),
            tokens=[[round(float(v), 4) for v in row] for row in profile.tokens],
            steps=[[round(float(v), 4) for v in row] for row in profile.steps],
        )

    def sub_layer_plan(self, num_layers: int) -> SubLayerPlan:
        """Decode the mask. Raises ValueError when it is not a mask of `num_layers` layers."""
        return SubLayerPlan.from_hex(self.mask, num_layers)

    def profile(self) -> AcceptanceProfile:
        """The acceptance profile of this mask."""
        return AcceptanceProfile(
            token_agreement=self.token_agreement,
            tokens=np.asarray(self.tokens, float),
            steps=np.asarray(self.steps, float),
            draft_lengths=tuple(self.draft_lengths),
            thresholds=tuple(self.thresholds),
        )


class Choice(BaseModel, extra="forbid", frozen=True):
    """The frontier entry, draft length and confidence threshold that the compiler settled on."""

    entry: int = Field(ge=0)
    draft_length: int = Field(gt=0, le=64)
    threshold: Share
    predicted_speedup: Speedup
    """0 in a bundle that was adopted for another model, which nobody predicted it for."""


class LoadValidation(BaseModel, extra="forbid", frozen=True):
    """Timed decoding with several sequences at once, speculative and plain in turn."""

    concurrency: int = Field(ge=2, le=MAX_CONCURRENCY)
    speedup: Speedup
    """Tokens per second of all sequences together ÷ those of plain decoding with as many."""
    speedup_interval: tuple[Finite, Finite]
    """95% interval over rounds, by Student's t."""
    identical: bool


class Validation(BaseModel, extra="forbid", frozen=True):
    """Timed decoding of prompts that the search never saw, speculative and plain interleaved."""

    prompts: Count
    new_tokens: Count
    speedup: Speedup
    speedup_interval: tuple[Finite, Finite]
    """95% interval over prompts, by Student's t."""
    mean_acceptance_length: Annotated[float, Field(ge=0.0, le=1e3)]
    draft_acceptance_rate: Share
    identical: bool
    under_load: tuple[LoadValidation, ...] = Field(default=(), max_length=MAX_CONCURRENCY)
    """Validations by ascending concurrency; empty if only one sequence at a time was timed."""

    @model_validator(mode="after")
    def _loads_ascend(self) -> Validation:
        loads = [each.concurrency for each in self.under_load]
        if any(after <= before for before, after in pairwise(loads)):
            raise ValueError("under_load: expected ascending concurrency")
        return self


class SearchCost(BaseModel, extra="forbid", frozen=True):
    """Cost of the search for the frontier."""

    seconds: Seconds
    evaluations: Count
    target_forwards: Annotated[float, Field(ge=0.0, le=1e12)]
    """Work in full forwards of the calibration rows: a forward that skips half of the model counts one half."""
    progress: list[tuple[Seconds, Speedup]] = Field(default=[], max_length=MAX_PROGRESS)
    """Pairs of seconds since the search began and best predicted speed-up, one for each improvement."""
    rated: list[tuple[MaskText, Origin, Speedup]] = Field(default=[], max_length=MAX_PROGRESS)
    """Every mask that was rated: the mask, the name of the search that found it, and its predicted speed-up. Masks that
    were much slower than the best one on the first texts were not tried on the others: theirs is an estimate."""


class ExitChoice(BaseModel, extra="forbid", frozen=True):
    """Early-exit drafting of this domain, tuned on calibration text (SpecBound §2)."""

    stops: list[Annotated[int, Field(ge=1, le=MAX_LAYERS)]] = Field(min_length=1, max_length=MAX_LAYERS)
    """Layers after which a token may exit; the last one is the depth bound."""
    width: int = Field(gt=0, le=64)
    threshold: Share
    annealing: Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
    predicted_speedup: Speedup

    @model_validator(mode="after")
    def _ascending(self) -> ExitChoice:
        if self.stops != sorted(set(self.stops)):
            raise ValueError("stops: expected layers in ascending order")
        return self


class DomainConfig(BaseModel, extra="forbid", frozen=True):
    """Schema of `domains/NAME.yaml`."""

    name: Printable
    context: int = Field(ge=0, le=MAX_CONTEXT)
    """Context length in tokens for which the choice and the draft costs hold."""
    frontier: list[FrontierEntry] = Field(max_length=MAX_FRONTIER)
    choice: Choice | None
    """None when no mask was evaluated."""
    oracle_speedup: Speedup
    """Best speed-up of any evaluated mask on the compiling device if every draft stopped just before its first wrong
    token; 0 in an adopted bundle."""
    pays: bool
    """Whether validation was faster than plain decoding, beyond doubt: by the lower end of its interval."""
    validation: Validation | None
    search: SearchCost
    exit: ExitChoice | None = None
    """None where no exit heads were fitted."""

    @model_validator(mode="after")
    def _choice_exists(self) -> DomainConfig:
        if self.choice is None:
            return self
        if self.choice.entry >= len(self.frontier):
            raise ValueError(f"choice.entry: {self.choice.entry} of a frontier of {len(self.frontier)}")
        entry = self.frontier[self.choice.entry]
        if self.choice.draft_length not in entry.draft_lengths or self.choice.threshold not in entry.thresholds:
            raise ValueError("choice: expected a draft length and a threshold of the entry's acceptance profile")
        return self
