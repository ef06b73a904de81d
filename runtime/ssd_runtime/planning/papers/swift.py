"""SWIFT: masks tried on the fly against what the model has just generated, kept for the whole stream of requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from ssd_profiles.mask import SkipMask
from ssd_runtime.drafting.masked import CHAIN, Branching
from ssd_runtime.engine.session import Prefill, Session
from ssd_runtime.model.runner import Work
from ssd_runtime.planning.papers.recent import RecentStates
from ssd_runtime.planning.papers.refreshed import CYCLE_TOKENS
from ssd_runtime.planning.plan import BasePlanner, Cycle, Plan
from ssd_runtime.planning.settings import SwiftSettings
from ssd_runtime.search.gaussian import most_promising
from ssd_runtime.search.replay import ReferenceStates, replaying

TREE: Branching = ((0.5, 10), (0.8, 5), (0.95, 3), (1.0, 1))
"""Candidates a place by the probability of its token (SWIFT §4.2)."""
SKIP_STEP = 0.05
JUDGED = 64
"""Draft steps over which the acceptance rate is judged."""
DOUBT = 2.0
"""Standard errors by which a finished search's mask must do worse on new tokens for the search to begin again."""
LOOK_EVERY = 256
"""Tokens of the stream from one look at a finished search's mask to the next. With the window's own choices a look
takes some two plain steps: that is within 1% of the time up to 1.28 times plain decoding's speed."""
EVERYTHING = 1 << 30
"""Tokens, more than any context has."""
POOL = 256
"""Masks that the Gaussian process chooses from."""


@dataclass(slots=True)
class SwiftSearch:
    """What one stream of requests has found out so far. It outlives a request: this planner's declared state.

    While the search goes on, the best mask is scored again with every new request, so that an easy prompt cannot block
    later ones; the others are taken to lie as far from it as they did. Once it has ended, every `LOOK_EVERY` tokens.
    """

    num_layers: int
    settings: SwiftSettings
    best: SkipMask = field(init=False)
    score: float = 0.0
    """The best mask's matchness on the current request."""
    skip: float = field(init=False)
    tried: int = 0
    idle: int = 0
    finished_at: float | None = None
    """The best mask's matchness when the search ended; None while it goes on."""
    searches: int = 0
    """Searches begun so far, this one included."""
    _random: np.random.Generator = field(init=False)
    _seen: list[tuple[SkipMask, float]] = field(default_factory=list)
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
        """Whether there are masks to be tried."""
        return self.finished_at is None

    @property
    def due(self) -> bool:
        """Whether the best mask is to be scored on what comes next."""
        return self.settings.steps > 0 and (self.running or self._unseen >= LOOK_EVERY)

    def suggest(self) -> SkipMask:
        """The next mask to try: every so often the Gaussian process's, else a random one (SWIFT eq. 2)."""
        if (self.tried + 1) % self.settings.bayes_interval == 0 and len(self._seen) > 1:
            pool = [self._near(self.best) for _ in range(POOL // 2)] + [self._any() for _ in range(POOL // 2)]
            tried = np.asarray([mask.bits for mask, _ in self._seen], bool)
            candidates = np.asarray([mask.bits for mask in pool], bool)
            return pool[most_promising(tried, [score for _, score in self._seen], candidates)]
        return self._any()

    def record(self, mask: SkipMask, score: float) -> None:
        """Take in a mask's matchness; the best one drafts from now on. Ends the search where it should end."""
        settings = self.settings
        self._seen.append((mask, score))
        self.tried += 1
        self.idle += 1
        self._unseen = 0
        if score > self.score:
            self.best, self.score, self.idle = mask, score, 0
        if self.score > settings.enough or self.tried >= settings.steps or self.idle >= settings.idle:
            self.finished_at = self.score

    def rescored(self, score: float) -> None:
        """Take in the best mask's matchness on a new request; those of others are moved by as much."""
        self._seen = [(mask, seen + score - self.score) for mask, seen in self._seen]
        self.score, self._unseen = score, 0
        if self.finished_at is not None and score < min(self.finished_at - self._chance, self.settings.enough):
            self._begin(self.best, score)

    def drafted(self, steps: int, accepted: int, tokens: int) -> None:
        """Take in a cycle; where too little is accepted for long, skip less and search again.

        Not before an interval's candidates have been compared: a uniform mask says nothing of what a search can find.
        """
        self._unseen += tokens
        if not self.settings.steps or (self.running and self.tried < self.settings.bayes_interval):
            return
        self._drafted, self._accepted = self._drafted + steps, self._accepted + accepted
        if self._drafted < JUDGED:
            return
        low = self._accepted < self.settings.acceptance * self._drafted
        self._drafted = self._accepted = 0
        lower = max(self.skip - SKIP_STEP, min(self.settings.least_skip, self.skip))
        if low and lower < self.skip:
            self.skip = lower
            self._begin(self._uniform())

    def _begin(self, best: SkipMask, score: float = 0.0) -> None:
        self.searches += 1
        self.best, self.score, self.tried, self.idle, self._seen = best, score, 0, 0, [(best, score)]
        self.finished_at = None if self.settings.steps else score

    @property
    def _chance(self) -> float:
        """How far below the found mask's matchness another window's may lie by chance."""
        tokens = self.settings.window
        share = ((self.finished_at or 0.0) * tokens + 1) / (tokens + 2)  # all of a few tokens right: not certainty yet
        return DOUBT * float(np.sqrt(2 * share * (1 - share) / tokens))

    @property
    def _count(self) -> int:
        return min(round(self.skip * 2 * self.num_layers), len(self.free))

    def _uniform(self) -> SkipMask:
        # Whole layers: of an odd number of sub-layers the last layer's attention alone.
        layers = SkipMask.uniform(self.num_layers, -(-self._count // 2), self.settings.protect)
        return self._mask(list(layers)[: self._count])

    def _any(self) -> SkipMask:
        return self._mask(self._random.choice(self.free, self._count, replace=False))

    def _near(self, mask: SkipMask) -> SkipMask:
        """`mask` with up to four skipped sub-layers exchanged for others."""
        skipped, kept = list(mask), [index for index in self.free if not mask.bits[index]]
        count = min(int(self._random.integers(1, 5)), len(skipped), len(kept))
        out = self._random.choice(skipped, count, replace=False) if count else ()
        into = self._random.choice(kept, count, replace=False) if count else ()
        return self._mask({*skipped} - {int(i) for i in out} | {int(i) for i in into})

    def _mask(self, skipped: Iterable[int]) -> SkipMask:
        return SkipMask.of(self.num_layers, {int(index) for index in skipped})


class SwiftPlanner(BasePlanner):
    """Drafts with the stream's best mask; tries one candidate a cycle once there are tokens to compare on."""

    def __init__(self, search: SwiftSearch) -> None:
        self._search = search
        self._recent = RecentStates(search.settings.window)
        self._window: ReferenceStates | None = None
        """The tokens that masks are compared on in this request."""
        self._outdated = False
        """Whether another mask has become the best one without being scored on the window."""
        self._session: Session | None = None

    @property
    def wants_states(self) -> bool:
        """Until a window is full, once one is due: another request may meanwhile have put the next one off."""
        return self._window is None and (self._search.due or self._recent.tokens > 0)

    def start(self, session: Session, prompt: Prefill) -> None:
        """Keep hold of the session whose cache candidates are compared on."""
        self._session = session
        session.look_back(self._search.settings.window + CYCLE_TOKENS)

    def searching(self, context: int) -> Work[None]:
        """Score the best mask where it has no score on this request, and try a candidate while the search goes on."""
        assert self._session is not None, "start() comes first"
        # Sequences that decode at once share the search: it may change while this one waits for a forward.
        search = self._search
        if self._window is None:
            if self._recent.tokens < search.settings.window:
                return
            self._window = yield from self._recent.referencing(self._session)
            self._session.look_back(EVERYTHING)  # masks are compared on it until the request ends
            self._recent = RecentStates(0)
            self._outdated = True
        if self._outdated:
            best = search.best
            score = yield from self._matching(self._window, best)
            self._outdated = search.best is not best
            if not self._outdated:
                search.rescored(score)
        if search.running:
            number, candidate = search.searches, search.suggest()
            score = yield from self._matching(self._window, candidate)
            if search.running and search.searches == number:
                search.record(candidate, score)

    def plan(self, context: int, pending: int) -> Plan:
        """Draft with the best mask so far."""
        search, settings = self._search, self._search.settings
        if not any(search.best.bits):
            return Plan("plain: there is nothing to skip")
        stage = "still searching" if search.running else f"the best of {search.tried + 1} tried"
        return Plan.masked(
            f"swift skips {len(list(search.best))} of {2 * search.num_layers}: {stage}",
            search.best,
            settings.max_draft,
            settings.confidence,
            "swift",
            TREE if settings.tree else CHAIN,
        )

    def observe(self, cycle: Cycle, states: list[Tensor] | None) -> None:
        """Gather the window of tokens that masks are compared on in this request; then only count."""
        before = self._search.best
        self._search.drafted(cycle.drafted, cycle.accepted, len(cycle.tokens))
        self._outdated |= self._search.best is not before
        if states is not None:
            self._recent.add(states)

    def _matching(self, window: ReferenceStates, mask: SkipMask) -> Work[float]:
        """Share of the window's tokens that the masked model predicts, each after the target's own keys (eq. 4)."""
        assert self._session is not None, "start() comes first"
        # The request has gone on since: the slots after the window hold committed tokens.
        groups = [replace(group, spare=self._session.committed) for group in window.groups]
        batches = self._session.decoder.batches
        [trace] = yield from replaying(batches, replace(window, groups=groups), mask, 1)
        return float(trace.matches.mean())
