"""Random schemas, and a tiny model that is held to them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
from hypothesis import strategies as st

from bench.fixtures.planted import plant
from ssd_runtime.engine.output.generation import Generation
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.structure.structure import Structure
from tests.models import tiny_model
from tests.toy_tokenizers import byte_level

NAMES = ("name", "the name", "id", "höhe", "a", "a_b", 'quo"te', "items")
LEAVES: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 6},
    {"type": "string", "pattern": "^(the|he){1,3}$"},
    {"enum": ["red", "green", "greenish", "", 7, None]},
    {"const": "the one"},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": ["boolean", "null"]},
    {"type": "string", "format": "date"},
]


def _containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    arrays = st.builds(
        lambda items, least: {"type": "array", "items": items, "minItems": least, "maxItems": least + 1},
        inner,
        st.integers(0, 2),
    )
    alternatives = st.builds(lambda some: {"anyOf": some}, st.lists(inner, min_size=1, max_size=3))
    return arrays | alternatives | _objects(inner)


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[dict[str, Any]]) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    properties = {name: draw(inner) for name in names}
    required = [name for name in names if draw(st.booleans()) or name == names[0]]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


SCHEMAS = st.recursive(st.sampled_from(LEAVES), _containers, max_leaves=6)


@cache
def structured_model() -> LoadedModel:
    """A planted random Llama of 8 layers with a small byte-level tokenizer."""
    tokenizer = byte_level()
    model, _ = plant(tiny_model("llama", seed=6, vocab_size=len(tokenizer) + 7, max_position_embeddings=512), 0.02, 4)
    return LoadedModel.of(model, tokenizer)


def allows(structure: Structure, text: str) -> bool:
    """Whether a grammar allows a text from its beginning to its end."""
    loaded = structured_model()
    matcher = loaded.grammars.compiled(structure).matcher()
    ids = loaded.tokenizer.encode(text, add_special_tokens=False)
    allowed = all(matcher.allows(ids[:place], (), token) for place, token in enumerate(ids))
    return allowed and matcher.allows(ids, (), next(iter(loaded.eos_ids)))


def assert_valid(schema: dict[str, Any], generation: Generation) -> bool:
    """Require a valid answer, unless a limit has cut it; returns whether it is complete."""
    if generation.finish_reason != "stop":
        return False
    jsonschema.validate(json.loads(structured_model().decode(generation.token_ids)), schema)
    return True
