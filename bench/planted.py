"""A model whose skippable layers are known, made from any Llama-like model: the ground truth of a search.

Weak layers are put at random places among the real ones. Each is a copy of the real layer before it with the
output projections of its attention and MLP scaled by epsilon, so that skipping it changes little, and skipping a real
layer much. Run as a command it writes one as a folder: `python -m bench.planted --out build/planted`.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Collection
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ssd_profiles.mask import SkipMask
from ssd_runtime.command import run_guarded

WEAK_FILE = "planted.hex"


def plant(model: PreTrainedModel, epsilon: float, weak: int, seed: int = 0) -> tuple[PreTrainedModel, SkipMask]:
    """A new model of `weak` more layers at random places, and the mask of those."""
    # A weak layer follows some real layer: the first place is never weak.
    places = range(1, model.config.num_hidden_layers + weak)
    return plant_at(model, epsilon, random.Random(seed).sample(places, weak))


def plant_at(model: PreTrainedModel, epsilon: float, places: Collection[int]) -> tuple[PreTrainedModel, SkipMask]:
    """A new model with weak layers at `places`, and the mask of those. The model given is left as it is."""
    total = model.config.num_hidden_layers + len(places)
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = total
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * total
    sources, layer = [], -1
    for place in range(total):
        layer += place not in places
        sources.append(layer)
    with torch.device("meta"):
        planted = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    given = model.state_dict()
    state = {name: value for name, value in given.items() if ".layers." not in name}
    for place, source in enumerate(sources):
        prefix = f"model.layers.{source}."
        for name, value in given.items():
            if name.startswith(prefix):
                part = name.removeprefix(prefix)
                scaled = place in places and part.split(".")[-2] in ("o_proj", "down_proj")
                state[f"model.layers.{place}.{part}"] = value * epsilon if scaled else value.clone()
    planted.load_state_dict(state, assign=True, strict=True)
    planted.tie_weights()
    # Buffers that no checkpoint holds were made on the meta device; the real model has them.
    planted.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    planted.generation_config = copy.deepcopy(model.generation_config)
    mask = SkipMask.of(total, {2 * place + part for place in places for part in (0, 1)})
    return planted.eval(), mask


def write_planted(spec: str, out: Path, epsilon: float, seed: int) -> SkipMask:
    """Plant as many weak layers as `spec` has real ones and save the model, its tokenizer and the mask."""
    from ssd_artifacts.files import new_folder
    from ssd_runtime.loading.models import load_model

    loaded = load_model(spec, "cpu", "fp32")
    model, mask = plant(loaded.model, epsilon, loaded.model.config.num_hidden_layers, seed)
    with new_folder(out) as folder:
        model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        (folder / WEAK_FILE).write_text(mask.hex() + "\n")
    return mask


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, default=Path("build/planted"))
    parser.add_argument("--epsilon", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    mask = write_planted(arguments.model, arguments.out, arguments.epsilon, arguments.seed)
    print(f"{arguments.out}: {mask.num_layers} layers, weak: {mask}")


if __name__ == "__main__":
    run_guarded(main)
