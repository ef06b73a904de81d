"""The pre-tokenizers of byte-level BPE vocabularies, by the names that ggml gives them.

Each is a list of regular expressions, as in the model's own `tokenizer.json`: every match, and all that lies between
two matches, is a piece of its own, which the following expressions cut further.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ssd_profiles.errors import UserError
from ssd_runtime.weights.gguf.header import FOLDER_INSTEAD

CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s+(?!\S)|\s+"
DIGIT, THREE_DIGITS = r"\p{N}", r"\p{N}{1,3}"
GPT_2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{SPACES}"
IDEOGRAPHS = "[一-龥ࠀ-一가-퟿]+"
KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str, before: str = f"{CONTRACTION}|", after: str = r"[\r\n]*") -> str:
    """Words with the one character before them, so many digits, and punctuation with what stands `after` it."""
    return rf"{before}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+{after}|\s*[\r\n]+|{SPACES}"


def _cased(digits: str, ending: str) -> str:
    """Words cut where small letters are followed by capitals, with an `ending` such as a contraction."""
    begin = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{begin}{UPPER}*{LOWER}+{ending}|{begin}{UPPER}+{LOWER}*{ending}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{SPACES}"
    )


def _marked(breaks: str) -> str:
    """DeepSeek-V3's words, whose letters carry marks, with the line `breaks` that punctuation takes along."""
    return (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+{breaks}|{SPACES}"
    )


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Regular expressions that cut text before the merges of a BPE vocabulary."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """Whether a piece that is a token as a whole is not merged from its bytes."""
    add_bos: bool = False
    """Whether a text begins with the BOS token if the file does not say."""
    nfc: bool = False
    """Whether letters and marks that make one character are put together before. llama.cpp does not."""


DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"))
LLAMA_3 = PreTokenizer((_words(THREE_DIGITS),), ignore_merges=True, add_bos=True)
LLAMA_3_MERGED = PreTokenizer((_words(THREE_DIGITS),))
QWEN_2 = PreTokenizer((_words(DIGIT),))
SINGLE_DIGITS = PreTokenizer((DIGIT, GPT_2))
PLAIN = PreTokenizer((GPT_2,))
GPT_4O = PreTokenizer((_cased(THREE_DIGITS, f"{CONTRACTION}?"),))
DEEPSEEK_V3 = PreTokenizer((THREE_DIGITS, KANA, _marked(r"[\r\n]*|\s*[\r\n]+")))
BLOOM = PreTokenizer((" ?[^(\\s|.,!?…。，、।۔،)]+",))
QWEN_35 = PreTokenizer(
    (
        rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{SPACES}",
    )
)

PRE_TOKENIZERS = {
    "default": DEFAULT,
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        LLAMA_3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), LLAMA_3_MERGED),
    **dict.fromkeys(("glm4", "glm5"), PreTokenizer(LLAMA_3.patterns, ignore_merges=True)),
    **dict.fromkeys(
        ("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        QWEN_2,
    ),
    "qwen2": replace(QWEN_2, nfc=True),
    "qwen35": replace(QWEN_35, nfc=True),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), SINGLE_DIGITS
    ),
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum"),
            *("modern-bert", "mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4"),
        ),
        PLAIN,
    ),
    "tekken": PreTokenizer((_cased(DIGIT, ""),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), GPT_4O),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *GPT_4O.patterns))),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), DEEPSEEK_V3),
    "spark2_5": PreTokenizer((THREE_DIGITS, KANA, _marked(r"|[\r\n]"), DIGIT)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", IDEOGRAPHS, DIGIT)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT_2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), BLOOM),
    "viking": PreTokenizer((*BLOOM.patterns, DIGIT)),
    "jais-2": PreTokenizer(
        (
            _words(THREE_DIGITS).removesuffix(SPACES)
            + "".join(rf"\s{{{1 << power}}}(?!\S)|" for power in range(9, 1, -1))
            + r"\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "youtu": PreTokenizer(
        (
            r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + KANA,
            _cased(DIGIT, f"{CONTRACTION}?"),
        ),
        ignore_merges=True,
    ),
    **dict.fromkeys(
        ("bailingmoe", "bailingmoe2", "llada-moe"),
        PreTokenizer(
            (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|" + SPACES,)
        ),
    ),
    "seed-coder": PreTokenizer(
        (rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{SPACES}",)
    ),
    "ufakzeka": PreTokenizer((_words(DIGIT, before=""),)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _words(DIGIT))),
    "exaone-moe": PreTokenizer(
        (
            rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{SPACES}",
        )
    ),
    "minicpm5": PreTokenizer((THREE_DIGITS, _words(r"\p{N}+")), ignore_merges=True),
}
"""Pre-tokenizers by name."""

REFUSED = {
    **dict.fromkeys(("gemma4", "mmbert", "sarvam-moe", "granite-embed-multi-311m"), "its merges cross spaces"),
    **dict.fromkeys(("kimi-k2", "afmoe", "superbpe", "chameleon"), "it is more than regular expressions"),
    **dict.fromkeys(
        ("jina-v1-en", "jina-v2-code", "roberta-bpe", "whitespace", "granite-embed-multi-97m"),
        "it is an embedding model's",
    ),
    "deepseek-llm": "its expressions list thousands of letters",
}
"""Names that ggml knows and that are not served, with the reason."""


def pre_tokenizer(name: str, where: str) -> PreTokenizer:
    """The pre-tokenizer of this name. Raises UserError that says `where` it was found if it is not served."""
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        reason = REFUSED.get(name, "it is not known here")
        raise UserError(f"{where}: its pre-tokenizer {name!r} is not supported ({reason}); {FOLDER_INSTEAD}")
    return found
