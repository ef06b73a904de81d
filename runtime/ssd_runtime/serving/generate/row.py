"""The rows of a `generate` call as sequences of the engine, and their results as one batch again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor
from transformers.generation import GenerateDecoderOnlyOutput

from ssd_runtime.engine.job import Job
from ssd_runtime.engine.loop import generating
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.engine.output.output import Limits
from ssd_runtime.engine.scheduler import Scheduler
from ssd_runtime.planning.strategy import MakePlanner
from ssd_runtime.sampling.params import SamplingParams
from ssd_runtime.sampling.processors import RowProcessors, SequenceIds, callers_mode
from ssd_runtime.serving.generate.generate_call import GenerateCall
from ssd_runtime.structure.processor import StructureProcessor

MAX_SEED = 1 << 62


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence of a call."""

    call: GenerateCall
    ids: Tensor
    """The row's prompt [width] with its padding, which processors and criteria read too."""
    padding: int
    sampling: SamplingParams

    def start(self, scheduler: Scheduler, make_planner: MakePlanner) -> Job[Generation]:
        """Queue the row."""
        prompt = self.ids[self.padding :].tolist()
        session = scheduler.session(self.sampling)
        stop = self._stop()
        # Other criteria are called after the end token as well, and test for it in that call.
        ends = self.call.eos_ids if stop is None else frozenset[int]()
        work = generating(
            session=session,
            prompt_ids=prompt,
            planner=make_planner(),
            limits=Limits(self.call.max_new_tokens, ends, stop),
            on_tokens=self._on_tokens(),
        )
        return scheduler.add(session, work, prompt)

    def _on_tokens(self) -> Callable[[list[int]], None] | None:
        streamer = self.call.streamer
        if streamer is None:
            return None

        def put(tokens: list[int]) -> None:
            with callers_mode():
                for token in tokens:  # as transformers does: a streamer may take each call for a token
                    streamer.put(torch.tensor([token]))

        return put

    def _stop(self) -> Callable[[Sequence[int]], bool] | None:
        """The stop condition of all criteria; None if there are none that must be called after every token."""
        if not self.call.other_criteria:
            return None
        sequence = SequenceIds(self.ids)
        config, processors = self.call.config, self.sampling.processors
        keeps = config.return_dict_in_generate and config.output_scores
        scores = processors.scores if processors is not None and keeps else None

        def stopped(tokens: Sequence[int]) -> bool:
            with callers_mode():
                # Scores of tokens after this one may be there already: accepted drafts are chosen together.
                known = None if scores is None else tuple(scores[: len(tokens)])
                return bool(self.call.criteria(sequence.tensor(tokens), known).any())

        return stopped


def rows_of(call: GenerateCall) -> list[Row]:
    """The rows of a call. Sampling takes one seed per row from torch's global generator."""
    config = call.config
    seeds = _seeds(call.rows) if config.do_sample else [0] * call.rows
    keep_scores = bool(config.return_dict_in_generate and config.output_scores)
    keep_logits = bool(config.return_dict_in_generate and config.output_logits)
    structures = [each for each in call.processors if isinstance(each, StructureProcessor)]
    # The first one becomes the row's grammar, by which drafts are made; another stays a processor.
    grammar = structures[0].grammar if structures else None
    others = [each for each in call.processors if each not in structures[:1]]
    rows = []
    for number, (ids, padding, seed) in enumerate(zip(call.input_ids, call.padding, seeds, strict=True)):
        processors = None
        if others or keep_scores or keep_logits:
            own = [_of_row(each, number) for each in others]
            # The engine knows the prompt itself; processors read the padding too, as in transformers' batches.
            processors = RowProcessors(own, ids[:padding], keep_scores, keep_logits)
        rows.append(
            Row(
                call=call,
                ids=ids,
                padding=padding,
                sampling=SamplingParams(
                    temperature=float(config.temperature or 1.0) if config.do_sample else 0.0,
                    seed=seed,
                    processors=processors,
                    grammar=grammar,
                ),
            )
        )
    return rows


def _seeds(rows: int) -> list[int]:
    """Draw one seed per row.

    torch's CPU generator ignores the upper half of the seed of `torch.manual_seed`, which is therefore added here.
    """
    upper = torch.initial_seed() >> 32 << 32
    return [seed ^ upper for seed in torch.randint(MAX_SEED, (rows,)).tolist()]


def _of_row(processor: LogitsProcessor, number: int) -> LogitsProcessor:
    """The processor for one row; a repetition penalty is copied with that row's length of padding."""
    lengths = getattr(processor, "prompt_ignore_length", None)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor) and isinstance(lengths, Tensor):
        processor = copy(processor)
        processor.prompt_ignore_length = lengths[number : number + 1]
    return processor


def batch_of(call: GenerateCall, rows: Sequence[Row], answers: Sequence[list[int]]) -> Any:
    """Build the output of `generate` from rows and their new tokens; shorter rows are padded on the right."""
    pad = call.config._pad_token_tensor
    filler = 0 if pad is None else int(pad)
    width = max(map(len, answers))
    new = [answer + [filler] * (width - len(answer)) for answer in answers]
    sequences = torch.cat([call.input_ids, torch.tensor(new, device=call.input_ids.device)], 1)
    if not call.config.return_dict_in_generate:
        return sequences
    kept = [(row.sampling.processors, len(answer)) for row, answer in zip(rows, answers, strict=True)]
    scores = [each.scores[:length] for each, length in kept if each is not None]
    logits = [each.logits[:length] for each, length in kept if each is not None]
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_by_step(scores, filler) if call.config.output_scores else None,
        logits=_by_step(logits, filler) if call.config.output_logits else None,
    )


def _by_step(rows: list[list[Tensor]], filler: int) -> tuple[Tensor, ...]:
    """Join the rows' [1, vocabulary] of each step; after a row's end, the padding token has probability 1."""
    certain = torch.full_like(rows[0][0], -torch.inf)
    certain[:, filler] = 0.0
    return tuple(torch.cat(step) for step in zip_longest(*rows, fillvalue=certain))
