"""Tokens/s of one request at a time on a `.gguf` file: ours, plain and `auto`, against llama.cpp's own server.

`python -m bench.llama_cpp MODEL.gguf --server build/llama.cpp/bin/llama-server` decodes the same prompts with the same
threads, greedily and in turn, prefills left out. The server decodes plainly, and with each type of speculation that
needs no draft model. Every setting has a server of its own, so the weights are in memory once more for each.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.request import Request, urlopen

import torch
from rich.console import Console

from bench.fixtures.prompts.prompt_files import SPEC_BENCH, stratified
from bench.harness.contenders import PLAIN, Decode, Timed, about, digest, ours
from bench.harness.ledger import NAME, Ledger, stolen_share
from bench.harness.provenance import disturbance
from bench.harness.standings import standings
from bench.harness.tables import DECODING, show
from bench.harness.turns import Make, decode_in_turn
from ssd_profiles.errors import UserError, first_line
from ssd_runtime import Engine
from ssd_runtime.commands.command import run_guarded, uncollected
from ssd_runtime.loading.sources import find_packed

LLAMA = "llama.cpp"
STRATEGIES = (PLAIN, "auto")
SPECULATIONS = (
    "ngram-simple",
    "ngram-simple+size-n=4+size-m=7",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-mod+n-match=4+n-min=1+n-max=7",
    "ngram-cache",
)
"""The server's types of speculation without a draft model, by its own settings: drafts of up to 48 or 64 tokens after
12 or 24 equal ones. So two are tried with short drafts, too, since rows are dear on a CPU."""
SETTLE = 0.5
"""Seconds between two contenders: the server's threads spin for a while after their work."""
CONTEXT = 4096
"""Most tokens of a request of a server."""
PATIENCE = 600.0
"""Longest wait in seconds for a server to start, and for an answer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a .gguf file, or demo@wheel")
    parser.add_argument("--server", type=Path, required=True, help="llama-server, built for this processor")
    parser.add_argument("--speculations", default=",".join(SPECULATIONS), help="such as ngram-simple+size-m=8; or none")
    parser.add_argument("--prompts", type=Path, default=SPEC_BENCH)
    parser.add_argument("--count", type=int, default=13, help="prompts, spread over the categories")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--out", type=Path, default=Path("build/llama-cpp"), help="folder of rows; a killed run resumes"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with uncollected():  # As commands do.
        engine = Engine.open(model=arguments.model, weights="packed")
    prompts = stratified(arguments.prompts, arguments.count)
    settings = peers(arguments.speculations)
    ledger = Ledger(
        arguments.out / NAME,
        {
            **about(engine),
            "prompts": [arguments.prompts.name, len(prompts), digest(prompts)],
            "max_new_tokens": arguments.max_new_tokens,
            "contenders": [*settings, *STRATEGIES],
            "name": f"{Path(arguments.model).name}, packed",
            "server": version(arguments.server),
        },
    )
    console = Console(highlight=False, width=160)
    if not all(ledger.has(prompt.id, 0) for prompt in prompts):
        with ExitStack() as stack:
            contenders: dict[str, Make] = {}
            for name, setting in settings.items():
                command = llama(arguments.server, arguments.model, arguments.threads, setting)
                server = stack.enter_context(serving(command, arguments.out / f"{setting}.log"))
                contenders[name] = partial(_any_stream, server)
            contenders |= {name: partial(ours, engine, name) for name in STRATEGIES}
            new = arguments.max_new_tokens
            decode_in_turn(
                ledger, engine, contenders, prompts, new, compared=STRATEGIES, settle=SETTLE, console=console
            )
    tell(ledger, list(settings), console)


def _any_stream(server: Decode, stream: str) -> Decode:
    return server


def tell(ledger: Ledger, peers: Sequence[str], console: Console, title: str = DECODING) -> None:
    """Print the standings against plain decoding and llama.cpp, without and with its fastest speculation."""
    rates = {name: each["overall"]["tokens_per_second"] for name, each in standings(ledger.rows, []).items()}
    fastest = sorted(peers, key=lambda name: rates[name] or 0.0)[-1:]
    bases = list(dict.fromkeys((PLAIN, *peers[:1], *fastest)))
    show(standings(ledger.rows, bases), PLAIN, bases, console, title)
    for name in fastest:
        console.print(f"llama.cpp's fastest setting on these prompts: {name}.")
    console.print(disturbance(stolen_share(ledger.rows)))


def peers(speculations: str) -> dict[str, str]:
    """The server's contenders by name: without speculation, and with each of a list's types, such as `ngram-mod`."""
    kinds = [kind for kind in speculations.split(",") if kind != "none"]
    return {LLAMA: "none"} | {f"{LLAMA} {kind}": kind for kind in kinds}


def llama(server: Path, model: str, threads: int, setting: str) -> list[str]:
    """The command of a server that decodes the file of `model`; `setting` is such as `none` or `ngram-simple+size-n=4`.

    Raises UserError for a model without such a file.
    """
    index = find_packed(model).gguf
    assert index is not None
    kind, *assignments = setting.split("+")
    pairs = [assignment.partition("=") for assignment in assignments]
    options = (word for name, _, value in pairs for word in (f"--spec-{kind}-{name}", value))
    return [str(server), "-m", str(index.path), "-t", str(threads), "--spec-type", kind, *options]


@contextmanager
def serving(command: Sequence[str], log: Path, slots: int = 1) -> Iterator[Decode]:
    """A server of `slots` requests at once in a process of its own, as a contender; its messages go into `log`.

    Raises UserError if it cannot be started.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ["--host", "127.0.0.1", "--port", str(port), "--parallel", str(slots)]
    where += ["--ctx-size", str(slots * CONTEXT)]
    try:
        with log.open("wb") as out:
            process = subprocess.Popen([*command, *where], stdout=out, stderr=out)
    except OSError as error:
        raise UserError(f"--server {command[0]}: cannot be run ({first_line(error)}); build it") from None
    try:
        began = monotonic()
        while not _is_ready(url := f"http://127.0.0.1:{port}"):
            if process.poll() is not None:
                raise UserError(f"--server {command[0]}: ended before it could answer; {log} says why")
            if monotonic() - began > PATIENCE:
                raise UserError(f"--server {command[0]}: not ready after {PATIENCE:.0f} s; {log} may say why")
            sleep(0.1)
        yield partial(_complete, url)
    finally:
        process.kill()
        process.wait()


def version(server: Path) -> str:
    """The build and the compiler that a server names. Raises UserError if it cannot be run."""
    try:
        done = subprocess.run([server, "--version"], capture_output=True, text=True, errors="replace", timeout=PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"--server {server}: cannot be run ({first_line(error)}); build it") from None
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    return "; ".join(line for line in lines if line.startswith(("version", "built with")))


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=1.0):
            return True
    except OSError:
        return False


def _complete(url: str, ids: list[int], new: int, **more: Any) -> Timed:
    asked = {"prompt": ids, "n_predict": new, "temperature": 0, "cache_prompt": False, "return_tokens": True, **more}
    request = Request(f"{url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=PATIENCE) as answer:
            return timed(json.load(answer))
    except TimeoutError:
        raise UserError(f"{url}: no answer within {PATIENCE:.0f} s") from None


def timed(answer: Mapping[str, Any]) -> Timed:
    """The times of an answer by the server's own clock. It counts from the first token, which the prefill yields."""
    timings = answer["timings"]
    return Timed(
        token_ids=answer["tokens"],
        first_seconds=timings["prompt_ms"] / 1e3,
        seconds=timings["predicted_ms"] / 1e3,
        counted=timings["predicted_n"] - 1,
    )


if __name__ == "__main__":
    run_guarded(main)
