"""The planned tests and the tables of docs/results.md, from the records. Scores are in percent.

    python -m bench.claims      # prints the tables, and draws docs/few.png
"""
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas
from scipy import stats

from bench import idea
from bench.idea import RECORD, markdown
from support.program import ROOT, Parser, clear_errors, figure, read_lines

SEEDS = range(31, 39)
SHOTS = (4, 8, 16, 32, 100)  # labels per class; 100 is all of docs
SCORES = {  # field of bench.idea, and task and --shots of naive Bayes
    **{f"{shots} labels": (f"{{pooling}}{shots % 100 or ''}", "docs", shots % 100) for shots in SHOTS},
    "modules, 8 labels": ("modules-{pooling}8", "modules", 8), "order": ("order0.5", "bshift", 0),
    "fine-tuned": ("tuned", "", 0)}
HALF = "--mask-rate 0.5"
MODELS = {  # row of bench.idea, and pooling, which was chosen with seed 21
    "MAE-LM": (f"mae-lm {HALF}", "cls"),
    "MLM": (f"mlm {HALF} --max-steps 1805", "mean"),
    "enc-mask": (f"enc-mask {HALF}", "mean"),
    "enc-mask-dec-resets": (f"enc-mask-dec-resets {HALF}", "cls"),
    "MAE-LM, 70%": ("mae-lm --mask-rate 0.7 --learning-rate 1.2e-2 --muon-learning-rate 4e-2", "cls"),
    "MLM, 70%": ("mlm --mask-rate 0.7 --max-steps 1596", "mean"),
    "untrained": ("mae-lm --max-steps 1 --learning-rate 0.0 --muon-learning-rate 0.0", "mean")}
BAYES, LSA = "naive Bayes", "LSA"
CLAIMS = {  # score, the model that is better if the claim holds, and the other one
    "a": [("8 labels", "MAE-LM", "MLM")],
    "b": [("8 labels", "MAE-LM", BAYES)],
    "c": [("order", "MLM", "MAE-LM")],
    "d": [("order", "enc-mask", "MAE-LM"), ("order", "enc-mask", "enc-mask-dec-resets"),
          ("8 labels", "MAE-LM", "enc-mask"), ("8 labels", "enc-mask-dec-resets", "enc-mask")],
    "e": [("fine-tuned", "MAE-LM, 70%", "MLM, 70%")],
    "f": [("modules, 8 labels", "MAE-LM", "MLM")]}


# ---- 1. Statistics ------------------------------------------------------------------------------------------
def holm(p) -> np.ndarray:
    """Holm's correction of p values."""
    order = np.argsort(p)
    corrected = np.maximum.accumulate(np.array(p)[order] * (len(p) - np.arange(len(p)))).clip(max=1)
    return corrected[np.argsort(order)]


def welch(one: np.ndarray, other: np.ndarray) -> tuple[float, str]:
    """p of a two-sided test that the means of two samples differ, and the 95% interval of the difference. If the second
    sample is one number, it is taken as known."""
    if len(other) == 1:
        test = stats.ttest_1samp(one - other, 0)
    else:
        test = stats.ttest_ind(one, other, equal_var=False)
    low, high = test.confidence_interval()
    return test.pvalue, f"{low:.1f} to {high:.1f}"


def decided(rows: list[dict]) -> pandas.DataFrame:
    """Rows with a claim, a `difference` and p, to which verdicts are added, with Holm's correction over the claims. The
    p of a claim of several rows is the largest of them; it holds if all do, and is reversed if all are."""
    found = pandas.DataFrame(rows)
    claims = found.groupby("claim", sort=False)
    largest = claims["p"].max()
    found["p, Holm"] = found["claim"].map(pandas.Series(holm(largest), largest.index))
    found["verdict"] = "undecided"
    is_decided = found["p, Holm"] < 0.05
    found.loc[is_decided & (claims["difference"].transform("min") > 0), "verdict"] = "holds"
    found.loc[is_decided & (claims["difference"].transform("max") < 0), "verdict"] = "is reversed"
    found["difference"] = found["difference"].map("{:.1f}".format)
    found["p, Holm"] = found["p, Holm"].map("{:.3f}".format)
    return found.drop(columns="p")


# ---- 2. Few labels, and the order of words ------------------------------------------------------------------
class Record(NamedTuple):
    """The lines of bench.idea by row and seed, and the results of naive Bayes and LSA."""
    lines: pandas.DataFrame
    baselines: list[dict]

    def of(self, model: str) -> pandas.DataFrame:
        """The lines of a model with the seeds of the plan."""
        return self.lines[(self.lines["name"] == MODELS[model][0]) & self.lines["seed"].isin(SEEDS)]

    def values(self, model: str, score: str) -> np.ndarray:
        """One of SCORES by seed; one number for a baseline."""
        field, task, shots = SCORES[score]
        if model not in MODELS:
            return np.array([each["median"] for each in self.baselines
                             if (each["model"], each["task"], each["shots"]) == (model, task, shots)])
        _, pooling = MODELS[model]
        return self.of(model)[field.format(pooling=pooling)].dropna().to_numpy(float)


def claims(record: Record) -> pandas.DataFrame:
    """The claims of plan.md."""
    rows = []
    for claim, differences in CLAIMS.items():
        for score, better, other in differences:
            one, two = record.values(better, score), record.values(other, score)
            p, interval = welch(one, two)
            rows.append({"claim": claim, "what": f"{score}: {better} minus {other}",
                         "difference": one.mean() - two.mean(), "95% interval": interval, "p": p})
    return decided(rows)


def table(record: Record) -> pandas.DataFrame:
    """A row per model: means over its seeds. `rank` is the effective rank of text in the last layer."""
    rows = []
    for model in [*MODELS, BAYES, LSA]:
        scores = {score: record.values(model, score) for score in SCORES}
        if model in MODELS:
            lines = record.of(model)
            scores |= {"rank": [ranks["without_mask"][-1] for ranks in lines["ranks"]],
                       "FLOPs, 10¹²": lines["flops"] / 1e12, "seeds": [len(lines)]}
        rows.append({"model": model} | {name: np.mean(values) for name, values in scores.items() if len(values)})
    return pandas.DataFrame(rows).round(1).convert_dtypes().astype(object).fillna("")


def draw(record: Record, path: Path):
    """Draw accuracy over labels per class, as means over seeds, and the accuracy at bigram shift, with a point per
    seed."""
    shown = {"MAE-LM": "MAE-LM", "MLM": "MLM", "enc-mask": "MAE-LM + [MASK]", BAYES: BAYES, LSA: LSA,
             "untrained": "untrained"}
    with figure(path, panels=2) as (left, right):
        curves = {model: [record.values(model, f"{shots} labels").mean() for shots in SHOTS] for model in shown}
        height = 0.0  # of the last name
        for model in sorted(shown, key=lambda model: curves[model][-1]):
            color = f"C{[*shown].index(model)}"
            left.plot(SHOTS, curves[model], "o-", color=color)
            height = max(curves[model][-1], height + 2.8)
            left.text(108, height, shown[model], color=color, va="center")
            values = record.values(model, "order")
            right.plot(values, [shown[model]] * len(values), "o", color=color)
        left.set(xscale="log", xlim=(3.6, 520), xlabel="labels per library (dotted: chance)", ylim=(10, 74),
                 ylabel="accuracy, %", title="Frozen: which of 8 libraries is this docstring from?")
        left.set_xticks(SHOTS, SHOTS)
        left.minorticks_off()
        left.axhline(100 / 8, color="gray", linestyle=":")
        right.axvline(50, color="gray", linestyle=":")
        right.set(xlabel="accuracy, % (a point per seed; dotted: chance)",
                  title="Fine-tuned: were two neighboring words swapped?")


def main(argv=None):
    with clear_errors("bench.claims"):
        parser = Parser("bench.claims", __doc__)
        parser.add_argument("--figure", type=Path, default=ROOT / "docs/few.png", help="[%(default)s]")
        flags = parser.parse_args(argv)
        folder = RECORD.parent
        record = Record(pandas.DataFrame(read_lines(RECORD)), read_lines(folder / "baselines.jsonl"))
        parts = {"earlier toys": idea.table(read_lines(folder / "toys.jsonl"), ["tuned", "mean", "cls"]),
                 "models": table(record), "claims": claims(record)}
        draw(record, flags.figure)
        for title, part in parts.items():
            print(f"{title}:\n\n{markdown(part)}\n")


if __name__ == "__main__":
    main()
