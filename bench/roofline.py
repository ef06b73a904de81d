"""Measures how near this engine and llama.cpp come to the memory's speed, and what further rows of a step cost.

`python -m bench.roofline MODEL.gguf --llama-bench build/llama.cpp/bin/llama-bench` measures in turn, in every round:
how fast a loop reads memory, and for both engines plain steps, prefills, and steps of 2 to 32 rows. All have the same
threads. Without `--llama-bench`, or with another kind of model, it measures this engine alone.

llama-bench computes the logits of the last row alone and chooses no token; ours computes those of every row, and its
steps choose tokens. llama-bench's 32 plain steps have 16 tokens before them on average, and ours have 16.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from bench.harness.provenance import Watch, disturbance, processor
from bench.harness.standings import FEWEST
from bench.harness.tables import with_interval
from ssd_profiles.errors import UserError
from ssd_profiles.intervals import speedup, speedup_interval
from ssd_runtime.commands.command import run_guarded, uncollected
from ssd_runtime.devices.clock import seconds
from ssd_runtime.loading.models import load_model
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.model.family.families import family_of
from ssd_runtime.profiling.kernel_choice import fitted_decoder
from ssd_runtime.profiling.llama_bench import llama_bench
from ssd_runtime.sampling.argmax import argmax
from ssd_runtime.sequence.session import Session
from ssd_runtime.weights.gguf.index import GgufIndex
from ssd_runtime.weights.packed_linear import PackedExperts, PackedLinear

ROWS = (2, 4, 8, 16, 32)
PREFILLS = (64, 512)
PLAIN_STEPS = 32
CONTEXT = 16
REPEATS = 3
"""Samples of a figure in a round, of which the median counts."""
LOOP_BYTES = 1 << 30
"""Bytes that the loop reads: many times a processor's cache."""
EXPERTS = "_exps."
"""Part of the names of a file's tensors of all experts, of which a row reads some."""
KINDS = {"MLP": ".ffn_", "mixers": "blk.", "head": ""}
"""The kinds of weights, and what names of a file's tensors have in them that have nothing of those before."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one engine in one round."""

    steps: Mapping[int, float]
    """Seconds of a step by its number of rows; a plain step has one."""
    prefills: Mapping[int, float]
    """Seconds by the number of tokens of a prompt."""


@dataclass(frozen=True, slots=True)
class Side:
    """One engine's figures: bytes of weights that a step reads, by kind, and its times in every round."""

    weights: Mapping[str, int]
    rounds: Sequence[Times]

    @property
    def all(self) -> int:
        """Bytes of all kinds."""
        return sum(self.weights.values())


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's own benchmark, built for this processor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--weights", choices=("packed", "dense"))
    parser.add_argument("--dtype")
    parser.add_argument("--device")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with uncollected():  # As commands do.
        loaded = load_model(arguments.model, arguments.device, arguments.dtype, arguments.weights)
    file = loaded.source.gguf if loaded.source is not None else None
    if arguments.llama_bench is not None and file is None:
        raise UserError("--llama-bench: needs packed weights; give a .gguf file, and --weights packed for the demo")
    decoder = fitted_decoder(loaded.model)
    buffer = torch.ones(LOOP_BYTES // 4, device=decoder.device)
    watch = Watch()
    loops, own, theirs = list[float](), list[Times](), list[Times]()
    for _ in range(arguments.rounds):
        loops.append(loop_seconds(buffer) / LOOP_BYTES)
        own.append(measured(decoder))
        if arguments.llama_bench is not None and file is not None:
            theirs.append(of_llama_cpp(arguments.llama_bench, file.path, arguments.threads))
    ours = Side(held_bytes(decoder.model), own)
    peer = Side(file_bytes(file) if file is not None else {}, theirs)
    about = f"{processor()}, {arguments.threads} threads; {decoder.kernels}; {arguments.rounds} rounds in turn."
    print(f"{about} {disturbance(watch.stolen())}\n")
    print("\n".join(f"| {' | '.join(cells)} |" for cells in table(ours, peer, loops)))


def table(ours: Side, theirs: Side, loops: Sequence[float]) -> list[tuple[str, str, str, str]]:
    """The rows of the table: a name, a figure of each engine, and our speed (or bytes) ÷ llama.cpp's.

    `loops` are the seconds per byte of the loop in every round. Intervals are over rounds. What is unknown is empty.
    """
    rows = [("", "ours", "llama.cpp", "ours ÷ llama.cpp"), ("---", "---", "---", "---")]

    def add(name: str, cell: Callable[[Side], str], taken: Callable[[Times], float] | None = None) -> None:
        """Add a row; with `taken`, the seconds of a round, speeds are compared."""
        own, peer = ([taken(each) for each in side.rounds] if taken else [] for side in (ours, theirs))
        rows.append((name, cell(ours), cell(theirs) if theirs.rounds else "", ratio(peer, own)))

    def steps(side: Side, n: int = 1) -> list[float]:
        return [each.steps[n] for each in side.rounds]

    def rate(n: int, side: Side) -> str:
        return f"{n / fmean(each.prefills[n] for each in side.rounds):.0f}"

    def cost(n: int, side: Side) -> str:
        return ratio(steps(side, n), steps(side))

    for kind, held in (*ours.weights.items(), ("all", ours.all)):
        stored = theirs.all if kind == "all" else theirs.weights.get(kind, 0)
        known = (f"{stored / 1e6:.1f}", f"{held / stored:.3f}") if stored else ("", "")
        rows.append((f"weights per token, {kind}, MB", f"{held / 1e6:.1f}", *known))
    add("plain step, ms", lambda side: f"{fmean(steps(side)) * 1e3:.2f}", lambda times: times.steps[1])
    add("tokens/s", lambda side: f"{1 / fmean(steps(side)):.1f}")
    add("GB/s", lambda side: f"{side.all / fmean(steps(side)) / 1e9:.1f}")
    share = f"share of the {1e-9 / fmean(loops):.1f} GB/s at which a loop reads memory"
    add(share, lambda side: ratio([side.all * each for each in loops], steps(side)))
    for n in PREFILLS:
        add(f"prefill of {n} tokens, tokens/s", partial(rate, n), partial(_prefill, n))
    for n in ROWS:
        add(f"step of {n} rows ÷ plain step", partial(cost, n))
    return rows


def _prefill(n: int, times: Times) -> float:
    return times.prefills[n]


def ratio(over: Sequence[float], under: Sequence[float]) -> str:
    """A ratio of totals over rounds with its 95% interval; empty without rounds."""
    if not over:
        return ""
    found = {"speedup": speedup(over, under)}
    if len(over) >= FEWEST and (ends := speedup_interval(over, under)):
        found |= {"low": ends[0], "high": ends[1]}
    return with_interval(found)


def file_bytes(index: GgufIndex) -> dict[str, int]:
    """Bytes of a file's matrices that a step reads, by kind. A file without a head's own shares the embeddings'."""
    head = "output.weight" if "output.weight" in index.tensors else "token_embd.weight"
    found = dict.fromkeys(KINDS, 0)
    about: Mapping[str, Any] = index.metadata
    experts, used = (about.get(f"{index.architecture}.expert_{key}", 1) for key in ("count", "used_count"))
    for name, place in index.tensors.items():
        kind = next(kind for kind, part in KINDS.items() if part in name)
        if len(place.shape) > 1 and (kind != "head" or name == head):
            found[kind] += place.nbytes * used // experts if EXPERTS in name else place.nbytes
    return found


def held_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of a model's matrices that a step reads, by kind, as the modules hold them."""
    of: Any = model
    config = of.config
    family, layers = family_of(config), of.model.layers
    used = int(getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 0)
    blocks = [family.mlp, *(("experts", family.router) if family.beside else ())]
    found = (getattr(layer, str(name), None) for layer in layers for name in blocks)
    mlps = sum(_matrices(block, used) for block in found if block is not None)
    every = sum(_matrices(layer, used) for layer in layers)
    return {"MLP": mlps, "mixers": every - mlps, "head": _matrices(of.lm_head)}


def _matrices(module: nn.Module, used: int = 0) -> int:
    """Bytes of a module's matrices that a row reads, which goes to `used` experts.

    Projections that share a kernel count once.
    """
    parts = list(module.modules())
    kernels = {id(each.kernel): each.kernel.nbytes for each in parts if isinstance(each, PackedLinear)}
    whole = sum(kernels.values()) + sum(each.nbytes for each in module.parameters() if each.ndim == 2)
    mixtures = (each for each in parts if isinstance(each, PackedExperts))
    return whole - sum((len(mixture.each) - used) * _matrices(mixture.each[0]) for mixture in mixtures)


def loop_seconds(buffer: Tensor) -> float:
    """Seconds in which `buffer` is read once: the least of several reductions' on torch's threads."""
    return min(seconds(read, buffer.device) for read in (buffer.sum, buffer.norm, buffer.amax) for _ in range(REPEATS))


def measured(decoder: Decoder) -> Times:
    """Times of this engine in one round."""
    session = Session(decoder)
    session.prefill(decoder.probe_ids(CONTEXT))

    def step(rows: int, count: int = 1) -> None:
        for _ in range(count):
            logits = decoder.logits(session.forward(decoder.probe_ids(rows)))
            with decoder.beside_steps():
                argmax(logits).tolist()

    def prefill(tokens: int) -> None:
        Session(decoder).prefill(decoder.probe_ids(tokens))

    def sample(work: Callable[[], None]) -> float:
        work()  # llama-bench warms up, too
        return median(seconds(work, decoder.device) for _ in range(REPEATS))

    return Times(
        steps={1: sample(partial(step, 1, PLAIN_STEPS)) / PLAIN_STEPS} | {n: sample(partial(step, n)) for n in ROWS},
        prefills={n: sample(partial(prefill, n)) for n in PREFILLS},
    )


def of_llama_cpp(program: Path, file: Path, threads: int) -> Times:
    """Times of llama.cpp in one round. Raises UserError if its program fails."""
    prompts = (*ROWS, *PREFILLS)
    tests = llama_bench(program, file, threads=threads, prompts=prompts, new=PLAIN_STEPS, repeats=REPEATS)
    taken = {test.n_prompt: test.seconds for test in tests}
    return Times({1: taken[0] / PLAIN_STEPS} | {n: taken[n] for n in ROWS}, {n: taken[n] for n in PREFILLS})


if __name__ == "__main__":
    run_guarded(main)
