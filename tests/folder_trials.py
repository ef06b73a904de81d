"""Loads mutated model folders and decodes with them, in a process of its own that is watched from outside.

The command takes a folder and the first and last seed. It writes one line of JSON per seed to standard output.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from ssd_profiles.errors import UserError
from ssd_runtime.engine.engine import Engine
from ssd_runtime.engine.turn import RunSettings
from ssd_runtime.loading.loaded_model import LoadedModel
from ssd_runtime.loading.models import load_model
from tests.folder_mutations import mutate_folder, save_families
from tests.served import memory, reset_peak

QUESTION = "How many loaves did the baker count?"
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])


@dataclass(frozen=True, slots=True)
class Trial:
    """The outcome of one mutated folder."""

    seed: int
    changed: str
    outcome: str
    """refused, decoded, or what is wrong."""
    told: str
    seconds: float
    """Processor time."""
    grown: int
    """Bytes by which the process's memory grew at most."""


def main() -> None:
    """Try the seeds."""
    folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    sys.stdout, lines = sys.stderr, sys.stdout
    names = save_families(folder)
    known = {name: _logits(load_model(str(folder / name), "cpu")) for name in names}
    for seed in range(first, last):
        name = names[seed % len(names)]
        mutated = folder / "mutated"
        shutil.copytree(folder / name, mutated)
        changed = f"{name}: {mutate_folder(mutated, seed)}"
        reset_peak(os.getpid())
        before, began = memory(os.getpid(), "VmRSS"), process_time()
        try:
            outcome, told = _decoded(mutated, known[name])
        except UserError as error:
            outcome, told = "refused", str(error)
        except BaseException:
            outcome, told = "traceback", traceback.format_exc()[-1500:]
        trial = Trial(seed, changed, outcome, told, process_time() - began, memory(os.getpid(), "VmHWM") - before)
        print(json.dumps(asdict(trial)), file=lines, flush=True)
        shutil.rmtree(mutated)


def _decoded(folder: Path, known: Tensor) -> tuple[str, str]:
    """Load a folder and decode with it; the outcome, and a word on it."""
    loaded = load_model(str(folder), "cpu")
    ids = loaded.encode([("user", QUESTION)], raw=True)
    answer = Engine(loaded, weight_memory=0).runner(RunSettings("plain", max_new_tokens=4)).answer(QUESTION)
    got = _logits(loaded)
    told = f"{len(answer.generation.token_ids)} tokens"
    if not torch.equal(got, known):
        # The mutation is one of what matters: transformers says what such a model computes.
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, dtype=torch.float32).eval()
        with torch.inference_mode():
            if not torch.allclose(got, model(IDS).logits, rtol=0.0, atol=0.0, equal_nan=True):
                return "other logits", told
    if ids != _tokens_by_transformers(folder, loaded):
        return "other tokens", told
    return "decoded", told


def _tokens_by_transformers(folder: Path, loaded: LoadedModel) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder, config=loaded.model.config, trust_remote_code=False)
    return list(tokenizer(QUESTION)["input_ids"])


@torch.inference_mode()
def _logits(loaded: LoadedModel) -> Tensor:
    logits: Tensor = loaded.model(IDS).logits
    return logits
