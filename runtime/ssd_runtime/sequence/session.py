"""A session runs the model for one sequence: its prompt, then whatever rows a drafter or a verification asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ssd_profiles.errors import UserError
from ssd_profiles.mask import SubLayerPlan
from ssd_runtime.devices.transfer import to_device
from ssd_runtime.model.batch.batch import Lineage
from ssd_runtime.model.batch.builder import MOST_BY_ROW
from ssd_runtime.model.cache.kv_cache import KVCache
from ssd_runtime.model.cache.kv_pool import FORWARD_ROWS, LOOKBACK
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.runner import Ahead, Forward, ModelRunner, Work
from ssd_runtime.sampling.params import GREEDY, SamplingParams
from ssd_runtime.sampling.sampler import Paths, Proposal
from ssd_runtime.sequence.mtp_states import MtpStates
from ssd_runtime.sequence.prefill import Prefill
from ssd_runtime.sequence.prefix_cache import Prefix, PrefixCache
from ssd_runtime.sequence.prompt_states import BLOCK, PromptStates
from ssd_runtime.sequence.sequence import TokenSequence

PREFILL_CHUNK = FORWARD_ROWS
"""Tokens of a prompt in one forward. From 768 rows on, torch's attention on CPUs reads the keys once per 256 rows,
not per 64: at 24k tokens of context a row takes a seventh less time."""
MAX_ROOM = 4096
"""Most new tokens for which a lone sequence reserves memory beforehand; more are seldom reached."""
POOL_ROOM = 256
"""Most new tokens for which a sequence of a pool reserves memory beforehand, since others wait for the room."""
MAX_BIAS_BYTES = 128 << 20
"""Largest bias of a chunk's attention. It grows with the context, so longer prompts run in smaller chunks."""
MAX_SCORES = 1 << 27
"""Most scores of a chunk's attention where those of all heads are held, in fp32 and several times."""
FEW_BEHIND = 16
"""Committed tokens that the MTP layer runs as a whole with the pending one, reading its weights once. Of those before
it writes the keys alone."""


class Session(TokenSequence):
    """A sequence with the model that runs it.

    If a sequence outgrows the context of longrope's first angles, the committed tokens are computed again with the
    second ones, as transformers does.
    """

    def __init__(
        self,
        decoder: Decoder,
        sampling: SamplingParams = GREEDY,
        prefixes: PrefixCache | None = None,
        owner: str = "",
    ) -> None:
        """With `prefixes`, keys and values are in their pool, and the prompt resumes after its longest known prefix.

        Sessions share prefixes only with sessions of the same `owner`, the name of a stream.
        """
        decoder.refresh()
        self.decoder = decoder
        self._runner = ModelRunner(decoder)
        super().__init__(
            cache=decoder.new_cache() if prefixes is None else KVCache(prefixes.pool),
            sampling=sampling,
            device=decoder.device,
            states=self._no_states(),
            rope_switch=decoder.rope_switch,
            prefixes=prefixes,
            owner=owner,
            version=decoder.version,
        )
        self.chunk = PREFILL_CHUNK
        """Most prompt tokens of a forward; the scheduler lowers it while other sequences wait for that."""

    def prefill(self, ids: list[int], beginning: Prefill | None = None, new_tokens: int = 0) -> Prefill:
        """Run `prefilling` for a lone sequence."""
        return self._runner.finish(self.prefilling(ids, beginning, new_tokens))

    def prefilling(self, ids: list[int], beginning: Prefill | None = None, new_tokens: int = 0) -> Work[Prefill]:
        """Run the full model over the prompt `ids`, from position 0 or after the prefilled `beginning` of the prompt.

        Reserves memory for the prompt and up to `new_tokens` more. Raises UserError if the prompt is empty, has tokens
        that the model lacks, or leaves no room to decode.
        """
        self.decoder.refresh()  # the model may have changed while the request was queued
        self._version = self.decoder.version
        known = self.ids[: beginning.tokens] if beginning is not None else []
        total = len(known) + len(ids)
        self._require_prompt(ids, total)
        long = self._is_long(total)
        if beginning is not None and long != self.cache.long:
            # The beginning was computed with other angles, so everything runs again.
            ids = known + ids
            known = []
            beginning = None
        self._withdraw()
        self.ids = known
        self._written = 0
        self._prompt = None
        self.reused = 0
        self._states = beginning.states.copy() if beginning is not None else self._no_states()
        reused: Prefix | None = None
        if beginning is None:
            self.cache.restart()
            reused = self._reuse(ids)
        else:
            self.cache.rewind(beginning.tokens)
        self.cache.long = long
        self._states_are_long = long
        room = MAX_ROOM if self._prefixes is None else POOL_ROOM
        # The first request comes later: until then nobody is admitted to the room that the scheduler has found.
        self.cache.reserve_tokens(min(total + min(new_tokens, room), self.decoder.shape.max_context))
        if reused is not None:
            self._states = yield from reused.states.resuming(self.reused)
        ids = known + ids
        border = total // BLOCK * BLOCK
        if self._prefixes is not None and self.committed < border:
            self.cache.states.mark(border)
        while self.committed < total:
            chunk = ids[self.committed : self._chunk_end()]
            self._states.add((yield self.request(chunk, certain=True)))
            normed = yield from self._states.closing()
            self.commit(chunk)
            if self._states.mtp is not None:
                yield from self._states.mtp.writing(self.cache, self.ids, self.committed)
        self.cache.mark(total)
        if self._prefixes is not None:
            self.cache.mark(border)
            # Marks of a conversation's earlier prompts would stay in memory, with all states at each.
            self.cache.forget_marks({self.reused or len(known), border, total})
            self._prefixes.lend(self._prefix(self._states.copy()))
        self._prompt = Prefill(
            last=normed[-1],
            mean=self._states.mean(normed, total),
            tokens=total,
            states=self._states.copy(),
        )
        return self._prompt

    def _require_prompt(self, ids: list[int], total: int) -> None:
        """Raise UserError unless the model has these `ids`, the last of `total`, and room for an answer."""
        vocabulary, limit = self.decoder.shape.vocabulary, self.decoder.shape.max_context
        if not ids:
            raise UserError("prompt: is empty; give at least one token")
        if min(ids) < 0 or max(ids) >= vocabulary:
            raise UserError(
                f"prompt: expected token ids from 0 to {vocabulary - 1}, got {min(ids)} to {max(ids)}; use the model's "
                "own tokenizer"
            )
        if total >= limit:
            raise UserError(
                f"prompt: {total} tokens, but this model's context holds {limit}, the answer included; "
                "shorten the prompt"
            )

    def fork(self) -> Session:
        """Make an independent session with the same committed tokens."""
        other = Session(self.decoder, self.sampling)
        other.cache.copy_from(self.cache, self.committed)
        other.commit(self.ids)
        other._states = self._states.copy()
        other._states_are_long = self._states_are_long
        return other

    def request(
        self,
        rows: Sequence[int] | Tensor,
        ahead: int = 0,
        mask: SubLayerPlan | None = None,
        first: int = 0,
        last: int | None = None,
        keep_states: bool = False,
        certain: bool = False,
    ) -> Forward:
        """A request to run `rows`, tokens or states [n, hidden], through sub-layers `first`, …, `last` - 1.

        Their positions begin `ahead` after the committed tokens. They draft with `mask`, or with the full model. Rows
        that are `certain` will all be committed.
        """
        n = len(rows)
        start = self.committed + ahead
        self._make_room(start + n, start + n)
        segment = self.decoder.batches.consecutive(self.cache, start, n, certain)
        return Forward(
            segments=[segment],
            rows=rows,
            mask=mask,
            first=first,
            last=last,
            keep_states=keep_states,
        )

    def tree_request(
        self, ids: list[int], depths: Sequence[int], visible: Tensor, keep_states: bool = False
    ) -> Forward:
        """A request to run the full model on `ids`, each `depths[i]` positions after the committed tokens.

        Every row sees the committed tokens, and the rows where `visible` [n, n], on the host, is true. Keys and values
        of row i go to the i-th slot after the committed ones, whatever its position.
        """
        n = len(ids)
        start = self.committed
        span = range(start, start + max(depths) + 1)
        self._make_room(start + n, span.stop)
        device = self.decoder.device
        lineage = Lineage.of_tree(visible, start) if self.decoder.kv_layout.mixers else None
        positions = to_device([start + depth for depth in depths], device)
        known = torch.arange(start, device=device)
        visible = to_device(visible, device)
        segment = self.decoder.batches.tree(
            cache=self.cache,
            positions=positions,
            span=span,
            slot=start,
            visible=torch.cat([visible.new_ones(n, start), visible], 1),
            key_positions=torch.cat([known, positions]),
            lineage=lineage,
        )
        return Forward([segment], ids, keep_states=keep_states)

    def forward(
        self,
        rows: Sequence[int] | Tensor,
        mask: SubLayerPlan | None = None,
        ahead: int = 0,
        first: int = 0,
        last: int | None = None,
    ) -> Tensor:
        """Run a `request` of a lone sequence; returns its states [n, hidden]."""
        request = self.request(rows, ahead=ahead, mask=mask, first=first, last=last)
        [x] = self._runner.answer([request])
        return x

    def forward_states(self, ids: Sequence[int]) -> list[Tensor]:
        """Run `ids` after the committed tokens; returns 2L + 1 states [n, hidden], X(i) after sub-layer i - 1."""
        [states] = self._runner.answer([self.request(ids, keep_states=True)])
        return states

    def ahead_request(self, tokens: Sequence[int] | Tensor, states: Tensor, ahead: int) -> Ahead:
        """A request to run the MTP layer on `tokens` and the normed states before them (`Ahead`).

        Their positions begin `ahead` after the committed tokens.
        """
        start, n = self.committed + ahead, len(tokens)
        self._make_room(start + n, start + n)
        return Ahead(self.decoder.batches.consecutive(self.cache, start, n), tokens, states)

    def catching_up(self) -> Work[Tensor]:
        """Run the MTP layer on the pending token and on the committed ones that it has not run.

        Returns its normed state [1, hidden] of the pending token.
        """
        mtp = self._states.mtp
        assert mtp is not None, "the model has no such layer"
        yield from mtp.writing(self.cache, self.ids, self.committed - FEW_BEHIND)
        begin = min(mtp.end, self.committed)
        states = yield from mtp.normed(begin, self.committed + 1)
        x = yield self.ahead_request([*self.ids[begin:], self.pending], states, begin - self.committed)
        mtp.wrote(self.committed + 1)
        return x[-1:]

    def _no_states(self) -> PromptStates:
        """The states of no tokens at all."""
        return PromptStates(None if self.decoder.mtp is None else MtpStates(self.decoder))

    def _make_room(self, slots: int, tokens: int) -> None:
        """Reserve `slots` slots, and switch to the angles of a sequence of `tokens` tokens."""
        if self._is_long(tokens) and not self.cache.long:
            self._compute_again(long=True)
        self.cache.reserve(slots, self.committed)
        self._written = max(self._written, slots)

    def rewind(self, prompt: Prefill, answered: int = 0) -> None:
        """Return to the end of the latest prefilled prompt; random numbers are drawn again from there.

        The last `answered` tokens of the prompt belong to the answer: the random numbers before those are passed over.
        Raises UserError if the latest prompt was another one, or if computing it again was interrupted.
        """
        if prompt is not self._prompt or self.committed < prompt.tokens:
            raise UserError("session: no longer holds this prompt; prefill it again")
        self.ids = self.ids[: prompt.tokens]
        self._written = 0
        self.load = None
        self.cache.rewind(prompt.tokens)
        self._states = prompt.states.copy()
        self._sampler.restart(prompt.tokens - answered, answered)
        if answered and self.matcher is not None:
            for end in range(prompt.tokens - answered, prompt.tokens):  # forced texts go on as they have begun
                self.matcher.forced(self.ids[:end], ())
        if self._is_long(self.committed) != self.cache.long:
            self._compute_again(not self.cache.long)

    def choose(self, logits: Tensor, paths: Paths, drawn: Sequence[tuple[int, Tensor]] = ()) -> Callable[[int], int]:
        """Return a function from a row of `logits` to the target's token after it (`Sampler.choose`).

        `paths` follow the committed tokens.
        """
        with self.decoder.beside_steps():
            choice = self._sampler.choose(logits, known=self.ids, paths=paths, drawn=drawn)

        def token(row: int) -> int:
            with self.decoder.beside_steps():
                return choice(row)

        return token

    def propose(self, logits: Tensor, path: Callable[[], list[int]], temperature: float | None = None) -> Proposal:
        """Propose a token to draft after the committed ones and a path (`Sampler.propose`)."""
        with self.decoder.beside_steps():
            return self._sampler.propose(logits, known=self.ids, path=path, annealed=temperature)

    def gap(self, logits: Tensor, prompt: int, token: int, within: float) -> tuple[float, bool]:
        """The gap in logits between the choice after the committed tokens and `token`, and whether it is a near tie.

        It is a near tie if logits that differ by at most `within` can choose `token`. `prompt` is the number of
        committed tokens that belong to the prompt. `logits` is [vocabulary] (`Sampler.gap`).
        """
        self._sampler.restart(prompt)
        return self._sampler.gap(logits, known=self.ids, token=token, within=within)

    def draft_room(self, most: int) -> int:
        """Most draft tokens of one verification, at most `most`.

        A verification must not cross longrope's switch, because a forward uses one set of angles for all rows.
        """
        if self.decoder.bitwise:
            most = min(most, MOST_BY_ROW - 1)
        switch = self._rope_switch
        return most if switch is None or self.cache.long else min(most, switch - self.committed - 1)

    def _compute_again(self, long: bool) -> None:
        """Compute the committed tokens' keys and values again, with the other angles of longrope."""
        self._withdraw()
        self.cache.long = long
        self._runner.finish(self.recomputing())

    def recomputing(self) -> Work[None]:
        """Run the committed tokens again, whose keys and values were dropped or rotated by other angles."""
        ids = self.ids
        written = self._written
        self.ids = []
        self.cache.restart(keep_marks=True)
        mtp, again = self._states.mtp, self._no_states().mtp
        searched = self.cache.states.looked_back(len(ids))
        try:
            while self.committed < len(ids):
                ends = self._chunk_end(), searched.start, searched.stop
                end = min(each for each in ends if each > self.committed)
                chunk = ids[self.committed : end]
                states = yield self.request(chunk, certain=end <= searched.start)
                self.commit(chunk)
                if mtp is not None and again is not None:
                    again.add(states)
                    yield from again.writing(self.cache, self.ids, min(self.committed, mtp.end))
        finally:
            self.ids = ids  # also if this is stopped half-way
            self._written = written

    def _chunk_end(self) -> int:
        """The token after the last of a prompt's next forward.

        That has whole blocks, few enough for bias and scores of bounded size, or ends where states are to be kept.
        """
        keys = self.committed + PREFILL_CHUNK
        fitting = MAX_BIAS_BYTES // (self.decoder.dtype.itemsize * keys)
        if self.decoder.holds_scores:
            fitting = min(fitting, MAX_SCORES // (self.decoder.shape.heads * keys))
        # Tokens that are computed again leave room for those that searches look back to.
        rows = min(self.chunk, fitting, PREFILL_CHUNK + LOOKBACK - self.cache.lookback)
        end = self.committed + max(BLOCK, rows // BLOCK * BLOCK)
        mark = self.cache.states.next_mark(self.committed)
        return end if mark is None else min(end, mark)
