"""Model folders of several families, and mutations of their files, each drawn from a seed."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from random import Random

from transformers import AutoTokenizer

from tests.folders import save_tiny_model
from tests.models import tiny_model
from tests.mutations import doubled, mutated
from tests.own_code import edited

FAMILIES = (
    *("llama", "qwen3-sliding", "phi3-longrope", "gemma3", "granite", "smollm3-sliding"),
    *("llama-yarn-rope", "gemma2", "olmo2", "mistral-sliding", "phi3-partial-rope"),
)
SHARDED = "llama-biases"
NUMBERS = (0, 1, -1, 2, 3, 7, 10**6, 10**8, 2**31, 2**53, 2**63, 10**12, 10**30, 1e-300, 1e300, 0.5, True)
DTYPES = ("F32", "F16", "BF16", "F64", "I8", "U8", "I64", "BOOL", "F8_E4M3", "F4", "X", "", None)
IN_CONFIG = (
    *("num_hidden_layers", "head_dim", "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "sliding_window", "layer_types", "rope_parameters"),
    *("rms_norm_eps", "original_max_position_embeddings", "no_rope_layers", "tie_word_embeddings", "model_type"),
    *("pad_token_id", "eos_token_id", "query_pre_attn_scalar", "partial_rotary_factor", "rope_theta", "num_labels"),
)
"""Entries that are changed more often than others, whether they are there or not."""


def save_families(folder: Path) -> list[str]:
    """Save one folder per family; returns their names."""
    save_tiny_model(folder / "tokenizer", weak=0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    for name in (*FAMILIES, SHARDED):
        model = tiny_model(name, vocab_size=len(tokenizer), num_hidden_layers=4, eos_token_id=2)
        model.save_pretrained(folder / name, **({"max_shard_size": "20KB"} if name == SHARDED else {}))
        tokenizer.save_pretrained(folder / name)
        edited(folder / name, "special_tokens_map.json", bos_token="<s>", pad_token="<pad>")
        edited(folder / name, "generation_config.json", eos_token_id=[2], repetition_penalty=1.0)
    shutil.rmtree(folder / "tokenizer")
    return [*FAMILIES, SHARDED]


def mutate_folder(folder: Path, seed: int) -> str:
    """Change one to three files of a model folder; returns what was changed."""
    random = Random(seed)
    files = sorted(path.name for path in folder.iterdir())
    # Most of what can go wrong follows from the config and the weights.
    favoured = [name for name in files if name == "config.json" or name.endswith(".safetensors")] * 3
    changes = list[str]()
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        name = random.choice(files + favoured)
        changes.append(f"{name}: {_change(random, folder / name)}")
    return "; ".join(changes)


def _change(random: Random, path: Path) -> str:
    kind = random.random()
    data = path.read_bytes()
    if kind < 0.1:
        path.write_bytes(data[: random.randrange(len(data) + 1)])
        return "cut"
    if kind < 0.2:
        _flip(random, path, len(data))
        return "bits flipped"
    if path.suffix == ".safetensors":
        return _change_weights(random, path)
    if path.suffix != ".json":
        path.write_bytes(data[random.randrange(len(data)) :] + data)
        return "doubled"
    try:
        known = json.loads(data)
    except ValueError:  # an earlier change has damaged it
        return "nothing"
    if path.name == "config.json" and random.random() < 0.5:
        name = random.choice(IN_CONFIG)
        known[name] = random.choice((*NUMBERS, None, "x", [], {}, [4], [1] * 1000, "llama", "qwen2", "mistral"))
        path.write_text(json.dumps(known))
        return f"{name}={str(known[name])[:20]}"
    # Most numbers of a vocabulary are ids.
    path.write_text(doubled(random, json.dumps(mutated(random, known, random.random() < 0.3))))
    return "structure"


def _flip(random: Random, path: Path, most: int) -> None:
    changed = bytearray(path.read_bytes())
    for _ in range(random.randint(1, 4)):
        if most:
            changed[random.randrange(min(most, len(changed)))] ^= 1 << random.randrange(8)
    path.write_bytes(changed)


def _change_weights(random: Random, path: Path) -> str:
    """Change the header of a safetensors file, as it stands or with its numbers where they were."""
    data = path.read_bytes()
    try:
        length = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + length])
        name = random.choice(sorted(set(header) - {"__metadata__"}))
        entry = header[name]
        change = random.choice(("bits", "length", "dtype", "shape", "place", "name", "drop", "entry", "structure"))
        other = header[random.choice(sorted(set(header) - {"__metadata__"}))]
        if change == "bits":
            _flip(random, path, 8 + length)
            return "bits of the header"
        if change == "length":
            path.write_bytes(struct.pack("<Q", random.choice((0, 1, length - 1, length + 9, 2**40, 2**63))) + data[8:])
            return "length of the header"
        if change == "dtype":
            entry["dtype"] = random.choice(DTYPES)
        elif change == "shape":
            shape = random.choice((entry["shape"][::-1], [*entry["shape"], 1], [], [2**40, 2**40], [-1, -4], [None]))
            entry["shape"] = shape
        elif change == "place":
            entry["data_offsets"] = random.choice(
                (other["data_offsets"], [0, 2**60], [-4, 8], entry["data_offsets"][::-1])
            )
        elif change == "name":
            header[random.choice((f"{name}x", name[:-1], name.replace("0", "9"), name[6:]))] = header.pop(name)
        elif change == "drop":
            del header[name]
        elif change == "entry":
            # Two tensors of one shape may change places, which is another model.
            entry["data_offsets"], other["data_offsets"] = other["data_offsets"], entry["data_offsets"]
        else:
            header = mutated(random, header, False)
        text: bytes = json.dumps(header).encode()
    except (ValueError, KeyError, TypeError, IndexError, struct.error, AttributeError):
        return "nothing"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return f"{change} of {name}"
