"""Text on which exit heads are fitted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.fixtures.fitted_heads import fitting_texts
from ssd_compiler.exits.fitting import chunked_states
from ssd_profiles.domain import domain_names, starter_set
from ssd_runtime.loading.models import LoadedModel
from ssd_runtime.model.decoder import Decoder
from tests.folders import save_tiny_model


def test_texts_are_questions_with_answers_and_then_all_starter_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    loaded = LoadedModel.of(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    records = [{"question": "The river rose", "answer": "over night"}, {"question": "The baker", "answer": "slept"}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    monkeypatch.setattr("bench.fixtures.fitted_heads.GSM8K_TRAIN", tmp_path / "train.jsonl")
    asked, *others = fitting_texts(loaded)
    assert asked.prompt == loaded.encode([("user", "The river rose")])
    answer = loaded.tokenizer.encode("over night", add_special_tokens=False)
    assert asked.continuation[:-1] == answer
    assert len(others) == 1 + sum(len(starter_set(name).records) for name in domain_names())
    # Every token of question and answer gives a row of states.
    rows = sum(states[0].shape[0] for states in chunked_states(Decoder(loaded.model), asked))
    assert rows == len(asked.prompt) + len(answer)
