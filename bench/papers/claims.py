"""The claims of the five papers, read from their texts, with what has to hold in our outcomes.

Figures are the papers' own. A condition is about the same order, sign or shape; absolute speeds of other models on
other machines are conditions only where a paper states a range for all of its models.
"""

from __future__ import annotations

from collections.abc import Callable

from bench.papers.scoreboard import Claim, Look, not_yet

RATIOS = ("domains-0", "domains-0.3", "domains-0.7", "domains-1")
SPECBOUND = "exit+depth=0.3125+width=8+threshold=0.55+annealing=0.2"
PLANTED, REAL, FIVE = "planted05", "demo", "five-0"


CHANGES = ("depth=0.9", "width=25", "annealing=0")
"""What SpecBound's Figure 4 removes: the bounds of depth and width, and annealing."""
NUMBERS = {
    "TPT": ("tpt", r"KnapSpec\)\s+Pearson ([\d.]+)"),
    "agreement": ("tpt", r"agreement alone\s+Pearson ([\d.]+)"),
    "own mask": ("transfer", r"gsm8k +([\d.]+)"),
    "foreign mask": ("transfer", r"humaneval +([\d.]+)"),
    "Self-SD seconds": ("search-cost", r"(\d+) s for 1000"),
    "Self-SD times": ("search-cost", r": (\d+) times our search"),
    "Jaccard at 1": ("clasp", r"1: ([\d.]+)"),
    "Jaccard at 32": ("clasp", r"32: ([\d.]+)"),
    "programme": ("clasp", r"programme ([\d.]+)"),
    "brute force": ("clasp", r"best of all ([\d.]+)"),
    "random": ("clasp", r"random ([\d.]+)"),
    "CLaSp search": ("planning-cost", r"half of the layers.* ([\d.]+) plain"),
    "states at all": ("pruning", r"-1.00 +(\d+)"),
    "states at 0.5": ("pruning", r" 0.50 +(\d+)"),
    "agreement at all": ("pruning", r"-1.00(?: +[\d.]+){4} +([\d.]+)"),
    "agreement at 0.5": ("pruning", r" 0.50(?: +[\d.]+){4} +([\d.]+)"),
    "1 cluster": ("cluster-counts", r"(?m)^\| 1 \| ([\d.]+)"),
    "3 clusters": ("cluster-counts", r"(?m)^\| 3 \| ([\d.]+)"),
    "5 clusters": ("cluster-counts", r"(?m)^\| 5 \| ([\d.]+)"),
    "7 clusters": ("cluster-counts", r"(?m)^\| 7 \| ([\d.]+)"),
    "attention at 256": ("context-sweep", r"(?m)^\| 256 .* \| (\d+)% \|"),
    "attention at 2048": ("context-sweep", r"(?m)^\| 2048 .* \| (\d+)% \|"),
    "attention at 8000": ("context-sweep", r"(?m)^\| 8000 .* \| (\d+)% \|"),
}
"""Numbers that tools print, as part and pattern."""


def number(look: Look, name: str) -> float:
    """One of `NUMBERS` in the latest outcome. Raises NotMeasuredError."""
    return look.printed(*NUMBERS[name])


def over(first: str, second: str, *parts: str) -> tuple[Callable[[Look], bool], ...]:
    """Conditions that one contender is faster than another, one for each part."""
    return tuple(lambda look, part=part: look(part, first) > look(part, second) for part in parts)  # type: ignore[misc]


def beyond_doubt(first: str, second: str, part: str) -> Callable[[Look], bool]:
    """The condition that the lower end of a contender's interval is above another's speed."""
    return lambda look: look(part, first, "low") > look(part, second)


def paired(first: str, second: str, part: str) -> Callable[[Look], bool]:
    """The condition that a contender is faster than another on the same prompts, by the whole interval of the ratio."""
    return lambda look: look.ratio(part, first, second, "low") > 1.0


def least(contender: str, speedup: float, *parts: str) -> tuple[Callable[[Look], bool], ...]:
    """Conditions that a contender reaches a speed-up, one for each part."""
    return tuple(lambda look, part=part: look(part, contender) >= speedup for part in parts)  # type: ignore[misc]


def both(contender: str) -> Callable[[Look], str]:
    """A contender's speed on the planted and on the real model."""
    return lambda look: f"{look(PLANTED, contender):.2f} planted, {look(REAL, contender):.2f} real"


def several(part: str, *contenders: str, figure: str = "speedup") -> Callable[[Look], str]:
    """A figure of some contenders of one part, in their order."""

    def short(name: str) -> str:
        return name.replace(SPECBOUND, "its own").replace("its own+", "")

    return lambda look: ", ".join(f"{short(name)} {look(part, name, figure):.2f}" for name in contenders)


KNN = (
    Claim(
        paper="KNN-SSD",
        says="1.35 to 1.62 on models of 13B and 14B, expected speed (Table 1); 1.28 and 1.34 measured (Table 2)",
        ours=both("knn"),
        holds=(*least("knn", 1.28, PLANTED), *least("knn", 1.28, REAL)),
        reason="where layers can be spared it does; SmolLM2-135M has none to spare",
        part="planted05,demo",
    ),
    Claim(
        paper="KNN-SSD",
        says="KNN > Mix at every mix ratio (Table 1)",
        ours=lambda look: ", ".join(f"{look(r, 'knn'):.2f} > {look(r, 'fixed:mix'):.2f}" for r in RATIOS),
        holds=over("knn", "fixed:mix", *RATIOS),
        reason="layers that matter in one domain each, two domains",
        part=",".join(RATIOS),
    ),
    Claim(
        paper="KNN-SSD",
        says="Fix is level with Mix at r = 0 and behind at r ≥ 0.3 on LLaMA-2 (1.24 and 1.23; 1.13 and 1.13); on "
        "Qwen-2.5 it is behind at every r (Table 1)",
        ours=lambda look: ", ".join(f"{look(r, 'fixed:gsm8k'):.2f} < {look(r, 'fixed:mix'):.2f}" for r in RATIOS),
        holds=(
            *over("fixed:mix", "fixed:gsm8k", *RATIOS[1:]),
            lambda look: look(RATIOS[0], "fixed:gsm8k") >= 0.99 * look(RATIOS[0], "fixed:mix"),
        ),
        reason="as on Qwen: Fix fails on half of the prompts whatever their order, at r = 0 too",
        part=",".join(RATIOS),
    ),
    Claim(
        paper="KNN-SSD",
        says="the mix ratio does not matter to KNN: 1.42 to 1.45 on LLaMA-2-13B (Table 1)",
        ours=lambda look: " to ".join(f"{pick(look(r, 'knn') for r in RATIOS):.2f}" for pick in (min, max)),
        holds=(lambda look: max(look(r, "knn") for r in RATIOS) < 1.1 * min(look(r, "knn") for r in RATIOS),),
        reason="the same tokens are drafted at every ratio; what differs is the machine's noise",
        part=",".join(RATIOS),
    ),
    Claim(
        paper="KNN-SSD",
        says="five domains: M and α rise from Fix (2.17, 0.62) over Mix (2.53, 0.68) to KNN (3.12, 0.88) on "
        "LLaMA-2-13B (Tables 2 and 6)",
        ours=lambda look: "; ".join(
            f"{title} {look(FIVE, name, 'M'):.2f}, {look(FIVE, name, 'alpha'):.2f}"
            for title, name in (("Fix", "fixed:gsm8k"), ("Mix", "fixed:mix"), ("KNN", "knn"))
        ),
        holds=(
            lambda look: look(FIVE, "fixed:mix", "alpha") > look(FIVE, "fixed:gsm8k", "alpha"),
            lambda look: look(FIVE, "knn", "alpha") > look(FIVE, "fixed:mix", "alpha"),
            lambda look: look(FIVE, "knn", "M") > look(FIVE, "fixed:gsm8k", "M"),
            paired("knn", "fixed:mix", FIVE),
            paired("fixed:mix", "fixed:gsm8k", FIVE),
        ),
        reason="80 prompts, 16 of each domain; the compiler may give Mix few skipped sub-layers and a high α instead",
        part=FIVE,
    ),
    Claim(
        paper="KNN-SSD",
        says="out of domain, nearest masks bring 1.15 to 1.24, one fixed mask 0.92 to 0.99 (Table 4)",
        ours=several("ablation-knn", "knn", "knn+out_of_domain=mix"),
        holds=(*least("knn", 1.15, "ablation-knn"), *over("knn", "knn+out_of_domain=mix", "ablation-knn")),
        reason="Spec-Bench prompts, most of them of neither searched domain",
        part="ablation-knn",
    ),
    Claim(
        paper="KNN-SSD",
        says="1, 3, 5, 7 clusters: 1.05, 1.17, 1.23, 1.23 (Table 5)",
        ours=lambda look: ", ".join(f"{number(look, name):.2f}" for name in ("1 cluster", "3 clusters", "5 clusters")),
        holds=(
            lambda look: number(look, "3 clusters") > number(look, "1 cluster"),
            lambda look: number(look, "5 clusters") < 1.05 * number(look, "3 clusters"),
            lambda look: number(look, "7 clusters") > 1.0,
        ),
        reason="searches of eight masks; neither longer searches nor seven clusters were run",
        part="cluster-counts",
    ),
    Claim(
        paper="KNN-SSD",
        says="seven kinds of MATH questions: KNN 1.23, Mix 1.02, Fix 0.97 (Table 3)",
        reason="MATH with its seven labels is not reachable from this machine",
    ),
)
SWIFT = (
    Claim(
        paper="SWIFT",
        says="1.3 to 1.6 on 13B to 70B (Table 2)",
        ours=both("swift"),
        holds=(*least("swift", 1.3, PLANTED, REAL),),
        reason="26 prompts of 48 tokens end before its search does; a random half of 120 sub-layers is a poor draft, "
        "and trees cost where verification is not free",
        part="planted05,demo",
    ),
    Claim(
        paper="SWIFT",
        says="α is 0.98 to 1.00 on LLaMA-2, 0.88 and more on code (Tables 2 and 3)",
        ours=several(PLANTED, "swift", figure="alpha"),
        holds=(lambda look: look(PLANTED, "swift", "alpha") >= 0.88,),
        reason="its search has not ended",
        part=PLANTED,
    ),
    Claim(
        paper="SWIFT",
        says="optimisation takes 0.8% of the time over 1000 instances (Figure 6)",
        ours=lambda look: f"{look(PLANTED, 'swift', 'planning'):.1%} over 26 prompts of 48 tokens",
        holds=(lambda look: look(PLANTED, "swift", "planning") <= 0.01,),
        reason="the share falls only once the search ends; where it ended early it was 0.6%",
        part=PLANTED,
    ),
    Claim(
        paper="SWIFT",
        says="skipping uniformly brings 1.22 with trees of top-k candidates, 1.01 without (Figure 2a)",
        ours=several("ablation-swift", "swift+steps=0", "swift+tree=0"),
        holds=(*least("swift+steps=0", 1.0, "ablation-swift"),),
        reason="every layer of SmolLM2 matters, and half of the planted model's, so uniform masks hit real layers",
        part="ablation-swift",
    ),
    Claim(
        paper="SWIFT",
        says="a smaller S or a larger β speeds up the first instances, a larger S all of many (Figure 8a)",
        ours=several("ablation-swift", "swift", "swift+steps=100", "swift+bayes_interval=5"),
        holds=(not_yet,),
        reason="no search ends within the prompts that were decoded, so S cannot show",
        part="ablation-swift",
    ),
    Claim(
        paper="SWIFT",
        says="a task's mask on another task loses: 1.47 falls to 1.01 (Figure 2b)",
        ours=lambda look: f"{number(look, 'own mask'):.2f} falls to {number(look, 'foreign mask'):.2f}, predicted",
        holds=(lambda look: number(look, "own mask") > number(look, "foreign mask"),),
        reason="on a model made for it",
        part="transfer",
    ),
    Claim(
        paper="SWIFT",
        says="Self-SD's 1000 evaluations take 7.5 h for a 13B model, 180 times SWIFT's search (Table 12, Figure 11)",
        ours=lambda look: (
            f"1000 evaluations would take {number(look, 'Self-SD seconds') / 3600:.1f} "
            f"h (extrapolated), {number(look, 'Self-SD times'):.0f} times our search"
        ),
        holds=(lambda look: number(look, "Self-SD times") >= 100,),
        reason="our search is the compiler's: it rates a mask in one parallel pass, not by timed decoding",
        part="search-cost",
    ),
)
CLASP = (
    Claim(
        paper="CLaSp",
        says="1.24 on LLaMA-3-8B to 1.67 on 70B, greedy (Table 1)",
        ours=both("clasp"),
        holds=(*least("clasp", 1.24, PLANTED), *least("clasp", 1.24, REAL)),
        reason="as the paper says itself, what can be skipped shrinks with the model",
        part="planted05,demo",
    ),
    Claim(
        paper="CLaSp",
        says="CLaSp > Self-SD > SWIFT (Table 1)",
        ours=several(PLANTED, "clasp", "fixed:mix", "swift"),
        holds=(*over("clasp", "fixed:mix", PLANTED), *over("fixed:mix", "swift", PLANTED)),
        reason="Self-SD's mask is the compiler's here, which finds the planted layers; CLaSp pays for looking",
        part=PLANTED,
    ),
    Claim(
        paper="CLaSp",
        says="44 of 80 layers skipped (55%) is best; fewer and more lose (Figure 4a)",
        ours=several("priced-clasp", *(f"clasp{skip}" for skip in ("+skip=0.3", "+skip=0.4", "", "+skip=0.6"))),
        holds=(
            paired("clasp", "clasp+skip=0.3", "priced-clasp"),
            paired("clasp", "clasp+skip=0.4", "priced-clasp"),
            paired("clasp", "clasp+skip=0.6", "priced-clasp"),
        ),
        reason="half of the layers are planted, so a half is best by construction",
        part="priced-clasp",
    ),
    Claim(
        paper="CLaSp",
        says="searching after every verification is too dear, beyond every 128th the masks are too old (Figure 4b)",
        ours=several("priced-clasp", *(f"clasp{each}" for each in ("+refresh=4", "+refresh=16", "", "+refresh=128"))),
        holds=(
            paired("clasp", "clasp+refresh=4", "priced-clasp"),
            paired("clasp", "clasp+refresh=128", "priced-clasp"),
        ),
        reason="masks hardly age here: what may be skipped is the model's, not the text's",
        part="priced-clasp",
    ),
    Claim(
        paper="CLaSp",
        says="drafts that end below a confidence of 0.7 are best (Figure 4c)",
        ours=several("priced-clasp", "clasp+confidence=0.4", "clasp", "clasp+confidence=0.9"),
        holds=(
            paired("clasp", "clasp+confidence=0.4", "priced-clasp"),
            paired("clasp", "clasp+confidence=0.9", "priced-clasp"),
        ),
        reason="where the mask's doubts are mostly wrong, a lower bound drafts longer",
        part="priced-clasp",
    ),
    Claim(
        paper="CLaSp",
        says="masks of neighbouring tokens agree, and less the farther apart they are (Figure 3a)",
        ours=lambda look: (
            f"Jaccard {number(look, 'Jaccard at 1'):.2f} at distance 1, {number(look, 'Jaccard at 32'):.2f} at 32"
        ),
        holds=(
            lambda look: number(look, "Jaccard at 1") >= 0.6,
            lambda look: number(look, "Jaccard at 1") > 1.1 * number(look, "Jaccard at 32"),
        ),
        reason="they agree at any distance alike, up to 32 tokens",
        part="clasp",
    ),
    Claim(
        paper="CLaSp",
        says="its programme is about as good as brute force over the 12 middle layers (Figure 3b)",
        ours=lambda look: (
            f"cosine {number(look, 'programme'):.3f}, best "
            f"{number(look, 'brute force'):.3f}, random {number(look, 'random'):.3f}"
        ),
        holds=(
            lambda look: number(look, "programme") > number(look, "random"),
            lambda look: number(look, "brute force") - number(look, "programme") < 0.01,
        ),
        reason="clearly better than chance; on a model without spare layers the best is some way ahead",
        part="clasp",
    ),
    Claim(
        paper="CLaSp",
        says="a search costs 1.4 verifications (0.14 and 0.10 s) in parallel, 25 one by one; 4.8% of the time "
        "(Section 5.1, Figure 3c)",
        ours=lambda look: (
            f"{number(look, 'CLaSp search'):.1f} plain steps, {look(PLANTED, 'clasp', 'planning'):.1%} of the time"
        ),
        holds=(
            lambda look: number(look, "CLaSp search") <= 1.5,
            lambda look: look(PLANTED, "clasp", "planning") <= 0.06,
        ),
        reason="on a processor every state costs its multiplications",
        part="planning-cost,planted05",
    ),
)
KNAPSPEC = (
    Claim(
        paper="KnapSpec",
        says="1.06 to 1.47 with contexts and answers of thousands of tokens (Table 2)",
        ours=lambda look: (
            f"without a bundle {look(PLANTED, 'knapsack+warm_start=0'):.2f} in 48 tokens, "
            f"{look('ablation-knapsack', 'knapsack+warm_start=0'):.2f} in 256"
        ),
        holds=(
            *least("knapsack+warm_start=0", 1.06, PLANTED),
            *least("knapsack+warm_start=0", 1.06, "ablation-knapsack"),
        ),
        reason="its search takes a third of 48 tokens; long contexts with half of the latency were not run",
        part="planted05,ablation-knapsack",
    ),
    Claim(
        paper="KnapSpec",
        says="KnapSpec > CLaSp > SWIFT > DEL on most data (Table 2)",
        ours=several(PLANTED, "knapsack+warm_start=0", "clasp", "swift", "del"),
        holds=(
            *over("knapsack+warm_start=0", "clasp", PLANTED),
            *over("clasp", "swift", PLANTED),
            *over("swift", "del", PLANTED),
        ),
        reason="answers are too short for its search; DEL loses least because it drafts least",
        part=PLANTED,
    ),
    Claim(
        paper="KnapSpec",
        says="DEL slows down models that were not trained for exits: 0.68 to 0.99 (Table 2)",
        ours=both("del"),
        holds=tuple(lambda look, part=part: look(part, "del") < 1.0 for part in (PLANTED, REAL)),  # type: ignore[misc]
        reason="the same",
        part="planted05,demo",
    ),
    Claim(
        paper="KnapSpec",
        says="TPT predicts speed better than the acceptance rate: Pearson 0.837 and 0.538 (Figure 2)",
        ours=lambda look: f"{number(look, 'TPT'):.3f} and {number(look, 'agreement'):.3f}",
        holds=(lambda look: number(look, "TPT") > number(look, "agreement"),),
        reason="20 masks and draft lengths, good and bad",
        part="tpt",
    ),
    Claim(
        paper="KnapSpec",
        says="the longer the context, the more attention blocks are skipped (Figure 3)",
        ours=lambda look: ", ".join(f"{number(look, f'attention at {n}'):.0f}% at {n}" for n in (256, 2048, 8000)),
        holds=(
            lambda look: number(look, "attention at 2048") > number(look, "attention at 256"),
            lambda look: number(look, "attention at 8000") > number(look, "attention at 2048"),
        ),
        reason="because attention is what gets dear; it does not pay at the quarter of the latency that was allowed",
        part="context-sweep",
    ),
    Claim(
        paper="KnapSpec",
        says="τ = 0.5 keeps the speed and saves 31% of the memory; more loses speed (Figure 4)",
        ours=lambda look: (
            f"the same mask at every τ; {number(look, 'states at 0.5'):.0f} of "
            f"{number(look, 'states at all'):.0f} states run at 0.5"
        ),
        holds=(
            lambda look: number(look, "agreement at 0.5") >= number(look, "agreement at all"),
            lambda look: number(look, "states at 0.5") <= 0.9 * number(look, "states at all"),
        ),
        reason="states of the planted model stay similar, so little is dropped; at most 0.8 MiB are held anyway",
        part="pruning",
    ),
)
SPECBOUND_CLAIMS = (
    Claim(
        paper="SpecBound",
        says="1.93 to 2.33 on 7B and 13B, H800; 2.01 on an RTX 3090 (Tables 1 and 4)",
        ours=lambda look: (
            f"tuned {look(PLANTED, 'exit'):.2f}, with its own parameters {look(PLANTED, SPECBOUND):.2f} "
            f"planted, {look(REAL, 'exit'):.2f} real"
        ),
        holds=(*least("exit", 1.5, PLANTED), *least("exit", 1.5, REAL)),
        reason="weak layers are spread over the planted model, so its last layers matter; heads have 8,000 tokens of "
        "text, the paper's 68,000 conversations",
        part="planted05,demo",
    ),
    Claim(
        paper="SpecBound",
        says="removing the depth bound costs most, the width bound less, annealing too (Figure 4)",
        ours=several(
            "ablation-exit", SPECBOUND, f"{SPECBOUND}+depth=0.9", f"{SPECBOUND}+width=25", f"{SPECBOUND}+annealing=0"
        ),
        holds=(
            *over(f"{SPECBOUND}+width=25", f"{SPECBOUND}+depth=0.9", "ablation-exit"),
            *(beyond_doubt(SPECBOUND, f"{SPECBOUND}+{change}", "ablation-exit") for change in CHANGES),
        ),
        reason="the depth bound matters; the others are within the noise of four prompts, all below 1",
        part="ablation-exit",
    ),
    Claim(
        paper="SpecBound",
        says="a moderate threshold (0.55) beats a high one (Figure 3)",
        ours=several("ablation-exit", SPECBOUND, f"{SPECBOUND}+threshold=0.9"),
        holds=(beyond_doubt(SPECBOUND, f"{SPECBOUND}+threshold=0.9", "ablation-exit"),),
        reason="within the noise of four prompts",
        part="ablation-exit",
    ),
    Claim(
        paper="SpecBound",
        says="no prompt of 480 is slower than plain decoding: 1.07 at least (Table 5; its text says 34% exceed 2.93, "
        "its table 13%)",
        ours=several("priced05", "exit", figure="minimum"),
        holds=(lambda look: look("priced05", "exit", "minimum") >= 1.0,),
        reason="the slowest of 26 prompts, by priced time",
        part="priced05",
    ),
    Claim(
        paper="SpecBound",
        says="sampling keeps most of it: 1.88 at temperature 1 (Table 2)",
        ours="not measured with exits",
        holds=(not_yet,),
        reason="with greedy speeds below 1 there is nothing to keep",
    ),
)
SCALE = Claim(
    paper="all",
    says="the larger the model, the more can be skipped: CLaSp 1.24 at 8B to 1.73 at 405B (Figure 5), SWIFT 7B to 70B "
    "(Figure 8b)",
    reason="no larger model is reachable, and a processor with two cores would not run it",
)
CLAIMS = (*KNN, *SWIFT, *CLASP, *KNAPSPEC, *SPECBOUND_CLAIMS, SCALE)
