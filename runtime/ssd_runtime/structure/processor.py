"""Holds the answers of transformers' `generate` to a structure."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, PreTrainedTokenizerBase

from ssd_runtime.structure.grammars import Grammars
from ssd_runtime.structure.matcher import Matcher
from ssd_runtime.structure.structure import Structure


class StructureProcessor(LogitsProcessor):
    """A logits processor for one `generate` call at a time, stock or of this package, which drafts by the grammar too.

    Answers end with the model's end token. Raises StructureError for a structure that cannot be honoured.
    """

    def __init__(self, structure: Structure, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        config = model.generation_config
        eos = config.eos_token_id if config is not None else None
        eos = tokenizer.eos_token_id if eos is None else eos
        ends = [] if eos is None else torch.as_tensor(eos).flatten().tolist()
        self.grammar = Grammars(tokenizer, model.config.get_text_config().vocab_size, ends).compiled(structure)
        self._matchers: list[Matcher] = []
        self._prompt = 0
        self._read: Tensor | None = None
        """Ids of the last call."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Mask `scores` [rows, vocabulary] after the ids [rows, n]; the first call of an answer has its prompt."""
        if not self._goes_on(input_ids):
            self._matchers = [self.grammar.matcher() for _ in input_ids]
            self._prompt = input_ids.shape[1]
        self._read = input_ids.clone()
        answers = input_ids[:, self._prompt :].tolist()
        # Rows move and tokens are taken back, so that no token of an answer is known.
        masked = [
            each.masked(row, (), answer) for each, row, answer in zip(self._matchers, scores, answers, strict=True)
        ]
        return torch.stack(masked)

    def _goes_on(self, ids: Tensor) -> bool:
        """Whether each row of `ids` is one of the last call's, up to some token after the prompt, and one token more.

        Beam search reorders rows, and assisted decoding takes back the tokens that the model has rejected.
        """
        rows, width = ids.shape
        if self._read is None or len(self._read) != rows or not self._prompt < width <= self._read.shape[1] + 1:
            return False
        same = ids[:, None, :-1] == self._read[:, : width - 1]
        return bool(same.all(-1).any(1).all())
