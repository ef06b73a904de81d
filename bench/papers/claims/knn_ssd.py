"""The claims of KNN-SSD, read from its text."""

from __future__ import annotations

from bench.papers.claims.conditions import PLANTED, REAL, interval, least, on_all, paired, several, untried
from bench.papers.scoreboard import Claim

ROUTED, RATIOS = "domains-0.3", ("domains-0", "domains-0.3", "domains-1")
FIVE = "five-0"
REAL_ROUTED, REAL_FIVE = "qwen-domains", "qwen-five"
"""Two and five domains on the real model of 1.5B."""
KNN = (
    Claim(
        paper="KNN-SSD",
        says="1.35 to 1.62 on models of 13B and 14B, expected speed (Table 1); 1.28 and 1.34 measured (Table 2)",
        ours=on_all("knn"),
        holds=(*least("knn", 1.28, PLANTED), *least("knn", 1.28, REAL)),
        reason="what can be spared grows with the model: none of SmolLM2-135M, a third of the sub-layers at 1.5B",
        part="planted05,demo,qwen",
    ),
    Claim(
        paper="KNN-SSD",
        says="KNN > Mix at every mix ratio (Table 1)",
        ours=lambda look: (
            f"KNN ÷ Mix "
            f"{interval(look, ROUTED)} planted; 1.5B: {interval(look, REAL_ROUTED)} with two domains, "
            f"{interval(look, REAL_FIVE)} with five"
        ),
        holds=tuple(paired("knn", "fixed:mix", part) for part in (ROUTED, REAL_ROUTED, REAL_FIVE)),
        reason="the planted model has layers that matter in one domain each; the real one spares the same layers in "
        "all domains, so routing adds nothing; by price every ratio is the same",
        part=f"{ROUTED},{REAL_ROUTED},{REAL_FIVE}",
    ),
    Claim(
        paper="KNN-SSD",
        says="Fix is level with Mix at r = 0 and behind at r ≥ 0.3 on LLaMA-2 (1.24 and 1.23; 1.13 and 1.13); on "
        "Qwen-2.5 it is behind at every r (Table 1)",
        ours=lambda look: "; ".join(
            f"{look(part, 'fixed:gsm8k'):.2f} and {look(part, 'fixed:mix'):.2f} {title}"
            for title, part in (("planted", ROUTED), ("at 1.5B", REAL_ROUTED), ("with five domains", REAL_FIVE))
        ),
        holds=(
            paired("fixed:mix", "fixed:gsm8k", ROUTED),
            paired("fixed:mix", "fixed:gsm8k", REAL_ROUTED),
            lambda look: look(ROUTED, "fixed:gsm8k") >= 0.99 * look(ROUTED, "fixed:mix"),
        ),
        reason="on the planted model Fix fails on half of the prompts, at r = 0 too; on the real one GSM8K's mask is "
        "as good as any",
        part=f"{ROUTED},{REAL_ROUTED},{REAL_FIVE}",
    ),
    Claim(
        paper="KNN-SSD",
        says="the mix ratio does not matter to KNN: 1.42 to 1.45 on LLaMA-2-13B (Table 1)",
        ours=lambda look: (
            f"KNN {look(ROUTED, 'knn'):.2f} at every r; `auto` at 0, 0.3 and 1: "
            + ", ".join(f"{look(part, 'auto+light=0'):.2f}" for part in RATIOS)
        ),
        holds=(
            lambda look: (
                max(look(part, "auto+light=0") for part in RATIOS)
                < 1.1 * min(look(part, "auto+light=0") for part in RATIOS)
            ),
        ),
        reason="a route keeps nothing from prompt to prompt, so by price the ratio cannot matter to it; `auto` learns "
        "along the stream, and the order does not matter to it either",
        part=",".join(RATIOS),
    ),
    Claim(
        paper="KNN-SSD",
        says="five domains: M and α rise from Fix (2.17, 0.62) over Mix (2.53, 0.68) to KNN (3.12, 0.88) on "
        "LLaMA-2-13B (Tables 2 and 6)",
        ours=lambda look: "; 1.5B: ".join(
            ", ".join(
                f"{title} {look(part, name, 'M'):.2f} {look(part, name, 'alpha'):.2f}"
                for title, name in (("Fix", "fixed:gsm8k"), ("Mix", "fixed:mix"), ("KNN", "knn"))
            )
            for part in (FIVE, REAL_FIVE)
        ),
        holds=(
            lambda look: look(FIVE, "fixed:mix", "alpha") > look(FIVE, "fixed:gsm8k", "alpha"),
            lambda look: look(FIVE, "knn", "alpha") > look(FIVE, "fixed:mix", "alpha"),
            lambda look: look(FIVE, "knn", "M") > look(FIVE, "fixed:gsm8k", "M"),
            paired("knn", "fixed:mix", FIVE),
            paired("fixed:mix", "fixed:gsm8k", FIVE),
            lambda look: look(REAL_FIVE, "knn", "alpha") > look(REAL_FIVE, "fixed:mix", "alpha"),
            lambda look: look(REAL_FIVE, "knn", "M") > look(REAL_FIVE, "fixed:mix", "M"),
        ),
        reason="planted, M and α rise as in the paper, and KNN is 1.23 times as fast as Mix; on the real model KNN's α "
        "is the lowest and it is slower than both (masks of 48 evaluations); 80 prompts, 16 of each domain",
        part=f"{FIVE},{REAL_FIVE}",
    ),
    Claim(
        paper="KNN-SSD",
        says="out of domain, nearest masks bring 1.15 to 1.24, one fixed mask 0.92 to 0.99 (Table 4)",
        ours=lambda look: (
            f"{several('priced-knn', 'knn', 'knn+out_of_domain=mix')(look)}, the former ÷ the latter "
            f"{interval(look, 'priced-knn', 'knn', 'knn+out_of_domain=mix')}"
        ),
        holds=(*least("knn", 1.15, "priced-knn"), paired("knn", "knn+out_of_domain=mix", "priced-knn"), untried),
        reason="Spec-Bench prompts, most of them of neither searched domain, on the two domains' planted model; in "
        "place of one fixed mask, which was not tried, the rival takes the mask of all domains where a prompt is far "
        "from both",
        part="priced-knn",
    ),
    Claim(
        paper="KNN-SSD",
        says="1, 3, 5, 7 clusters: 1.05, 1.17, 1.23, 1.23 (Table 5)",
        ours=lambda look: ", ".join(
            f"{look.number(name):.2f}" for name in ("1 cluster", "3 clusters", "5 clusters", "7 clusters")
        ),
        holds=(
            lambda look: look.number("3 clusters") > look.number("1 cluster"),
            lambda look: look.number("5 clusters") >= look.number("3 clusters"),
            lambda look: abs(look.number("7 clusters") / look.number("5 clusters") - 1.0) <= 0.02,
        ),
        reason="two kinds of prompts, 24 masks a search, by price: three clusters are enough, and more change it by 3% "
        "at most",
        part="cluster-counts",
    ),
    Claim(
        paper="KNN-SSD",
        says="(ours) Bayesian optimisation, which the paper searches with, should add to the dynamic programme where "
        "layers can only be skipped in pairs, and little elsewhere",
        ours=lambda look: (
            ", ".join(
                f"{kind}: {look.number(f'programme on {kind}'):.2f} and {look.number(f'both on {kind}'):.2f}"
                for kind in ("pairs", "diffuse")
            )
            + f"; 1.5B: {look.number('programme at 1.5B'):.2f} and {look.number('both at 1.5B'):.2f}; on GSM8K both "
            f"{look.number('both of 100 on GSM8K'):.2f}, in 400 {look.number('both of 400 on GSM8K'):.2f}, "
            f"Bayesian optimisation alone {look.number('Bayesian on GSM8K'):.2f}; on HumanEval both "
            f"{look.number('both of 100 on HumanEval'):.2f}, in 400 {look.number('both of 400 on HumanEval'):.2f}"
        ),
        holds=(
            lambda look: look.number("both on pairs") >= 1.05 * look.number("programme on pairs"),
            lambda look: look.number("both on diffuse") >= 0.98 * look.number("programme on diffuse"),
        ),
        reason="programme alone and both, predicted in 100 evaluations: pairs that cancel look bad one by one, so the "
        "programme misses them; on diffuse redundancy both are within 2%, the programme ahead, because it then has all "
        "evaluations; at 1.5B the programme ends by itself after 84 and 98, and refining adds 3% to 4%; the first 24 "
        "of 96 have 99.7% (GSM8K) and 98.8% (HumanEval) of what all have, and 6 and 11 minutes follow; a search of 400 "
        "on HumanEval ends by itself after 228 and 14 minutes, and the best is the 109th",
        part="search-pairs,search-diffuse,qwen-search,qwen-search-400",
    ),
)
