"""The parts of docs/papers.md: comparisons of strategies, and measurements by other tools."""

from __future__ import annotations

from bench.fixtures.bundles import (
    DIFFUSE,
    DOMAINS,
    FIVE,
    LATE,
    LIGHT05,
    PAIRS,
    PLANTED02,
    PLANTED05,
    REFERENCE,
    MadeBundle,
)
from bench.fixtures.prompt_files import SPEC_BENCH
from bench.harness.comparison import Comparison
from bench.harness.latencies import QUIET
from bench.harness.measurement import Measurement
from bench.harness.picture import Picture

SPECBOUND = "depth=0.3125+width=8+threshold=0.55+annealing=0.2"
"""The paper's own parameters, in place of those that the compiler tuned."""
HALF = "depth=0.5+width=8+threshold=0.55+annealing=0.2"
"""The same with the depth bound where the late-weak model's real layers end."""
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
ROUTED = ("auto", "knn", "fixed:{first}", "fixed:mix", "swift")
RATIOS = (0.0, 0.3, 0.7, 1.0)

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
CONTEXTS = (2048, 4096, 7500)
"""Tokens of long prompts; the model's context ends at 8,192."""
LONG = ("auto+light=0", "knn", "knapsack", "knapsack+warm_start=0", "clasp", "swift", "exit", "del")
KNAPSACK = ("states=16", "states=32")
"""More budgets than KnapSpec's search carries here. All of them, as in the paper, take minutes a prompt to compute."""


def _ablation(
    name: str, *changes: str, bundle: MadeBundle = PLANTED05, count: int = 4, tokens: int = 128
) -> Comparison:
    """A comparison of a strategy with variants of it: without a part, or with another value of a parameter."""
    contenders = (name, *(f"{name}+{change}" for change in changes))
    title = f"{name} with parts changed"
    return Comparison(
        name=f"ablation-{name}",
        title=title,
        bundle=bundle,
        contenders=contenders,
        optional=True,
        count=count,
        tokens=tokens,
    )


ABLATIONS = (
    # The model's layers matter in one domain each, and most prompts belong to neither.
    _ablation("knn", "out_of_domain=mix", "out_of_domain=plain", bundle=DOMAINS, count=26, tokens=48),
    # It runs on one stream, in which a search of some 200 masks has room.
    _ablation(
        "swift",
        "confidence=0",
        "tree=0",
        "steps=0",
        "steps=100",
        "enough=1+idle=100000",
        "window=16",
        "window=64",
        "bayes_interval=5",
        "protect=0",
    ),
    _ablation(
        "clasp",
        "skip=0.3",
        "skip=0.4",
        "refresh=4",
        "refresh=16",
        "refresh=128",
        "confidence=0.4",
        "confidence=0.9",
        "sublayers=1",
    ),
    # Longer outputs are needed, because the search repeats only after 64 cycles.
    _ablation(
        "knapsack",
        "warm_start=0",
        "warm_start=0+share=1",
        "warm_start=0+similarity=0.9",
        "warm_start=0+refresh=16",
        "warm_start=0+confidence=0",
        count=3,
        tokens=256,
    ),
    _ablation(
        "exit",
        SPECBOUND,
        *(f"{SPECBOUND}+{change}" for change in ("annealing=0", "depth=0.9", "width=25", "threshold=0.9")),
    ),
)

ALONG = 0.3
"""Mix ratio of the stream along which speed is drawn."""
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
                "Speed of each strategy on the planted model ÷ plain decoding (1, the line): right of it is faster",
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
    *(
        Comparison(
            name=f"domains-{ratio:g}",
            title=f"Domain-planted, mix ratio {ratio:g}",
            bundle=DOMAINS,
            contenders=ROUTED,
            ratio=ratio,
            optional=ratio != ALONG,
            count=12,
        )
        for ratio in RATIOS
    ),
    # The order of the stream changes no price, because these strategies keep nothing from one prompt to the next.
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
    Comparison(
        name="priced05",
        title="Planted, ε = 0.05, priced",
        bundle=PLANTED05,
        contenders=("knn", "fixed:{first}", "fixed:mix", "knapsack+warm_start=0", "clasp", "exit"),
        optional=True,
        priced=True,
        count=26,
        tokens=64,
    ),
    Comparison(
        name="priced-clasp",
        title="clasp with parts changed, priced",
        bundle=PLANTED05,
        contenders=("clasp", *(f"clasp+{change}" for change in CLASP)),
        optional=True,
        priced=True,
        without_bundle=True,
        paired=tuple((f"clasp+{change}", "clasp") for change in CLASP),
        count=26,
        tokens=64,
    ),
    Comparison(
        name="priced-knapsack",
        title="knapsack without a bundle, 256 tokens, priced",
        bundle=PLANTED05,
        contenders=("knapsack", *(f"knapsack+{change}" for change in KNAPSACK)),
        optional=True,
        priced=True,
        without_bundle=True,
        paired=tuple((f"knapsack+{change}", "knapsack") for change in KNAPSACK),
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
    Comparison(
        name="late",
        title="Weak layers at the end, early exits, priced",
        bundle=LATE,
        contenders=(
            f"exit+{HALF}",
            *(f"exit+{HALF}+{change}" for change in ("annealing=0", "depth=0.9", "width=25", "threshold=0.9")),
            "del",
            "clasp",
        ),
        optional=True,
        priced=True,
        without_bundle=True,
        paired=tuple((f"exit+{HALF}+{change}", f"exit+{HALF}") for change in ("annealing=0", "depth=0.9", "width=25")),
        count=26,
    ),
    *ABLATIONS,
)
PROMPTS = ("--prompts", str(SPEC_BENCH))
LATENCY = ("--latency", str(QUIET))
HARD = ("--prompts", "4", "--timed", "0", "--self-sd", "0", "--evaluations", "24,100")
"""Arguments of searches on models that are hard to search."""
MEASUREMENTS = (
    Measurement(
        name="by-prompt",
        title="Planted, ε = 0.05, prompt by prompt",
        tool="bench.studies.by_prompt",
        arguments=("{out}/planted05",),
        bundle=PLANTED05,
        derived=True,
        pictures=(
            Picture(
                "planted05/by-prompt",
                "papers-by-prompt",
                "How many prompts reach which speed-up: whatever lies left of 1 became slower",
            ),
        ),
    ),
    Measurement(
        name="along-stream",
        title="SWIFT as the stream goes on",
        tool="bench.papers.swift_stream",
        arguments=("{out}/swift-stream",),
        bundle=DIFFUSE,
        optional=True,
        derived=True,
        without_bundle=True,
    ),
    Measurement(
        name="pictures",
        title=f"Domain-planted: masks, features, speed along the stream of mix ratio {ALONG:g}",
        tool="bench.papers.pictures",
        arguments=("--artifact", DOMAINS.path, "--stream", f"{{out}}/domains-{ALONG:g}", "--out", "{out}/domains"),
        bundle=DOMAINS,
        derived=True,
        pictures=(
            Picture(
                "domains/masks",
                "domains-masks",
                "What drafts skip, by domain: two kinds of prompts spare different layers",
            ),
            Picture(
                "domains/features",
                "domains-features",
                "Prompts as routing sees them: kinds lie apart, with anchors in their midst",
            ),
            Picture(
                "domains/stream",
                "domains-stream",
                "Speed along the stream: masks per domain hold where one mask for all falls behind",
            ),
        ),
    ),
    Measurement(
        name="shares",
        title="How often each sub-layer is skipped, SmolLM2-135M-Instruct",
        tool="bench.papers.pictures",
        arguments=("--artifact", REFERENCE.path, "--out", "{out}/demo-pictures"),
        bundle=REFERENCE,
        derived=True,
        pictures=(
            Picture(
                "demo-pictures/shares",
                "demo-shares",
                "How often masks skip each sub-layer of SmolLM2-135M-Instruct: the early layers are the ones to spare",
            ),
        ),
    ),
    Measurement(
        name="planning-cost",
        title="What deciding costs",
        tool="bench.papers.planning_cost",
        arguments=("--artifact", PLANTED05.path),
        bundle=PLANTED05,
    ),
    Measurement(
        name="pruning",
        title="What KnapSpec drops on the way",
        tool="bench.papers.pruning",
        arguments=("--artifact", PLANTED05.path),
        bundle=PLANTED05,
    ),
    Measurement(
        name="tpt",
        title="Predicted against measured speed",
        tool="bench.papers.tpt",
        arguments=("--artifact", PLANTED05.path, "--masks", "10", "--prompts", "3", "--out", "{out}"),
        bundle=PLANTED05,
        pictures=(
            Picture("tpt", "tpt", "Predicted against measured speed of masks: on the diagonal the prediction is right"),
        ),
    ),
    Measurement(
        name="transfer",
        title="Masks of one domain on prompts of another",
        tool="bench.papers.transfer",
        arguments=("--artifact", DOMAINS.path),
        bundle=DOMAINS,
    ),
    Measurement(
        name="clasp",
        title="CLaSp's programme against brute force",
        tool="bench.papers.clasp",
        arguments=("--model", REFERENCE.model, *PROMPTS),
        bundle=REFERENCE,
    ),
    Measurement(
        name="context-sweep",
        title="What KnapSpec skips as the context grows",
        tool="bench.papers.context_sweep",
        arguments=("--model", PLANTED05.model, *PROMPTS),
        bundle=PLANTED05,
        optional=True,
    ),
    Measurement(
        name="search-cost",
        title="Speed against seconds of search",
        tool="bench.papers.search_cost",
        arguments=("--model", PLANTED05.model, "--out", "{out}"),
        bundle=PLANTED05,
        optional=True,
        pictures=(
            Picture(
                "search",
                "search",
                "What each search has found after so many seconds: higher and further left is better",
            ),
        ),
    ),
    *(
        Measurement(
            name=f"search-{kind}",
            title=f"Searches on a hard ground truth: {title}",
            tool="bench.papers.search_cost",
            arguments=("--model", made.model, *HARD, "--out", f"{{out}}/search-{kind}"),
            bundle=made,
            optional=True,
            without_bundle=True,
            pictures=(
                Picture(
                    f"search-{kind}/search",
                    f"search-{kind}",
                    f"What each search has found on {title}, by seconds: higher and further left is better",
                ),
            ),
        )
        for kind, made, title in (
            ("pairs", PAIRS, "pairs of layers that cancel"),
            ("diffuse", DIFFUSE, "diffuse redundancy"),
        )
    ),
    Measurement(
        name="ground-truths",
        title="What each search finds on three ground truths",
        tool="bench.papers.ground_truths",
        arguments=("--seeds", "1", *LATENCY, "--out", "{out}/truths"),
        bundle=REFERENCE,
        optional=True,
        without_bundle=True,
        pictures=(
            Picture("truths/pairs", "truths-pairs", "Searches where pairs of layers cancel"),
            Picture("truths/diffuse", "truths-diffuse", "Searches under diffuse redundancy"),
            Picture("truths/planted", "truths-planted", "Searches where layers are weak one by one"),
        ),
    ),
    Measurement(
        name="search-prices",
        title="What KnapSpec's search costs",
        tool="bench.papers.search_prices",
        arguments=("--layers", "60", *LATENCY),
        bundle=REFERENCE,
        without_bundle=True,
    ),
    Measurement(
        name="search-states",
        title="What KnapSpec's search loses by fewer budgets and tokens",
        tool="bench.papers.search_states",
        arguments=("--model", PLANTED05.model, *PROMPTS, *LATENCY),
        bundle=PLANTED05,
        optional=True,
        without_bundle=True,
    ),
    Measurement(
        name="cluster-counts",
        title="Domains found in unlabelled prompts",
        tool="bench.papers.cluster_counts",
        arguments=("--model", DOMAINS.model),
        bundle=DOMAINS,
        optional=True,
    ),
)
