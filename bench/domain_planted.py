"""A model in which some weak layers matter in one domain only: the ground truth for masks by domain.

`python -m bench.domain_planted --out build/domain-planted --domains gsm8k,humaneval`
A planted model (bench.planted) of which most weak layers get an MLP that is off in one of two domains: its gate is a
linear classifier of the two domains' normed states, fitted where the layer stands; what it lets through is the
preceding layer's up and down projection of the state, `--strength` of its size. A mask for one domain may skip the
layers gated to the other, one for both may not.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from bench.planted import plant
from ssd_artifacts.files import new_folder
from ssd_compiler.calibrate import continue_prompts
from ssd_compiler.prompts import load_prompts
from ssd_compiler.settings import CompileSettings
from ssd_profiles.mask import SkipMask
from ssd_runtime.decoder import Decoder
from ssd_runtime.models import LoadedModel, load_model
from ssd_runtime.session import Session

TRUTH = "planted.json"
SHARPNESS = 2.0
"""What the classifier's margins are multiplied by: silu is nearly 0 well below 0 and linear well above."""
PROMPT_TAIL = 160
"""Last prompt tokens of a sample that a gate is fitted on, beside its continuation."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A sample with its state on the way up."""

    domain: int
    session: Session
    x: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, default=Path("build/domain-planted"))
    parser.add_argument("--domains", default="gsm8k,humaneval")
    parser.add_argument("--epsilon", type=float, default=0.03)
    parser.add_argument("--strength", type=float, default=0.1)
    parser.add_argument("--gated", type=int, default=13, help="layers of each domain")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    domains = tuple(arguments.domains.split(","))
    loaded = load_model(arguments.model, "cpu", "fp32")
    texts = _texts(loaded, domains)
    # Gates need a bias, which Llama's MLP has as an option.
    loaded.model.config.mlp_bias = True
    _add_biases(loaded.model)
    layers = loaded.model.config.num_hidden_layers
    model, weak = plant(loaded.model, arguments.epsilon, layers, arguments.seed)
    places = sorted({index // 2 for index in weak})
    # The first layers do not know yet which domain they are in.
    late = [place for place in places if place >= len(model.model.layers) // 4]
    chosen = random.Random(arguments.seed).sample(late, min(2 * arguments.gated, len(late)))
    gated = {place: number % 2 for number, place in enumerate(sorted(chosen))}
    told = gate(model, texts, gated, arguments.strength)
    masks = truth(weak, gated, domains)
    with new_folder(arguments.out) as folder:
        model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
        (folder / TRUTH).write_text(json.dumps({name: mask.hex() for name, mask in masks.items()}, indent=1) + "\n")
    print(f"{arguments.out}: {len(model.model.layers)} layers; tokens told apart by the gates: {np.mean(told):.3f}")
    for name, mask in masks.items():
        print(f"{name} may skip {mask}")


def truth(weak: SkipMask, gated: dict[int, int], domains: Sequence[str]) -> dict[str, SkipMask]:
    """What each domain may skip, and what both may (`mix`)."""
    everywhere = set(weak) - {2 * place + 1 for place in gated}
    masks = {"mix": SkipMask.of(weak.num_layers, everywhere)}
    for number, name in enumerate(domains):
        foreign = {2 * place + 1 for place, domain in gated.items() if domain != number}
        masks[name] = SkipMask.of(weak.num_layers, everywhere | foreign)
    return masks


@torch.inference_mode()
def gate(
    model: nn.Module, texts: Sequence[tuple[int, list[int]]], gated: dict[int, int], strength: float
) -> list[float]:
    """Give the MLP of each layer in `gated` a gate that opens in its domain; returns how well each tells tokens apart.

    Layer by layer from below, on the states that the gates before leave.
    """
    decoder = Decoder(model, weight_memory=0)  # type: ignore[arg-type]
    running = []
    for domain, ids in texts:
        session = Session(decoder)
        session.cache.reserve(len(ids))
        running.append(_Text(domain, session, decoder.embed(ids)))
    told = []
    for place in range(decoder.shape.num_layers):
        attended = []
        for text in running:
            span = decoder.span(text.session.cache, 0, text.x.shape[0])
            attended.append(decoder.attention(place, text.x, text.session.cache, span))
        if place in gated:
            told.append(_set_gate(model.model.layers[place], gated[place], running, attended, strength))
            decoder.refresh()
        running = [
            _Text(text.domain, text.session, decoder.mlp(place, x)) for text, x in zip(running, attended, strict=True)
        ]
    return told


def _set_gate(
    layer: nn.Module, domain: int, running: Sequence[_Text], attended: Sequence[Tensor], strength: float
) -> float:
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    assert isinstance(norm, nn.Module)
    assert isinstance(mlp, nn.Module)
    normed = [norm(x)[-PROMPT_TAIL:] for x in attended]
    features = torch.cat(normed).numpy()
    labels = np.concatenate([np.full(len(x), text.domain == domain) for x, text in zip(normed, running, strict=True)])
    classifier = LogisticRegression(C=0.01, max_iter=500, class_weight="balanced").fit(features, labels)
    direction = torch.from_numpy(classifier.coef_[0]).float() * SHARPNESS
    mlp.gate_proj.weight.copy_(direction.expand_as(mlp.gate_proj.weight))
    mlp.gate_proj.bias.fill_(float(classifier.intercept_[0]) * SHARPNESS)
    own = torch.from_numpy(labels)
    x = torch.cat([x[-PROMPT_TAIL:] for x in attended])[own]
    out = mlp(torch.cat(normed)[own])
    scale = strength * float(x.norm(dim=-1).mean() / out.norm(dim=-1).mean())
    mlp.down_proj.weight.mul_(scale)
    return float(classifier.score(features, labels))


def _texts(loaded: LoadedModel, domains: Sequence[str]) -> list[tuple[int, list[int]]]:
    """Prompts of the domains with the model's own continuations, by number of domain."""
    settings, decoder, found = CompileSettings("", tuple(domains), seed=1), Decoder(loaded.model), []
    for number, name in enumerate(domains):
        prompts = load_prompts(name, settings, loaded, lambda _: None)
        ids = [*prompts.search, *prompts.asked[:12]]
        continued = continue_prompts(decoder, ids, 64, loaded.eos_ids, lambda: None)
        found += [(number, each["prompt"] + each["continuation"]) for each in continued]
    return found


def _add_biases(model: nn.Module) -> None:
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(layer.mlp, name)
            linear.bias = nn.Parameter(torch.zeros(linear.out_features))


if __name__ == "__main__":
    main()
