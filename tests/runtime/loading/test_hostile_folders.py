"""Crafted model folders: each ends in one line, at once and without the memory that it asks for, or changes nothing."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from ssd_profiles.errors import UserError
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.loading.models import load_model
from tests.folders import save_tiny_model
from tests.models import VARIANTS, tiny_model
from tests.own_code import edited

Change = Callable[[Path], object]
DEEP = '{"a":' * 20000 + "1" + "}" * 20000
SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}
YARN = {"rope_type": "yarn", "rope_theta": 1e4}
MOST_SECONDS = 5.0
MOST_MEMORY = 256 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("hostile") / "model", weak=0)


@pytest.fixture(scope="module")
def answer(model: Path) -> list[int]:
    return answered(model)


def answered(folder: Path, raw: bool = False) -> list[int]:
    """The tokens of a short answer."""
    engine = Engine(load_model(str(folder), "cpu"), weight_memory=0)
    runner = engine.runner(RunSettings("plain", max_new_tokens=6, raw=raw))
    return runner.answer("How many loaves did the baker count?").generation.token_ids


def config(**entries: Any) -> Change:
    return lambda folder: edited(folder, "config.json", **entries)


def settings(**entries: Any) -> Change:
    return lambda folder: edited(folder, "tokenizer_config.json", **entries)


def generation(**entries: Any) -> Change:
    return lambda folder: edited(folder, "generation_config.json", **entries)


def tokenizer(**parts: Any) -> Change:
    return lambda folder: edited(folder, "tokenizer.json", **parts)


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def link(name: str, target: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return change


def pipe(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def index(place: object, **entries: Any) -> Change:
    def change(folder: Path) -> None:
        shutil.copy(folder / "model.safetensors", folder.parent / "outside.safetensors")
        shutil.move(folder / "model.safetensors", folder / "inside.safetensors")
        places = {"weight_map": {"model.norm.weight": place}} if place is not None else {}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, **places, **entries}))

    return change


def added(token: int, content: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        known = json.loads(path.read_text())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        path.write_text(
            json.dumps({**known, "added_tokens": [*known["added_tokens"], {"id": token, "content": content, **flags}]})
        )

    return change


def renumbered(folder: Path) -> None:
    """A letter whose id is beyond the model's vocabulary."""
    path = folder / "tokenizer.json"
    known = json.loads(path.read_text())
    known["model"]["vocab"]["w"] = 5000
    path.write_text(json.dumps(known))


def replaced(times: int) -> dict[str, Any]:
    step = {"type": "Replace", "pattern": {"String": "o"}, "content": "oo" * 1000}
    return {"type": "Sequence", "normalizers": [step] * times}


REFUSED: Mapping[str, tuple[Change, str]] = {
    "10^8 layers": (config(num_hidden_layers=10**8), "num_hidden_layers is '100000000', expected 1 to 38"),
    "heads of 10^6": (config(head_dim=10**6), "holds weights of another shape"),
    "hidden size": (config(hidden_size=10**9), "hidden_size is"),
    "vocabulary": (config(vocab_size=10**9), "vocab_size is"),
    "vocabulary within the numbers there are": (config(vocab_size=10**6), "holds weights of another shape"),
    "heads": (config(num_attention_heads=10**6), "cannot load it"),
    "heads that share unevenly": (config(num_key_value_heads=3), "cannot share 3 keys"),
    "positions of the original context": (
        config(rope_parameters={**YARN, "factor": 2.0, "original_max_position_embeddings": 10**9}),
        "original_max_position_embeddings has the number",
    ),
    "half a layer": (config(num_hidden_layers=3.5), "num_hidden_layers is"),
    "kinds of 10^6 layers": (config(layer_types=["full_attention"] * 10**5), "layer_types"),
    "negative epsilon": (config(rms_norm_eps=-1.0), "rms_norm_eps has the number -1.0, expected 0 to 1"),
    "an angle that is no number": (config(rope_theta=float("nan")), "rope_theta has the number nan"),
    "nothing to scale by": (
        config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}),
        "factor has the number 0.0, expected 0.001",
    ),
    "angles the other way": (config(rope_parameters={"rope_type": "default", "rope_theta": -1.0}), "rope_theta has"),
    "an angle that is infinite": (
        config(rope_parameters={"rope_type": "default", "rope_theta": {"__float__": "Infinity"}}),
        "rope_theta has the number inf",
    ),
    "deep angles": (config(rope_parameters=json.loads('{"a":' * 480 + "1" + "}" * 480)), "cannot load it"),
    "padding outside": (config(pad_token_id=10**6), "Padding_idx"),
    "quantisation by a list": (config(quantization_config=[1]), "cannot load it"),
    "a package that is not there": (config(quantization_config={"quant_method": "gptq", "bits": 4}), "optimum"),
    "deep config": (text("config.json", DEEP), "config.json is not JSON"),
    "deep settings": (text("tokenizer_config.json", DEEP), "tokenizer_config.json is not JSON"),
    "deep tokenizer": (text("tokenizer.json", DEEP), "recursion"),
    "end as text": (generation(eos_token_id="x"), "eos_token_id is no token"),
    "suppressed text": (generation(suppress_tokens=["x"]), "suppress_tokens is no list of tokens"),
    "suppressed number": (generation(suppress_tokens=5), "cannot load it"),
    "all suppressed": (generation(suppress_tokens=[*range(2000)]), "suppress_tokens leaves no token"),
    "penalty that is no number": (generation(repetition_penalty=float("nan")), "repetition_penalty is nan"),
    "token of 60 bits": (added(2**60, "<x>"), "cannot load it"),
    "token beyond the vocabulary": (renumbered, "expected token ids from 0 to"),
    "a token beyond it that the tokenizer adds by itself": (
        tokenizer(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, SEQUENCE],
                "pair": [SEQUENCE, SEQUENCE],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [999_999], "tokens": ["<s>"]}},
            }
        ),
        "expected token ids from 0 to",
    ),
    "no unknown token": (tokenizer(model={"type": "WordLevel", "unk_token": "no", "vocab": {"a": 0}}), "Missing"),
    "a tokenizer that panics": (
        tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "Cannot parse precompiled_charsmap",
    ),
    "texts that grow": (tokenizer(normalizer=replaced(3)), "more than 64 times as long"),
    "another class": (settings(tokenizer_class="pipeline"), "pipeline is no tokenizer"),
    "a tokenizer elsewhere": (settings(fast_tokenizer_files=["../../x/tokenizer.9.0.0.json"]), "not all in the folder"),
    "endless tokenizer": (link("tokenizer.json", "/dev/zero"), "tokenizer.json is not a file"),
    "endless weights": (link("model.safetensors", "/dev/zero"), "has neither model.safetensors nor an index"),
    "a pipe": (pipe("special_tokens_map.json"), "special_tokens_map.json is not a file"),
    "a pipe for a config": (pipe("config.json"), "has no config.json"),
    "a pipe for an index": (
        lambda folder: (index("inside.safetensors")(folder), pipe("model.safetensors.index.json")(folder)),
        "model.safetensors.index.json is not a file",
    ),
    "a link to nothing": (link("added_tokens.json", "nowhere"), "added_tokens.json is not a file"),
    "a shard outside": (index("../outside.safetensors"), "names '../outside.safetensors'"),
    "a shard by its path": (index("/etc/passwd"), "names '/etc/passwd'"),
    "a shard that is not there": (index("no.safetensors"), "not a safetensors file"),
    "no places": (index(None), "has neither model.safetensors nor an index"),
    "an adapter": (lambda folder: edited(folder, "adapter_config.json", peft_type="LORA"), "holds an adapter"),
}
HARMLESS: Mapping[str, Change] = {
    "10^9 labels": config(num_labels=10**9),
    "layers of another kind": config(per_layer_config={"0": {"hidden_size": 10**9}}),
    "a dtype that is a function": config(dtype="load"),
    "a quantiser that nobody knows": config(quantization_config={"quant_method": "os"}),
    "ends out of range": generation(eos_token_id=[10**9, 10**5]),
    "token of 32 bits": added(2**32 - 1, "<x>"),
    "files elsewhere": settings(tokenizer_file="/dev/zero", vocab_file="/dev/zero"),
    "a name elsewhere": config(_name_or_path="/etc/passwd"),
    "padding to 10^9": tokenizer(
        padding={
            "strategy": {"Fixed": 10**9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<pad>",
        }
    ),
}


OWN = {"head_dim": 16}
NO_MAP, NO_SIZE, OTHERS = "is no map of layers", "expected 1 to", "has more than"
BY_LAYER: Mapping[str, tuple[Any, str]] = {
    "a list of maps": ([OWN] * 12, NO_MAP),
    "an empty list": ([], NO_MAP),
    "zero": (0, NO_MAP),
    "a text": ("", NO_MAP),
    "a layer after the last": ({"12": OWN}, NO_MAP),
    "a layer before the first": ({"-1": OWN}, NO_MAP),
    "a layer twice": ({"1": OWN, "01": OWN}, NO_MAP),
    "a layer without a number": ({"": OWN}, NO_MAP),
    "a layer's number as a fraction": ({"1.0": OWN}, NO_MAP),
    "a layer's number in other digits": ({"\u0661": OWN}, NO_MAP),
    "a layer's number of 5000 digits": ({"9" * 5000: OWN}, NO_MAP),
    "a number for a layer": ({"01": 16}, OTHERS),
    "another size": ({"01": {"hidden_size": 64}}, OTHERS),
    "blocks that are left out": ({"01": {"skip": ["mlp"]}}, OTHERS),
    "a size in a map": ({"01": {"head_dim": OWN}}, NO_SIZE),
    "a size as a text": ({"01": {"head_dim": "16"}}, NO_SIZE),
    "a size as a fraction": ({"01": {"head_dim": 16.0}}, NO_SIZE),
    "a size that is true": ({"01": {"num_key_value_heads": True}}, NO_SIZE),
    "a size that is no number": ({"01": {"head_dim": float("nan")}}, NO_SIZE),
    "no size": ({"01": {"head_dim": None}}, NO_SIZE),
    "heads of 0": ({"01": {"head_dim": 0}}, NO_SIZE),
    "a negative size": ({"01": {"num_key_value_heads": -2}}, NO_SIZE),
    "a size of 30 digits": ({"01": {"num_key_value_heads": 10**30}}, NO_SIZE),
    "heads of an odd size": ({"01": {"head_dim": 15}}, "cannot share"),
    "heads that share unevenly": ({"01": {"num_key_value_heads": 3}}, "cannot share"),
    "layers of one type that differ": ({"01": {"head_dim": 16}}, "not homogeneous"),
    "sizes of all layers but the files'": ({}, "holds weights of another shape"),
}


@pytest.fixture(scope="module")
def sized(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of twelve layers whose sizes differ by layer; transformers pads the numbers of layers with zeros."""
    if "gemma4" not in VARIANTS:
        pytest.skip("this transformers lacks the family")
    folder = tmp_path_factory.mktemp("sized") / "model"
    shutil.copytree(model, folder)
    types = ["sliding_attention", "full_attention"] * 6
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    changes = {"layer_types": types, "num_hidden_layers": 12, "hidden_size_per_layer_input": 0, "eos_token_id": 2}
    tiny_model("gemma4", vocab_size=size, **changes).save_pretrained(folder)
    if "01" not in json.loads((folder / "config.json").read_text()).get("per_layer_config", {}):
        pytest.skip("this transformers has two sizes of heads in its place")
    return folder


def test_sizes_by_layer_are_read_as_transformers_writes_them(sized: Path) -> None:
    assert len(answered(sized, raw=True)) == 6


def crafted(model: Path, to: Path, change: Change) -> Path:
    """A copy of a model folder with a change."""
    shutil.copytree(model, to)
    change(to)
    return to


def refusal(folder: Path) -> str:
    """The line in which a folder is refused, soon and without the memory that it asks for."""
    tracemalloc.start()
    began = process_time()
    try:
        with pytest.raises(UserError) as refused:
            answered(folder, raw=True)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()
    assert process_time() - began < MOST_SECONDS
    line = str(refused.value)
    assert "\n" not in line
    assert len(line) < 600
    return line


@pytest.mark.parametrize("case", BY_LAYER)
def test_crafted_sizes_of_layers_are_refused_in_one_line(sized: Path, tmp_path: Path, case: str) -> None:
    by_layer, says = BY_LAYER[case]
    folder = crafted(sized, tmp_path / "crafted", config(per_layer_config=by_layer))
    line = refusal(folder)
    assert says in line
    assert line.startswith(f"{folder}: ")


@pytest.mark.parametrize("case", REFUSED)
def test_a_crafted_folder_is_refused_in_one_line(model: Path, tmp_path: Path, case: str) -> None:
    change, says = REFUSED[case]
    folder = crafted(model, tmp_path / "crafted", change)
    line = refusal(folder)
    assert says in line
    assert line.startswith((f"{folder}", "model:", "prompt"))


@pytest.mark.parametrize("case", HARMLESS)
def test_what_is_not_used_changes_nothing(model: Path, answer: list[int], tmp_path: Path, case: str) -> None:
    assert answered(crafted(model, tmp_path / "crafted", HARMLESS[case])) == answer
