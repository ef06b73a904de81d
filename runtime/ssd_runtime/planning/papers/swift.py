"""SWIFT tries masks on the tokens that the model has just generated, and keeps the best for the stream of requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.drafting.chain import CHAIN, Branching
from ssd_runtime.model.runner import Work
from ssd_runtime.planning.light import require_copies
from ssd_runtime.planning.papers.recent import RecentStates
from ssd_runtime.planning.plan import Cycle, Plan, Planner
from ssd_runtime.planning.settings import SwiftSettings
from ssd_runtime.planning.strategy import MakePlanner, StrategyInputs
from ssd_runtime.search.gaussian import MOST, coded, most_promising
from ssd_runtime.search.replay import ReferenceStates, replaying
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.session import Session

TREE: Branching = ((0.5, 10), (0.8, 5), (0.95, 3), (1.0, 1))
"""Candidates per place, by the probability of its token (SWIFT §4.2)."""
SKIP_STEP = 0.05
JUDGED = 64
"""Draft steps after which the acceptance rate is compared with `acceptance`."""
DOUBT = 2.0
"""A search begins again if its mask's score falls by `DOUBT` standard errors on new tokens."""
LOOK_EVERY = 256
"""Tokens of the stream between two scorings of a finished search's mask. A scoring and its window's targets take about
two plain steps: less than 1% of the time up to 1.28 times plain decoding's speed."""
LATER = 512
"""Tokens of a request after which its masks are compared on newer ones: sliding layers keep the keys since."""
POOL = 256
"""Number of masks that the Gaussian process chooses from."""


@dataclass(slots=True)
class SwiftSearch:
    """The search of one stream of requests. It outlives a request: this is the planner's declared state.

    One request at a time searches. While the search goes on, the best mask is scored again on each of them, so that an
    easy prompt cannot block later ones. Scores of the other masks move by the same amount. A finished search's mask is
    scored again every `LOOK_EVERY` tokens.
    """

    num_layers: int
    settings: SwiftSettings
    light: SubLayerPlan | None = None
    """The bits in which sub-layers may run; None to run them in full."""
    best: SubLayerPlan = field(init=False)
    score: float = 0.0
    """The best mask's matchness on the current request."""
    skip: float = field(init=False)
    """Share of the sub-layers that candidates skip."""
    tried: int = 0
    """Candidates of this search."""
    idle: int = 0
    """Candidates since the latest better one."""
    finished_at: float | None = None
    """The best mask's matchness when the search ended; None while it goes on."""
    searches: int = 0
    """Searches begun so far, this one included."""
    searcher: SwiftPlanner | None = None
    """The request on whose tokens `score` was found. Others do not search before it ends."""
    _random: np.random.Generator = field(init=False)
    _seen: list[tuple[SubLayerPlan, float]] = field(default_factory=list)
    """Masks with their matchness."""
    _drafted: int = 0
    _accepted: int = 0
    _unseen: int = 0
    """Tokens generated since a mask was last scored."""

    def __post_init__(self) -> None:
        self.skip = self.settings.skip
        self._random = np.random.default_rng(self.settings.seed)
        self._begin(self._uniform())

    @property
    def free(self) -> range:
        """Sub-layers that may be skipped."""
        spared = 2 * self.settings.protect
        return range(spared, max(spared, 2 * self.num_layers - spared))

    @property
    def running(self) -> bool:
        """Whether the search goes on."""
        return self.finished_at is None

    @property
    def due(self) -> bool:
        """Whether the best mask is to be scored on the next tokens."""
        return self.settings.steps > 0 and (self.running or self._unseen >= LOOK_EVERY)

    def suggest(self) -> SubLayerPlan:
        """Choose the next mask to try: at intervals by the Gaussian process, otherwise at random (SWIFT eq. 2)."""
        if (self.tried + 1) % self.settings.bayes_interval == 0 and len(self._seen) > 1:
            pool = [self._near(self.best) for _ in range(POOL // 2)] + [self._any() for _ in range(POOL // 2)]
            tried, scores = zip(*self._seen[-MOST:], strict=True)
            return pool[most_promising(coded(tried), scores, coded(pool))]
        return self._any()

    def update(self, mask: SubLayerPlan, score: float) -> None:
        """Add a candidate's matchness; the best mask drafts from now on. Ends the search if a limit is reached."""
        settings = self.settings
        self._seen.append((mask, score))
        self.tried += 1
        self.idle += 1
        self._unseen = 0
        if score > self.score:
            self.best = mask
            self.score = score
            self.idle = 0
        if self.score > settings.enough or self.tried >= settings.steps or self.idle >= settings.idle:
            self.finished_at = self.score

    def update_best(self, score: float) -> None:
        """Replace the best mask's matchness by that on a new request; those of other masks move by the same amount."""
        self._seen = [(mask, seen + score - self.score) for mask, seen in self._seen]
        self.score = score
        self._unseen = 0
        if self.finished_at is not None and score < min(self.finished_at - self._chance, self.settings.enough):
            self._begin(self.best, score)

    def update_acceptance(self, steps: int, accepted: int, tokens: int) -> None:
        """Add a cycle; if the acceptance rate stays too low, skip less and search again.

        Cycles count only after `bayes_interval` candidates: the uniform mask at the start says little about the masks
        that a search can find.
        """
        self._unseen += tokens
        if not self.settings.steps or (self.running and self.tried < self.settings.bayes_interval):
            return
        self._drafted += steps
        self._accepted += accepted
        if self._drafted < JUDGED:
            return
        low = self._accepted < self.settings.acceptance * self._drafted
        self._drafted = 0
        self._accepted = 0
        lower = max(self.skip - SKIP_STEP, min(self.settings.least_skip, self.skip))
        if low and lower < self.skip:
            self.skip = lower
            self._begin(self._uniform())

    def _begin(self, best: SubLayerPlan, score: float = 0.0) -> None:
        """Begin a search from the mask `best`."""
        self.searches += 1
        self.best = best
        self.score = score
        self.tried = 0
        self.idle = 0
        self._seen = [(best, score)]
        self.finished_at = None if self.settings.steps else score

    @property
    def _chance(self) -> float:
        """Largest fall of the found mask's matchness on another window that chance explains."""
        tokens = self.settings.window
        # The rule of succession: all of a few tokens right is no certainty.
        share = ((self.finished_at or 0.0) * tokens + 1) / (tokens + 2)
        return DOUBT * float(np.sqrt(2 * share * (1 - share) / tokens))

    @property
    def _count(self) -> int:
        """Number of sub-layers that candidates skip."""
        return min(round(self.skip * 2 * self.num_layers), len(self.free))

    def _uniform(self) -> SubLayerPlan:
        """A mask of evenly spaced layers."""
        # Of an odd number of sub-layers, the last is a layer's attention alone.
        layers = SubLayerPlan.uniform(self.num_layers, -(-self._count // 2), self.settings.protect)
        return self._mask(list(layers)[: self._count])

    def _any(self) -> SubLayerPlan:
        """A random mask."""
        return self._mask(self._random.choice(self.free, self._count, replace=False))

    def _near(self, mask: SubLayerPlan) -> SubLayerPlan:
        """A mask that differs from `mask` in one to four exchanged sub-layers, and in a quarter of the light ones."""
        skipped = list(mask)
        kept = [index for index in self.free if not mask.skipped[index]]
        count = min(int(self._random.integers(1, 5)), len(skipped), len(kept))
        out = self._random.choice(skipped, count, replace=False) if count else ()
        into = self._random.choice(kept, count, replace=False) if count else ()
        lit = [index for index in range(len(mask)) if mask.bits_of(index)]
        stay = self._random.choice(lit, 3 * len(lit) // 4, replace=False) if lit else ()
        return self._mask({*skipped} - {int(i) for i in out} | {int(i) for i in into}, stay)

    def _mask(self, skipped: Iterable[int], lit: Iterable[int] = ()) -> SubLayerPlan:
        """A mask that skips `skipped`; of the rest a share is light, those of `lit` first and others at random."""
        mask = SubLayerPlan.of(self.num_layers, {int(index) for index in skipped})
        if self.light is None:
            return mask
        kept = [index for index, skip in enumerate(mask.skipped) if not skip]
        count = round(min(1.0, self.settings.light) * len(kept))
        lighter = [int(index) for index in lit if not mask.skipped[index]][:count]
        others = [index for index in kept if index not in lighter]
        lighter += [int(index) for index in self._random.choice(others, count - len(lighter), replace=False)]
        # The head is no sub-layer, so it has no share in them.
        return mask.lightened({index: self.light.bits_of(index) for index in (*lighter, len(mask))})


class SwiftPlanner(Planner):
    """Plans drafts with the stream's best mask, and tries a candidate per cycle once the window is full."""

    def __init__(self, search: SwiftSearch) -> None:
        self._search = search
        self._recent = RecentStates(search.settings.window)
        self._window: ReferenceStates | None = None
        """The tokens of this request on which masks are compared."""
        self._outdated = False
        """Whether the best mask has no score on the window yet."""
        self._session: Session | None = None

    @property
    def wants_states(self) -> bool:
        """Whether a window is due or begun: another request may make the next one less urgent meanwhile."""
        wanted = self._search.due or self._recent.tokens > 0
        return self._window is None and wanted and not self._others_search

    def start(self, session: Session, prompt: Prefill) -> None:
        """Keep the session, whose cache candidates are compared on."""
        self._session = session
        session.look_back(self._search.settings.window + self._search.settings.max_draft + 1, LATER)

    def searching(self, context: int) -> Work[None]:
        """Score the best mask if it has no score on this request, and try a candidate while the search goes on."""
        assert self._session is not None, "start() comes first"
        search = self._search
        if self._others_search:
            return
        states = self._session.cache.states
        if states.pinned is not None and context > states.pinned + LATER:
            states.pinned = None
            self._window = None
            self._recent = RecentStates(search.settings.window)
        if self._window is None:
            if self._recent.tokens < search.settings.window:
                return
            self._window = yield from self._recent.referencing(self._session, search.settings.window)
            states.pinned = context
            self._recent = RecentStates(0)
            self._outdated = True
        self._outdated |= search.running and search.searcher is not self
        if self._outdated:
            search.searcher = self
            best = search.best
            score = yield from self._matching(self._window, best)
            self._outdated = search.best is not best
            if not self._outdated:
                search.update_best(score)
        # While this one waits for a forward, another may begin a search anew.
        if search.running and search.searcher is self:
            number = search.searches
            candidate = search.suggest()
            score = yield from self._matching(self._window, candidate)
            if search.running and search.searches == number:
                search.update(candidate, score)

    def plan(self, context: int) -> Plan:
        """Plan a draft with the best mask so far."""
        search = self._search
        settings = search.settings
        if search.best.is_plain:
            return Plan("plain: there is nothing to skip")
        lit = sum(1 for bits in search.best.light[: len(search.best)] if bits)
        lighter = f", {lit} lighter" if lit else ""
        stage = "still searching" if search.running else f"the best of {search.tried + 1} tried"
        return Plan.masked(
            reason=f"swift skips {len(list(search.best))} of {2 * search.num_layers}{lighter}: {stage}",
            mask=search.best,
            draft_length=settings.max_draft,
            threshold=settings.confidence,
            entry="swift",
            branching=TREE if settings.tree else CHAIN,
        )

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Update the search with the cycle, and keep its states if the window needs them."""
        before = self._search.best
        self._search.update_acceptance(cycle.drafted, cycle.accepted, len(cycle.tokens))
        self._outdated |= self._search.best is not before
        if states is not None:
            self._recent.add(states)
        elif self._window is None and self._recent.tokens:
            self._recent = RecentStates(self._search.settings.window)  # the states would have a gap

    @property
    def _others_search(self) -> bool:
        """Whether another request's tokens decide which mask is the best."""
        return self._search.running and self._search.searcher not in (None, self)

    def finish(self) -> None:
        """Let another request search."""
        if self._search.searcher is self:
            self._search.searcher = None

    def _matching(self, window: ReferenceStates, mask: SubLayerPlan) -> Work[float]:
        """Share of the window's tokens that the masked model predicts, each after the target's keys (SWIFT eq. 4)."""
        assert self._session is not None, "start() comes first"
        # The request has gone on since, so the slots after the window hold committed tokens.
        groups = [replace(group, spare=self._session.committed) for group in window.groups]
        batches = self._session.decoder.batches
        [trace] = yield from replaying(batches, reference=replace(window, groups=groups), mask=mask, block=1)
        return float(trace.matches.mean())


def make_swift(inputs: StrategyInputs) -> MakePlanner:
    """Return a maker of SWIFT planners, which share the stream's search.

    Raises UserError if the settings ask for light sub-layers and the model has no light copies.
    """
    settings: SwiftSettings = inputs.settings
    if settings.light:
        require_copies(inputs.decoder, f"--set light={settings.light:g}")
    search = SwiftSearch(inputs.num_layers, settings, inputs.decoder.light.mask if settings.light else None)
    return lambda: SwiftPlanner(search)
