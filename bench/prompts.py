"""Fetches the public prompt files that measurements read, or checks the ones that are there: `python -m bench.prompts`.

Each file is a selection of one public file, written to build/prompts. Its SHA-256 says that nobody decodes other
prompts. A file that is there is checked; one that lies in the shared folder of a developer is copied; any other is
fetched. `--check` neither copies nor fetches.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.fixtures.prompts.prompt_files import PROMPTS
from ssd_artifacts.files import write_atomically
from ssd_profiles.errors import UserError
from ssd_runtime.commands.command import run_guarded

Records = list[dict[str, Any]]
GITHUB = "https://raw.githubusercontent.com"
SECONDS = 60.0
"""Longest wait for an answer of a public home."""
SHARED = Path("../shared/data")
"""Folder of a developer's machine that holds the same files."""
ROWS = Path(__file__).parent / "fixtures" / "prompts" / "prompt_rows.json"


@dataclass(frozen=True, slots=True)
class PromptFile:
    """A prompt file: its public home, what is selected from there, and the SHA-256 of the result."""

    name: str
    """Path below the folder of prompts."""
    url: str
    licence: str
    sha256: str
    select: Callable[[Records], Records]

    def made_of(self, public: bytes) -> bytes:
        """The file's bytes from those of the public file. Raises UserError when that is not JSON lines."""
        try:
            text = gzip.decompress(public) if self.url.endswith(".gz") else public
            chosen = self.select([json.loads(line) for line in text.splitlines()])
        except (OSError, ValueError, LookupError, EOFError) as error:
            raise UserError(f"{self.url}: not the file that was expected ({error})") from None
        return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in chosen).encode()

    def is_in(self, content: bytes) -> bool:
        """Whether `content` is this file."""
        return hashlib.sha256(content).hexdigest() == self.sha256


def odd_questions(records: Records) -> Records:
    """Every other question of each Spec-Bench category: those with odd numbers."""
    return [record for record in records if record["question_id"] % 2]


def listed_rows(name: str, records: Records) -> Records:
    """The rows whose numbers `prompt_rows.json` lists for a file."""
    return [records[row] for row in json.loads(ROWS.read_text(encoding="utf-8"))[name]]


FILES = (
    PromptFile(
        name="spec_bench/dev.jsonl",
        url=f"{GITHUB}/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf/data/spec_bench/question.jsonl",
        licence="Apache-2.0",
        sha256="e4a34dc3bddfb08d5caa617ad47615fe65c64316b0678d5dbcbb611af84b1b32",
        select=odd_questions,
    ),
    *(
        PromptFile(
            name=f"gsm8k/{split}.jsonl",
            url=f"{GITHUB}/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/"
            f"grade_school_math/data/{split}.jsonl",
            licence="MIT",
            sha256=digest,
            select=partial(listed_rows, f"gsm8k/{split}.jsonl"),
        )
        for split, digest in (
            ("test", "3c8bc7c4a8322f772726987f75bd80545911e17cb324eed4553febd0a56f02e0"),
            ("train", "d6f6b64aa7680a7a1930923d987b441a2e0c4b1aa973ad5a1a164b19ce349f1a"),
        )
    ),
    PromptFile(
        name="humaneval/HumanEval.jsonl",
        url=f"{GITHUB}/openai/human-eval/6d43fb980f9fee3c892a914eda09951f772ad10d/data/HumanEval.jsonl.gz",
        licence="MIT",
        sha256="621ff099e7d6a9b630619acd3568aef441dec51a8c84f881a9dd1f2d2ed15914",
        select=list,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="check what is there; neither copy nor fetch")
    parser.add_argument("--out", type=Path, default=PROMPTS)
    arguments = parser.parse_args()
    wrong = [line for line in provide(FILES, arguments.out, arguments.check) if line]
    if wrong:
        sys.exit("\n".join(f"error: {line}" for line in wrong))


def provide(files: Sequence[PromptFile], folder: Path, check: bool = False) -> list[str]:
    """Bring each file into `folder` and print where it came from. Returns what is wrong, one line per file."""
    wrong = []
    for file in files:
        path = folder / file.name
        try:
            origin = _check(file, path) if check or path.exists() else _bring(file, path)
            print(f"{path}: {origin}; {file.licence}")
        except UserError as error:
            wrong.append(str(error))
    return wrong


def _check(file: PromptFile, path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError:
        raise UserError(f"{path}: missing; run python -m bench.prompts without --check") from None
    if not file.is_in(content):
        raise UserError(f"{path}: not the prompts that were measured, by its SHA-256; delete it and run this again")
    return "as measured"


def _bring(file: PromptFile, path: Path) -> str:
    shared = SHARED / file.name
    if shared.is_file() and file.is_in(content := shared.read_bytes()):
        origin = f"copied from {shared}"
    else:
        content, origin = file.made_of(_fetched(file.url)), f"fetched from {file.url}"
    if not file.is_in(content):
        raise UserError(f"{file.url}: its prompts are not those that were measured, by their SHA-256")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return origin


def _fetched(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=SECONDS) as answer:
            return bytes(answer.read())
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise UserError(f"{url}: cannot be fetched ({error}); put the file of these prompts in place by hand") from None


if __name__ == "__main__":
    run_guarded(main)
