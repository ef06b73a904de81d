"""Routing accuracy of every variant, on held-back starter prompts and on real data.

`python -m bench.papers.tools.routing --model demo@wheel --data build/prompts --out build/routing`

Half of each domain's starter records become anchors: with template and shots, and in all phrasings but the last. The
other half, in the last phrasing too, and the real prompts are routed. Features are kept in --out, one folder per model,
so that a second run takes seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from bench.fixtures.prompts.prompt_files import DATA
from ssd_artifacts.anchors import AnchorSet
from ssd_artifacts.files import write_atomically
from ssd_compiler.anchors.build import build_anchors, similarities
from ssd_compiler.anchors.selection import RULES
from ssd_compiler.calibrate import features_of
from ssd_profiles.domain import domain_names, load_domain, starter_set
from ssd_profiles.prompts import read_records
from ssd_runtime.commands.command import run_guarded
from ssd_runtime.loading.models import LoadedModel, load_model
from ssd_runtime.model.decoder import Decoder
from ssd_runtime.profiling.kernel_choice import fitted_decoder

KS = (1, 2, 3, 5, 8, 10, 13, 16, 20)
CATEGORIES = {"translation": "wmt16", "math_reasoning": "gsm8k", "summarization": "cnn"}
"""Categories of Spec-Bench that correspond to a domain."""
NEAR = {frozenset({"cnn", "xsum"}), frozenset({"gsm8k", "math"})}
"""Pairs of domains with the same task; routes between them are counted separately."""


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt: its use, its true domain if it has one, and its features."""

    use: str
    domain: str
    features: dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo@wheel")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--out", type=Path, default=Path("build/routing"))
    parser.add_argument("--limit", type=int, default=100, help="prompts of each real data set")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    loaded = load_model(arguments.model)
    kept = arguments.out / loaded.fingerprint().weights_sample_sha256[:16]
    kept.mkdir(exist_ok=True)
    measure = Measure(fitted_decoder(loaded.model), loaded, kept)
    rows = list(_measured(measure, arguments.data, arguments.limit))
    results: dict[str, Any] = {"accuracy": _accuracies(rows)}
    top = max(row["mean"] for row in results["accuracy"])
    # Among variants of equal accuracy, the one that tells out-of-domain prompts best is chosen.
    alike = [row | {"auc": _auc(_out_of_domain(rows, row))} for row in results["accuracy"] if row["mean"] > top - 0.003]
    best = max(alike, key=lambda row: row["auc"])
    chosen = _anchors(rows, best["pool"], best["feature"], best["rule"], best["k"])
    results |= {"alike": alike, "best": best, "confusion": _confusion(rows, chosen)}
    results["out_of_domain"] = _out_of_domain(rows, best)
    (arguments.out / "routing.json").write_text(json.dumps(results, indent=1))
    _show(results)


@dataclass(frozen=True, slots=True)
class Measure:
    """Computes features of prompts for one model, cached in a file per group."""

    decoder: Decoder
    loaded: LoadedModel
    out: Path

    def rows(self, use: str, domain: str, texts: Sequence[str]) -> list[Row]:
        """Read or compute the features of `texts`."""
        asked = hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()
        kept = self.out / f"{use} {domain} {asked[:16]}.json".replace(" ", "-")
        if not kept.is_file():
            print(f"{use} {domain}: {len(texts)} prompts", flush=True)
            limit = self.decoder.shape.max_context - 1
            encoded = [self.loaded.encode([("user", text)])[:limit] for text in texts]
            found = features_of(self.decoder, encoded, lambda: None)
            short = [{name: [round(x, 4) for x in values] for name, values in each.items()} for each in found]
            write_atomically(kept, json.dumps(short))
        return [Row(use, domain, features) for features in json.loads(kept.read_text())]


def _measured(measure: Measure, data: Path, limit: int) -> Iterable[Row]:
    for name in domain_names():
        definition = load_domain(name)
        starter = starter_set(name)
        records = list(starter.records)
        random.Random(f"routing {name}").shuffle(records)
        half = len(records) // 2
        last = len(definition.asked) - 1
        first = records[:half]
        second = records[half:]
        yield from measure.rows("anchors", name, [definition.render(r, starter.shots) for r in first])
        ways = [definition.ask(r, way % last) for way, r in enumerate(first)]
        yield from measure.rows("anchors asked", name, ways)
        yield from measure.rows("templated", name, [definition.render(r, starter.shots) for r in second])
        yield from measure.rows("asked", name, [definition.ask(r, last) for r in second])
    real: dict[tuple[str, str], list[str]] = defaultdict(list)
    for _, record in read_records(data / "gsm8k" / "test.jsonl"):
        real["gsm8k", "gsm8k"].append(record["question"])
    for _, record in read_records(data / "humaneval" / "HumanEval.jsonl"):
        real["humaneval", "humaneval"].append(record["prompt"])
    for _, record in read_records(data / "spec_bench" / "dev.jsonl"):
        real[f"spec {record['category']}", CATEGORIES.get(record["category"], "")].append(record["turns"][0])
    for (use, domain), texts in real.items():
        yield from measure.rows(use, domain, texts[:limit])


def _pools(rows: Sequence[Row], feature: str, uses: Iterable[str]) -> dict[str, np.ndarray]:
    wanted = set(uses)
    pools: dict[str, list[list[float]]] = defaultdict(list)
    for row in rows:
        if row.use in wanted:
            pools[row.domain].append(row.features[feature])
    return {name: np.asarray(values, np.float32) for name, values in pools.items()}


USES = {"templated": ("anchors",), "asked": ("anchors asked",), "both": ("anchors", "anchors asked")}


def _anchors(rows: Sequence[Row], pool: str, feature: str, rule: str, k: int, without: str | None = None) -> AnchorSet:
    features = {n: values for n, values in _pools(rows, feature, USES[pool]).items() if n != without}
    return build_anchors(features, {name: values[:0] for name, values in features.items()}, feature, k, 0, rule)


def _accuracies(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Share of prompts routed to their domain, or to a near one, for every variant and test set."""
    found = []
    for pool, feature, rule, k in itertools.product(USES, ("mean", "last"), RULES, KS):
        anchors = _anchors(rows, pool, feature, rule, k)
        sets = {}
        for use in ("templated", "asked", "gsm8k", "humaneval", *(f"spec {name}" for name in CATEGORIES)):
            truth = [row for row in rows if row.use == use]
            routed = _routed(anchors, truth)
            right = [domain == row.domain for domain, row in zip(routed, truth, strict=True)]
            near = [
                ok or frozenset({domain, row.domain}) in NEAR
                for ok, domain, row in zip(right, routed, truth, strict=True)
            ]
            sets[use] = {"strict": float(np.mean(right)), "task": float(np.mean(near))}
        mean = float(np.mean([figures["task"] for figures in sets.values()]))
        found.append({"pool": pool, "feature": feature, "rule": rule, "k": k, "mean": mean, "sets": sets})
    return found


def _routed(anchors: AnchorSet, rows: Sequence[Row]) -> list[str]:
    features = np.asarray([row.features[anchors.feature] for row in rows], np.float32)
    return [anchors.domains[int(label)] for label in similarities(anchors, features).argmax(1)]


def _confusion(rows: Sequence[Row], anchors: AnchorSet) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for row in rows:
        if not row.use.startswith("anchors"):
            key = f"{row.domain} ({row.use})" if row.use in ("templated", "asked") else row.use
            table.setdefault(key, dict.fromkeys(anchors.domains, 0))
    for key, counts in table.items():
        mine = [row for row in rows if key in (f"{row.domain} ({row.use})", row.use)]
        for domain in _routed(anchors, mine):
            counts[domain] += 1
    return table


def _out_of_domain(rows: Sequence[Row], best: dict[str, Any]) -> list[dict[str, Any]]:
    """Leave out each domain in turn and test whether its prompts are recognised as out of domain."""
    found = []
    for name in domain_names():
        anchors = _anchors(rows, best["pool"], best["feature"], best["rule"], best["k"], without=name)
        tests = [row for row in rows if row.use in ("templated", "asked")]
        values = np.asarray([row.features[anchors.feature] for row in tests], np.float32)
        nearest = similarities(anchors, values).max(1)
        unknown = np.asarray([row.domain == name for row in tests])
        found.append(
            {
                "domain": name,
                "auc": float(roc_auc_score(~unknown, nearest)),
                "threshold": anchors.threshold,
                "known_kept": float((nearest[~unknown] >= anchors.threshold).mean()),
                "unknown_told": float((nearest[unknown] < anchors.threshold).mean()),
                "sent_to": dict(Counter(_routed(anchors, [test for test in tests if test.domain == name]))),
            }
        )
    return found


def _auc(held_out: list[dict[str, Any]]) -> float:
    """Mean AUC over the domains without a near one."""
    near = set[str]().union(*NEAR)
    return float(np.mean([row["auc"] for row in held_out if row["domain"] not in near]))


def _show(results: dict[str, Any]) -> None:
    print("\naccuracy by task (strict in brackets); each line the best k of a variant")
    groups = defaultdict(list)
    for row in results["accuracy"]:
        groups[row["pool"], row["feature"], row["rule"]].append(row)
    for (pool, feature, rule), variants in groups.items():
        row = max(variants, key=lambda each: (each["mean"], -each["k"]))
        sets = "  ".join(f"{use} {v['task']:.2f} ({v['strict']:.2f})" for use, v in row["sets"].items())
        print(f"{pool:9} {feature:4} {rule:10} k={row['k']:2} mean {row['mean']:.3f}  {sets}")
    best = results["best"]
    print("\nof equal accuracy, AUC of out-of-domain prompts: ", end="")
    print(", ".join(f"{r['pool']} {r['feature']} {r['rule']} k={r['k']} {r['auc']:.3f}" for r in results["alike"]))
    print(f"best: {best['pool']} {best['feature']} {best['rule']} k={best['k']}")
    same = [r for r in results["accuracy"] if all(r[key] == best[key] for key in ("pool", "feature", "rule"))]
    print("\nthe best variant by k:", "  ".join(f"{r['k']}: {r['mean']:.3f}" for r in same))
    domains = list(next(iter(results["confusion"].values())))
    print("\n" + " " * 26 + "".join(f"{name[:9]:>10}" for name in domains))
    for key, counts in results["confusion"].items():
        print(f"{key:26}" + "".join(f"{counts[name] or '·':>10}" for name in domains))
    print("\nleft out       AUC  threshold  known kept  unknown told  sent to")
    for row in results["out_of_domain"]:
        print(
            f"{row['domain']:12} {row['auc']:.3f}  {row['threshold']:9.2f}  {row['known_kept']:10.2f}  "
            f"{row['unknown_told']:12.2f}  {row['sent_to']}"
        )


if __name__ == "__main__":
    run_guarded(main)
