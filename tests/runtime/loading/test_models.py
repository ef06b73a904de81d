"""Loading what is no model, and prompts that a chat template refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from ssd_profiles.errors import UserError
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.loading.models import load_model
from ssd_runtime.loading.sources import Source

STRICT_TEMPLATE = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}x"


@pytest.fixture
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), "cpu")


def test_a_template_that_refuses_a_conversation_is_a_users_error(loaded: LoadedModel) -> None:
    loaded.tokenizer.chat_template = STRICT_TEMPLATE
    assert loaded.encode([("user", "hi")])
    with pytest.raises(UserError, match="no system role here"):
        loaded.encode([("system", "be brief"), ("user", "hi")])


def test_without_a_template_texts_follow_each_other(loaded: LoadedModel) -> None:
    messages = [("system", "be brief"), ("user", "hi")]
    assert loaded.encode(messages, raw=True) == loaded.tokenizer("be brief\n\nhi")["input_ids"]
    loaded.tokenizer.chat_template = None
    assert loaded.encode(messages) == loaded.encode(messages, raw=True)


@pytest.mark.parametrize("value", [None, "x", -1, 2.5, True, [None], {"a": 1}], ids=repr)
def test_a_damaged_config_is_a_users_error_or_none(folder: Path, tmp_path: Path, value: Any) -> None:
    """Whatever stands in any one field: the model loads, or one line says that it cannot."""
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    config = json.loads((folder / "config.json").read_text())
    refusals = []
    for name in config:
        (damaged / "config.json").write_text(json.dumps({**config, name: value}))
        try:
            load_model(str(damaged), "cpu")
        except UserError as error:
            refusals.append(str(error))
    assert len(refusals) >= 2
    assert all(line.startswith((str(damaged), "model:")) for line in refusals)
    assert not any("\n" in line for line in refusals)


def test_what_is_no_causal_model_itself_is_refused(loaded: LoadedModel) -> None:
    class Adapter(torch.nn.Module):
        def get_base_model(self) -> Any:
            return loaded.model

    with pytest.raises(UserError, match=r"pass its get_base_model\(\)"):
        LoadedModel.of(Adapter().eval(), loaded.tokenizer)
    classifier = AutoModelForSequenceClassification.from_config(loaded.model.config)
    with pytest.raises(UserError, match="is not a causal LM"):
        LoadedModel.of(classifier.eval(), loaded.tokenizer)


def test_what_generate_would_do_besides_is_known(loaded: LoadedModel) -> None:
    assert loaded.unsupported_settings == ()
    assert loaded.repetition_penalty == 1.0
    loaded.model.generation_config.update(no_repeat_ngram_size=3, repetition_penalty=1.05, num_beams=1)
    assert loaded.unsupported_settings == ("no_repeat_ngram_size",)
    assert loaded.repetition_penalty == 1.05


def test_a_place_that_no_bundle_can_name_is_told(loaded: LoadedModel, folder: Path) -> None:
    odd = replace(loaded, source=Source(folder, "/models/\u3000new"))
    with pytest.raises(UserError, match="no bundle can name such a place"):
        odd.fingerprint()


@pytest.mark.parametrize(
    ("configured", "ends"), [([1, 2], {1, 2, 3}), (1, {1, 3}), (None, {3})], ids=["several", "one", "none"]
)
def test_every_end_token_of_the_model_and_of_its_tokenizer_ends_an_answer(configured: Any, ends: set[int]) -> None:
    model: Any = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=configured))
    tokenizer: Any = SimpleNamespace(eos_token_id=3)
    assert LoadedModel(model, tokenizer, None).eos_ids == ends
