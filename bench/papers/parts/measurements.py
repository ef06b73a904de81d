"""The measurements of docs/papers.md by tools of their own."""

from __future__ import annotations

from bench.fixtures.bundles import DIFFUSE, DOMAINS, LATE_HEADS, PAIRS, PLANTED05, REFERENCE
from bench.fixtures.prompts.prompt_files import SPEC_BENCH
from bench.harness.drawing.picture import Picture
from bench.harness.measurement import Measurement
from bench.harness.pricing.latencies import QUIET
from bench.papers.parts.comparisons import ALONG

PROMPTS = ("--prompts", str(SPEC_BENCH))
LATENCY = ("--latency", str(QUIET))
HARD = ("--prompts", "4", "--timed", "0", "--self-sd", "0", "--evaluations", "24,100")
"""Arguments of searches on models that are hard to search."""
MEASUREMENTS = (
    *(
        Measurement(
            name=name,
            title=title,
            tool="bench.papers.tools.swift_stream",
            arguments=(f"{{out}}/{rows}",),
            bundle=DIFFUSE,
            optional=True,
            derived=True,
            without_bundle=True,
        )
        for name, rows, title in (
            ("along-stream", "swift-stream", "SWIFT as the stream goes on"),
            ("along-sweep", "swift-sweep", "SWIFT's S, β and r as the stream goes on"),
        )
    ),
    Measurement(
        name="bounded",
        title="SpecBound's eq. 5 beside priced speed",
        tool="bench.papers.tools.bounded",
        arguments=("{out}/late-heads", "--layers", "60"),
        bundle=LATE_HEADS,
        optional=True,
        derived=True,
    ),
    Measurement(
        name="pictures",
        title=f"Domain-planted: masks, features, speed along the stream of mix ratio {ALONG:g}",
        tool="bench.papers.tools.pictures",
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
        tool="bench.papers.tools.pictures",
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
        tool="bench.papers.tools.planning_cost",
        arguments=("--artifact", PLANTED05.path),
        bundle=PLANTED05,
    ),
    Measurement(
        name="pruning",
        title="What KnapSpec drops on the way",
        tool="bench.papers.tools.pruning",
        arguments=("--artifact", PLANTED05.path),
        bundle=PLANTED05,
    ),
    Measurement(
        name="tpt",
        title="Predicted against measured speed",
        tool="bench.papers.tools.tpt",
        arguments=("--artifact", PLANTED05.path, "--masks", "10", "--prompts", "3", "--out", "{out}"),
        bundle=PLANTED05,
        pictures=(
            Picture("tpt", "tpt", "Predicted against measured speed of masks: on the diagonal the prediction is right"),
        ),
    ),
    Measurement(
        name="transfer",
        title="Masks of one domain on prompts of another",
        tool="bench.papers.tools.transfer",
        arguments=("--artifact", DOMAINS.path),
        bundle=DOMAINS,
    ),
    Measurement(
        name="clasp",
        title="CLaSp's programme against brute force",
        tool="bench.papers.tools.clasp",
        arguments=("--model", REFERENCE.model, *PROMPTS),
        bundle=REFERENCE,
    ),
    Measurement(
        name="context-sweep",
        title="What KnapSpec skips as the context grows",
        tool="bench.papers.tools.context_sweep",
        arguments=("--model", PLANTED05.model, "--contexts", "256,2048,8000", *PROMPTS, *LATENCY),
        bundle=PLANTED05,
        optional=True,
        without_bundle=True,
    ),
    Measurement(
        name="search-cost",
        title="Speed against seconds of search",
        tool="bench.papers.tools.search_cost",
        arguments=("--model", PLANTED05.model, "--evaluations", "24,100", "--out", "{out}"),
        bundle=PLANTED05,
        optional=True,
        without_bundle=True,
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
            tool="bench.papers.tools.search_cost",
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
        tool="bench.papers.tools.ground_truths",
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
        name="exit-training",
        title="Exit heads in closed form and trained as SpecBound trains its own",
        tool="bench.papers.tools.exit_heads",
        arguments=("--artifact", PLANTED05.path, "--exits", "2", "--epochs", "20"),
        bundle=PLANTED05,
        optional=True,
    ),
    Measurement(
        name="search-prices",
        title="What KnapSpec's search costs",
        tool="bench.papers.tools.search_prices",
        arguments=("--layers", "60", *LATENCY),
        bundle=REFERENCE,
        without_bundle=True,
    ),
    Measurement(
        name="search-states",
        title="What KnapSpec's search loses by fewer budgets and tokens",
        tool="bench.papers.tools.search_states",
        arguments=("--model", PLANTED05.model, *PROMPTS, *LATENCY),
        bundle=PLANTED05,
        optional=True,
        without_bundle=True,
    ),
    Measurement(
        name="cluster-counts",
        title="Domains found in unlabelled prompts",
        tool="bench.papers.tools.cluster_counts",
        arguments=("--model", DOMAINS.model),
        bundle=DOMAINS,
        optional=True,
        without_bundle=True,
    ),
)
