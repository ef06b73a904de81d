"""Mutations of what a bundle's files say, each drawn from a seed, with the hashes in the manifest computed again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import save

from tests.bundles import WIDTH
from tests.damage import MANIFEST, contents, dump, load, read_tensors, rewrite, swap

VALUES: tuple[Any, ...] = (
    *(None, "", "x", "../x", "/etc/passwd", "a\x1b[31mb", "\u202e", "x" * 3000, True, False),
    *([], {}, [[]], [[[1]]], {"a": {"a": 1}}, json.loads("[" * 40 + "]" * 40), list(range(3000))),
    *(-1, 0, 1, 2, 63, 2**63, 10**400, -0.5, 0.5, 1e-9, 1e-300, 1e4, 1e308, float("inf"), float("nan")),
)
SHAPES = ((), (0,), (1,), (3,), (1, 1), (2, 2), (1, WIDTH), (WIDTH,), (2, WIDTH), (2, WIDTH, WIDTH), (0, WIDTH))
DTYPES = ("float32", "float16", "float64", "int64", "int32", "uint8", "bool")
NUMBERS = (0.0, 1.0, -1.0, 299.0, 6e4, 3e38, float("nan"), float("inf"))
FACTORS = (-1, 0, 0.5, 0.9, 1.01, 2, 1e-4, 1e4)
STRUCTURES = ("drop", "double", "replace", "fill", "rename", "swap")


def mutate(folder: Path, seed: int) -> list[str]:
    """Change one or two places in one or two of the bundle's files; returns the files' names.

    Half of the mutations keep the structure and scale numbers by a little or a lot: most of them pass the checks of
    the schema and reach planning. The others change structures, types, shapes and metadata.
    """
    random = Random(seed)
    files = sorted(name for name in contents(folder) if not name.startswith("report"))
    names = random.sample(files, random.choice((1, 1, 2)))
    gentle = random.random() < 0.5
    for name in sorted(names, key=lambda name: name == MANIFEST):  # which the others are listed in
        path = folder / name
        if name.endswith(".safetensors"):
            swap(folder, name, _altered_tensors(random, path, gentle))
        elif name == MANIFEST:
            path.write_text(dump(mutated(random, load(path.read_text()), False)))
        elif name.endswith(".json"):
            rewrite(folder, name, doubled(random, json.dumps(mutated(random, json.loads(path.read_text()), gentle))))
        else:
            rewrite(folder, name, doubled(random, dump(mutated(random, load(path.read_text()), gentle))))
    return names


def slots(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key or index) at any depth."""
    for key in list(data) if isinstance(data, dict) else range(len(data)):
        yield data, key
        if isinstance(data[key], dict | list):
            yield from slots(data[key])


def _mapped(data: Any, change: Callable[[float], Any]) -> Any:
    """The structure of `data` with every number changed."""
    if isinstance(data, dict):
        return {key: _mapped(part, change) for key, part in data.items()}
    if isinstance(data, list):
        return [_mapped(part, change) for part in data]
    return change(data) if isinstance(data, int | float) and not isinstance(data, bool) else data


def mutated(random: Random, data: Any, gentle: bool) -> Any:
    """A copy of what a YAML or JSON file holds, with one or two places changed."""
    data = copy.deepcopy(data)
    for _ in range(random.choice((1, 1, 2))):
        places = list(slots(data))
        if not places:
            return data
        # By name first: most places are numbers of an acceptance profile.
        name = random.choice(sorted({str(key) for _, key in places}))
        container, key = random.choice([place for place in places if str(place[1]) == name])
        if gentle:
            factor = random.choice(FACTORS)
            container[key] = _mapped(container[key], lambda number, by=factor: type(number)(number * by))  # type: ignore[misc]
        else:
            _restructure(random, container, key)
    return data


def _restructure(random: Random, container: Any, key: Any) -> None:
    """Change the structure at one place."""
    change = random.choice(STRUCTURES)
    if change == "drop":
        del container[key]
    elif change == "double":
        copied = copy.deepcopy(container[key])
        if isinstance(container, list):
            container.insert(key, copied)
        else:
            container[f"{key}-2"] = copied
    elif change == "replace":
        container[key] = copy.deepcopy(random.choice(VALUES))
    elif change == "fill":
        value = random.choice(VALUES)
        container[key] = _mapped(container[key], lambda _: copy.deepcopy(value))
    elif change == "rename" and isinstance(container, dict):
        container[random.choice(("", "x", "../x", "a\x1b[2J", str(key).upper(), f"{key} "))] = container.pop(key)
    else:
        keys = list(container) if isinstance(container, dict) else range(len(container))
        other = random.choice(list(keys))
        container[key], container[other] = container[other], container[key]


def doubled(random: Random, text: str) -> str:
    """The text, sometimes with its first key a second time."""
    if random.random() > 0.03:
        return text
    return text.replace("{", '{"device": 1, ', 1) if text.startswith("{") else f"{text}name: one\n"


def _altered_tensors(random: Random, path: Path, gentle: bool) -> bytes:
    """A safetensors file with one tensor changed, or its metadata."""
    tensors, metadata = read_tensors(path)
    about = {name: json.loads(text) for name, text in metadata.items()}
    if about and not gentle and random.random() < 0.5:
        changed = mutated(random, about, False)
        return save(tensors, {str(name): json.dumps(part) for name, part in changed.items()})
    name = random.choice(sorted(tensors))
    known = tensors.pop(name)
    change = "scale" if gentle else random.choice(("drop", "replace", "fill", "dtype", "shape"))
    value = random.choice(NUMBERS)
    with np.errstate(all="ignore"):
        if change == "scale":
            noise = np.random.default_rng(random.getrandbits(32)).normal(1.0, 0.5, known.shape)
            tensors[name] = np.asarray(known * noise).astype(known.dtype)
        elif change == "replace":
            tensors[name] = np.full(random.choice(SHAPES), value).astype(random.choice(DTYPES))
        elif change == "fill":
            tensors[name] = np.full(known.shape, value).astype(known.dtype)
        elif change == "dtype":
            tensors[name] = known.astype(random.choice(DTYPES))
        elif change == "shape":
            tensors[name] = np.concatenate([known, known], axis=random.randrange(known.ndim)) if known.ndim else known
    return save(tensors, metadata)
