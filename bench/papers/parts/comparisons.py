"""The comparisons of docs/papers.md: strategies on one model and one stream of prompts each."""

from __future__ import annotations

from bench.fixtures.bundles import (
    DEMO_HEADS,
    DIFFUSE,
    DOMAINS,
    FIVE,
    LATE,
    LATE_FEW,
    LATE_HEADS,
    LIGHT05,
    PLANTED02,
    PLANTED05,
    REFERENCE,
    MadeBundle,
)
from bench.harness.comparison import Comparison
from bench.harness.drawing.picture import Picture

SPECBOUND = "depth=0.3125+width=8+threshold=0.55+annealing=0.2"
"""The paper's own parameters, in place of those that the compiler tuned."""
HALF = "depth=0.5+width=8+threshold=0.55+annealing=0.2"
"""SpecBound's parameters with the depth bound at half of the layers, where the late-weak model's real layers end."""
ALL = (
    "auto",
    "knn",
    "fixed:{first}",
    "fixed:mix",
    "knapsack",
    "knapsack+warm_start=0",
    "clasp",
    "swift",
    "exit",
    f"exit+{SPECBOUND}",
    "del",
    "lookup",
)
LEARNING = ("auto+light=0", "swift")
"""Strategies that learn along a stream of prompts."""
ROUTED = (*LEARNING, "knn", "fixed:{first}", "fixed:mix")

CLASP = (
    "skip=0.3",
    "skip=0.4",
    "skip=0.6",
    "refresh=4",
    "refresh=16",
    "refresh=64",
    "refresh=128",
    "confidence=0.4",
    "confidence=0.9",
    "sublayers=1",
)
"""CLaSp's Figure 4, and its search over sub-layers."""
INTERVALS = (16, 32, 64, 128)
"""CLaSp's verifications from one search to the next."""
CONTEXTS = (2048, 4096, 7500)
"""Tokens of long prompts; the model's context ends at 8,192."""
LONG = ("auto+light=0", "knn", "knapsack", "knapsack+warm_start=0", "clasp", "swift", "exit", "del")
KNAPSACK = ("states=16", "states=32", "share=1", "similarity=0.9", "refresh=16", "confidence=0")
"""KnapSpec's search with more budgets, all tokens, a higher τ or a shorter interval, and drafts of TPT's best length.

All budgets, as in the paper, take minutes a prompt to compute.
"""
SWIFT = ("steps=25", "steps=100", "bayes_interval=5", "bayes_interval=100", "skip=0.3", "skip=0.4")
"""SWIFT's S, β and r in place of 1000, 25 and 0.5."""
EXIT = ("annealing=0", "depth=0.9", "width=25", "threshold=0.9")
"""SpecBound without annealing or one of its bounds (Figure 4), and with a high threshold (Figure 3)."""
EXIT_TUNED = ("width=25", "width=4", "threshold=0.9")
"""Changes of tuned exits: a wide and a narrow bound, and a high threshold."""
ALONG = 0.3
"""Mix ratio of the stream along which speed is drawn."""
RATIOS = (0.0, ALONG, 1.0)


def _variants(name: str, changes: tuple[str, ...]) -> tuple[str, ...]:
    """A strategy, and the same with one parameter changed each."""
    return (name, *(f"{name}+{change}" for change in changes))


def _pairs(name: str, changes: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Each changed strategy with the unchanged one."""
    return tuple((f"{name}+{change}", name) for change in changes)


def _priced(
    name: str, title: str, bundle: MadeBundle, contenders: tuple[str, ...], paired: tuple[tuple[str, str], ...] = ()
) -> Comparison:
    """A comparison of 26 prompts, two per category, by priced time. The quick mode leaves it out."""
    return Comparison(
        name=name,
        title=f"{title}, priced",
        bundle=bundle,
        contenders=contenders,
        optional=True,
        priced=True,
        paired=paired,
        count=26,
    )


COMPARISONS = (
    # Two prompts per category are required for statements about single categories.
    Comparison(
        name="planted05",
        title="Planted, ε = 0.05",
        bundle=PLANTED05,
        contenders=ALL,
        count=26,
        categories=True,
        pictures=(
            Picture(
                "planted05/speed",
                "papers-planted05",
                "Speed of each strategy on the planted model ÷ plain decoding (1, the line). `auto` is ahead by light "
                "drafts, which these 4-bit weights flatter; of what skips layers, masks known beforehand are ahead",
            ),
        ),
    ),
    Comparison(
        name="planted05-light",
        title="Planted, ε = 0.05, the bundle's masks with lighter sub-layers",
        bundle=LIGHT05,
        contenders=ALL,
        optional=True,
        count=26,
        pictures=(
            Picture(
                "planted05-light/speed",
                "papers-planted05-light",
                "Where masks run sub-layers in 4 bits, which these weights are exactly, those known beforehand are far "
                "ahead; what finds masks on the way is not",
            ),
        ),
    ),
    Comparison(name="planted02", title="Planted, ε = 0.02", bundle=PLANTED02, contenders=ALL, optional=True),
    Comparison(name="demo", title="SmolLM2-135M-Instruct", bundle=REFERENCE, contenders=ALL, optional=True),
    # Equal pools give the same prompts at every ratio, and masks keep nothing from one prompt to the next. So the order
    # matters to nobody but strategies that learn along the stream.
    *(
        Comparison(
            name=f"domains-{ratio:g}",
            title=f"Domain-planted, mix ratio {ratio:g}, priced",
            bundle=DOMAINS,
            contenders=ROUTED if ratio == ALONG else LEARNING,
            ratio=ratio,
            optional=ratio != ALONG,
            priced=True,
            paired=(("knn", "fixed:mix"), ("fixed:mix", "fixed:{first}")) if ratio == ALONG else (),
            count=32,
        )
        for ratio in RATIOS
    ),
    Comparison(
        name="five-0",
        title="Five domains, 16 prompts of each, priced",
        bundle=FIVE,
        contenders=("knn", "fixed:mix", "fixed:{first}"),
        stream="build/five/stream-0.jsonl",
        optional=True,
        priced=True,
        categories=True,
        paired=(("knn", "fixed:mix"), ("fixed:mix", "fixed:{first}")),
    ),
    _priced(
        "priced05",
        "Planted, ε = 0.05",
        PLANTED05,
        ("auto+light=0", "knn", "fixed:{first}", "fixed:mix", "knapsack+warm_start=0", "clasp", "swift", "exit", "del"),
    ),
    _priced(
        "priced-knn",
        "Domain-planted, prompts of other domains",
        DOMAINS,
        _variants("knn", ("out_of_domain=mix", "out_of_domain=plain")),
        _pairs("knn", ("out_of_domain=mix", "out_of_domain=plain")),
    ),
    _priced("priced-swift", "Uniform masks without a search", PLANTED05, ("swift+steps=0", "swift+steps=0+tree=0")),
    _priced(
        "priced-exit",
        "exit with parts changed",
        PLANTED05,
        ("exit", *_variants(f"exit+{SPECBOUND}", EXIT)),
        _pairs(f"exit+{SPECBOUND}", EXIT),
    ),
    Comparison(
        name="sampled",
        title="Planted, ε = 0.05, sampling at temperature 1, priced",
        bundle=PLANTED05,
        contenders=("knn", "fixed:mix", "clasp", "exit", f"exit+{SPECBOUND}"),
        optional=True,
        priced=True,
        temperature=1.0,
        count=26,
    ),
    _priced(
        "demo-heads", "SmolLM2-135M-Instruct with fitted exit heads", DEMO_HEADS, ("exit", f"exit+{SPECBOUND}", "del")
    ),
    Comparison(
        name="priced-clasp",
        title="clasp with parts changed, priced",
        bundle=PLANTED05,
        contenders=_variants("clasp", CLASP),
        optional=True,
        priced=True,
        without_bundle=True,
        paired=_pairs("clasp", CLASP),
        count=26,
        tokens=64,
    ),
    Comparison(
        name="priced-knapsack",
        title="knapsack without a bundle, 256 tokens, priced",
        bundle=PLANTED05,
        contenders=_variants("knapsack", KNAPSACK),
        optional=True,
        priced=True,
        without_bundle=True,
        paired=_pairs("knapsack", KNAPSACK),
        count=3,
        tokens=256,
    ),
    # An answer of 256 tokens has some 95 verifications, so an interval of 128 is one search for each answer.
    Comparison(
        name="clasp-intervals",
        title="clasp's intervals between searches, 256 tokens, priced",
        bundle=PLANTED05,
        contenders=tuple(f"clasp+refresh={interval}" for interval in INTERVALS),
        optional=True,
        priced=True,
        without_bundle=True,
        paired=tuple((f"clasp+refresh={INTERVALS[-1]}", f"clasp+refresh={each}") for each in INTERVALS[:-1]),
        count=3,
        tokens=256,
    ),
    *(
        Comparison(
            name=f"context-{context}",
            title=f"Planted, ε = 0.05, after {context:,} tokens, priced",
            bundle=PLANTED05,
            contenders=LONG,
            context=context,
            optional=True,
            priced=True,
            count=1,
            tokens=256,
        )
        for context in CONTEXTS
    ),
    # The search goes on from prompt to prompt, so the stream has to be long.
    Comparison(
        name="swift-stream",
        title="SWIFT on a stream of 60 prompts of 128 tokens, diffuse redundancy, priced",
        bundle=DIFFUSE,
        contenders=("swift",),
        optional=True,
        priced=True,
        without_bundle=True,
        count=60,
        tokens=128,
    ),
    # Seven streams side by side take four minutes a prompt on one processor.
    Comparison(
        name="swift-sweep",
        title="SWIFT's S, β and r, the first 32 prompts of that stream, priced",
        bundle=DIFFUSE,
        contenders=_variants("swift", SWIFT),
        optional=True,
        priced=True,
        without_bundle=True,
        paired=_pairs("swift", SWIFT),
        count=32,
        tokens=128,
    ),
    Comparison(
        name="late",
        title="Weak layers at the end, early exits by the model's own head, priced",
        bundle=LATE,
        contenders=(*_variants(f"exit+{HALF}", EXIT), "del", "clasp"),
        optional=True,
        priced=True,
        without_bundle=True,
        paired=_pairs(f"exit+{HALF}", EXIT),
        count=26,
    ),
    _priced(
        "late-heads",
        "Weak layers at the end, exit heads fitted after every layer of the first half",
        LATE_HEADS,
        ("exit", *_variants(f"exit+{HALF}", EXIT), "del", "clasp", "knn"),
        _pairs(f"exit+{HALF}", EXIT),
    ),
    # With fewer heads than layers, they are asked seldom enough to pay.
    _priced(
        "late-few",
        "Weak layers at the end, exit heads fitted after every tenth layer",
        LATE_FEW,
        (*_variants("exit", EXIT_TUNED), *_variants(f"exit+{HALF}", EXIT), "del"),
        (*_pairs("exit", EXIT_TUNED), *_pairs(f"exit+{HALF}", EXIT)),
    ),
)
