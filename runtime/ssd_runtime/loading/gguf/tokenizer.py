"""The tokenizer of a `.gguf` file, and the tokens that end an answer."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ssd_profiles.errors import UserError
from ssd_profiles.printable import printable
from ssd_runtime.loading.checkpoints.folder import TOKENIZER_CONFIG, guarded_loading, read_settings
from ssd_runtime.loading.gguf.metadata import Metadata
from ssd_runtime.loading.gguf.pre_tokenizers import pre_tokenizer
from ssd_runtime.weights.gguf.file import EMBEDDING
from ssd_runtime.weights.gguf.header import ADVICE, FOLDER_INSTEAD
from ssd_runtime.weights.gguf.index import GgufIndex

PREFIX = "tokenizer"
SPACE = "▁"
"""The space in the tokens of SentencePiece."""
ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "<|fim_pad|>"),
    *("<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>"),
    *("<reponame>", "<|file_sep|>", "<|observation|>"),
)
"""Tokens that end an answer by their names, as llama.cpp has them: turns, texts, and the files of code models. The last
one ends GLM's calls of tools, as its generation config says."""
MESSAGE_END = "<|end|>"
BEYOND_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})
"""Tokens beside which `<|end|>` ends a message of an answer, such as its thoughts, and not the answer (GPT-OSS)."""
CONTROL_LIKE = ("<|", "<｜")
"""Prefixes of control tokens' names; such a token is a control token even if the file calls it ordinary."""
NEVER_TEXT = ("<eos>", "<turn|>")
"""Ends of answers that the files of Gemma-4 call ordinary."""
HTML = "</s>"
"""It ends answers of Llama, and strikes text through in those of Gemma, whose files list it among the tags of HTML."""
END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Keys of tokens that end an answer."""
OTHER_KEYS = ("seperator", "cls", "mask", "fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle")
HARMLESS = ("huggingface.json", "rwkv.world", "chat_templates", "ggml.token_type_count", "ggml.add_sep_token")
SUPPRESSED = "ggml.suppress_tokens"
"""Key of tokens that are never chosen, such as those of images in files of Gemma-4."""
SENTENCEPIECE = {"bos": 1, "eos": 2, "unknown": 0}
"""Ids of SentencePiece's tokens if the file does not say."""
SPECIAL = (TokenType.CONTROL, TokenType.UNKNOWN)
NO_MERGE = (*SPECIAL, TokenType.USER_DEFINED, TokenType.BYTE, TokenType.UNUSED)
"""Types of tokens that text cannot become by merging pieces."""
MOST_LETTERS = 1 << 22
"""Most letters of all pieces that may be merged, which take a few seconds: nearly three times those of Gemma."""
MOST_MERGES = 2_000_000
"""Most pairs of pieces that make a piece: four times those of Gemma, which has 262,144 pieces."""
LONGEST_PIECE = 256
"""Letters of a piece that is looked at in every way to merge it; SentencePiece makes pieces of 16 letters."""
WITH_TOOLS = "tool_use"
STRIPPING = "phi3"
"""Models of this architecture or name have special tokens that take spaces after them along: no metadata says so."""
NEVER_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a file with their types, and the ids of those with a role."""

    tokens: list[str]
    types: list[int]
    roles: dict[str, int]
    """Ids by the first part of their key, such as `bos`."""

    @classmethod
    def of(cls, index: GgufIndex, metadata: Metadata) -> Vocabulary:
        """Read the tokens. Raises UserError if two are the same, or if their number is not the embedding's."""
        tokens = metadata.listed("ggml.tokens")
        if not tokens or not all(isinstance(token, str) for token in tokens):
            raise UserError(f"{index.path}: has no tokens; {ADVICE}")
        tokens = [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
        rows = index.tensors[EMBEDDING].shape[0] if EMBEDDING in index.tensors else len(tokens)
        if len(tokens) != rows:
            raise UserError(f"{index.path}: has {len(tokens)} tokens, but its embedding has {rows} rows; {ADVICE}")
        if len(set(tokens)) != len(tokens):
            twice = Counter(tokens).most_common(1)[0][0]
            raise UserError(f"{index.path}: has the token {twice!r} twice; {ADVICE}")
        types = metadata.listed("ggml.token_type") or [int(TokenType.NORMAL)] * len(tokens)
        if len(types) != len(tokens):
            raise UserError(f"{index.path}: has {len(types)} token types for {len(tokens)} tokens; {ADVICE}")
        if not all(type(kind) is int for kind in types):
            raise UserError(f"{index.path}: its token types are no whole numbers; {ADVICE}")
        roles = dict[str, int]()
        for role in ("bos", "unknown", "padding", *END_KEYS, *OTHER_KEYS):
            found = metadata.optional(int, f"ggml.{role}_token_id")
            if found is not None and 0 <= found < len(tokens):  # files mark absent tokens by ids outside
                roles[role] = found
        types = [TokenType.CONTROL if _ends(*pair) else pair[1] for pair in zip(tokens, types, strict=True)]
        return cls(tokens, types, roles)

    @property
    def ids(self) -> dict[str, int]:
        """The ids by token."""
        return {token: number for number, token in enumerate(self.tokens)}

    @property
    def ends(self) -> list[int]:
        """Tokens that end an answer: by their roles, and by their names."""
        pairs = enumerate(zip(self.tokens, self.types, strict=True))
        found = {number for number, pair in pairs if _ends(*pair)}
        found |= {self.roles[role] for role in END_KEYS if role in self.roles}
        names = {self.tokens[number] for number in found}
        one_of_several = any(beyond <= names for beyond in BEYOND_MESSAGES)
        return sorted(number for number in found if not (one_of_several and self.tokens[number] == MESSAGE_END))

    def role(self, name: str) -> str | None:
        """The token of a role; None without one."""
        return self.tokens[self.roles[name]] if name in self.roles else None


def _ends(token: str, kind: int) -> bool:
    """Whether a token ends an answer by its name. Some names may be ordinary text, as in Qwen's vocabulary."""
    if token == HTML:
        return kind == TokenType.CONTROL
    return token in ENDS and (kind != TokenType.NORMAL or token.startswith(CONTROL_LIKE) or token in NEVER_TEXT)


def gguf_tokenizer(index: GgufIndex) -> tuple[PreTrainedTokenizerFast, list[int]]:
    """Make the tokenizer of a file; returns it with the tokens that end an answer, in ascending order.

    Raises UserError for kinds of tokenizers that are not served, and for damaged ones.
    """
    metadata = Metadata(index, PREFIX)
    vocabulary = Vocabulary.of(index, metadata)
    with guarded_loading(f"{index.path}: its tokenizer"):
        return _tokenizer(index, metadata, vocabulary), vocabulary.ends


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a tokenizer with a list of its added tokens, for want of which transformers reads tokenizer.json twice."""
    tokenizer.save_pretrained(folder)
    path = folder / TOKENIZER_CONFIG
    fields = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    added = {
        number: {name: getattr(token, name) for name in fields}
        for number, token in tokenizer.added_tokens_decoder.items()
    }
    settings = read_settings(str(folder), path) | {"added_tokens_decoder": added}
    path.write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _tokenizer(index: GgufIndex, metadata: Metadata, vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    kind = metadata.required(str, "ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(index, metadata, vocabulary)
    elif kind in ("llama", "gemma4"):
        if kind == "llama":
            known = {role: number for role, number in SENTENCEPIECE.items() if number < len(vocabulary.tokens)}
            vocabulary.roles.update({**known, **vocabulary.roles})
        tokenizer, add_bos = _sentencepiece(index, metadata, vocabulary, listed=kind == "gemma4"), True
    else:
        raise UserError(f"{index.path}: tokenizer: expected gpt2, llama or gemma4, got {kind!r}; {FOLDER_INSTEAD}")
    # Converters write "Phi3", "Phi-3-mini" or "Phi 3 Mini". Phi-4 is of this architecture, with a vocabulary of gpt2.
    about = re.sub("[^a-z0-9]", "", f"{index.architecture} {index.metadata.get('general.name')}".lower())
    _add_specials(tokenizer, vocabulary, strips=kind == "llama" and STRIPPING in about)
    template, with_tools = (metadata.optional(str, f"chat_template{end}") for end in ("", f".{WITH_TOOLS}"))
    for text in filter(None, (template, with_tools)):
        if "{{" not in text and "{%" not in text:
            raise UserError(
                f"{index.path}: chat_template {printable(text[:40])!r} is a name that llama.cpp knows, not a template; "
                + FOLDER_INSTEAD
            )
    # transformers takes the second one for requests with tools, and no other by itself.
    both = template is not None and with_tools is not None
    _add_ends_of_text(tokenizer, metadata, vocabulary, add_bos)
    metadata.ignore(HARMLESS)
    metadata.ignore(key for key in metadata.left if key.startswith("chat_template."))
    metadata.listed(SUPPRESSED)  # the conversion has it
    metadata.require_all_taken()
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template={"default": template, WITH_TOOLS: with_tools} if both else template,
        **{f"{name}_token": vocabulary.role(role) for name, role in roles.items()},
    )


def _byte_level(index: GgufIndex, metadata: Metadata, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    pre = pre_tokenizer(metadata.required(str, "ggml.pre"), str(index.path))
    merges = _listed_merges(index, metadata, vocabulary)
    metadata.ignore(("ggml.scores",))
    metadata.expect("ggml.add_space_prefix", False)
    metadata.expect("ggml.remove_extra_whitespaces", False)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _listed_merges(index: GgufIndex, metadata: Metadata, vocabulary: Vocabulary) -> list[tuple[str, str]]:
    merges = metadata.listed("ggml.merges")
    if not merges:  # text would be read letter by letter
        raise UserError(f"{index.path}: has no merges of tokens; {ADVICE}")
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    tokens = set(vocabulary.tokens)
    # The library panics, with lines of its own, at one that is longer than every token.
    if (made := next((left + right for left, right in pairs if left + right not in tokens), None)) is not None:
        raise UserError(f"{index.path}: merges tokens to {made!r}, which it lacks; {ADVICE}")
    return pairs


def _sentencepiece(index: GgufIndex, metadata: Metadata, vocabulary: Vocabulary, listed: bool) -> Tokenizer:
    """The tokenizer of pieces, which merge as their scores say, or as the file has `listed`."""
    scores = metadata.listed("ggml.scores") or []
    finite = sum(type(each) is float and math.isfinite(each) for each in scores)
    if not finite == len(scores) == len(vocabulary.tokens):
        raise UserError(f"{index.path}: has no finite score for each of {len(vocabulary.tokens)} tokens; {ADVICE}")
    metadata.ignore(("ggml.pre", "ggml.merges"))
    metadata.expect("ggml.remove_extra_whitespaces", False)
    prefix = metadata.optional(bool, "ggml.add_space_prefix")
    prefix = True if prefix is None else prefix
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_listed_merges(index, metadata, vocabulary) if listed else _merges(index, vocabulary, scores),
            unk_token=vocabulary.role("unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return tokenizer


def _merges(index: GgufIndex, vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """The pairs of pieces that make a piece, those of the highest score first, as SentencePiece merges them.

    Pieces of the same score, which all are where a converter knew none, merge in the vocabulary's order. Raises
    UserError for far more letters or pairs than any vocabulary has.
    """
    ids = {
        token: number
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind not in NO_MERGE and len(token) <= LONGEST_PIECE
    }
    if sum(map(len, ids)) > MOST_LETTERS:
        raise UserError(f"{index.path}: its pieces have more than {MOST_LETTERS} letters in all; {ADVICE}")
    found = list[tuple[float, int, int, int]]()
    for token, number in ids.items():
        for at in range(1, len(token)):
            left, right = ids.get(token[:at]), ids.get(token[at:])
            if left is not None and right is not None:
                found.append((-scores[number], number, left, right))
        if len(found) > MOST_MERGES:
            raise UserError(f"{index.path}: its pieces are made of more than {MOST_MERGES} pairs; {ADVICE}")
    return [(vocabulary.tokens[left], vocabulary.tokens[right]) for *_, left, right in sorted(found)]


def _add_specials(tokenizer: Tokenizer, vocabulary: Vocabulary, strips: bool) -> None:
    special, defined = list[AddedToken](), list[AddedToken]()
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if kind in SPECIAL:
            rstrip = strips and token not in NEVER_STRIPPING
            special.append(AddedToken(token, normalized=False, special=True, rstrip=rstrip))
        elif kind == TokenType.USER_DEFINED:
            defined.append(AddedToken(token, normalized=False, rstrip=strips))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(defined)


def _add_ends_of_text(tokenizer: Tokenizer, metadata: Metadata, vocabulary: Vocabulary, add_bos: bool) -> None:
    """Let a text begin with BOS and end with EOS, where the file says so."""
    begins, ends = metadata.optional(bool, "ggml.add_bos_token"), metadata.optional(bool, "ggml.add_eos_token")
    bos = ["bos"] if (add_bos if begins is None else begins) and "bos" in vocabulary.roles else []
    eos = ["eos"] if ends and "eos" in vocabulary.roles else []
    # Roles stand for the tokens, whose own texts may be read as the template's variables.
    marks = [{"id": role, "ids": [vocabulary.roles[role]], "tokens": [vocabulary.role(role)]} for role in bos + eos]
    if marks:
        tokenizer.post_processor = processors.TemplateProcessing(single=[*bos, "$A", *eos], special_tokens=marks)
