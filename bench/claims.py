"""The planned tests, from the records: bench/results/claims.md (toys) and evidence.md (laptop). Scores are in percent.

    python -m bench.claims      # prints the tables behind docs/results.md, and draws docs/masks.png
"""
import functools
import itertools
import shlex
from pathlib import Path

import numpy as np
import pandas
from scipy import stats

from bench.idea import RECORD, half_width, markdown
from support.program import ROOT, Parser, clear_errors, figure, read_json, read_lines

LAPTOP = RECORD.with_name("evidence.json")
LAPTOP_SEEDS = (3, 4, 5)
SEEDS = range(11, 16)  # of the toys' claims
CHOICE_SEEDS = range(16, 19)  # of the choice between MLMs
EQUAL_FLOPS = ["mlm --max-steps 1829", "mlm --mask-rate 0.5 --max-steps 1466", "mlm --mask-rate 0.7 --max-steps 1313"]
CHOSEN = "the MLM with the FLOPs of mae-lm at 70%"
RANDOM = "mae-lm --max-steps 1 --learning-rate 0.0 --muon-learning-rate 0.0"
HALF = "--mask-rate 0.5"
SCORES = "tuned", "mean", "cls"
CLAIMS = [  # a score, and two models: the first is better if the claim holds
    ("cls", f"mae-lm {HALF}", f"mlm {HALF}"), ("mean", f"mae-lm {HALF}", f"mlm {HALF}"),
    ("cls", f"mae-lm {HALF}", f"enc-mask {HALF}"), ("cls", f"enc-mask-dec-resets {HALF}", f"enc-mask {HALF}"),
    ("tuned", "mae-lm --mask-rate 0.7", CHOSEN), ("tuned", "mae-lm --mask-rate 0.7", "mae-lm")]
CURVES = {"MAE-LM": ["mae-lm", f"mae-lm {HALF}", "mae-lm --mask-rate 0.7"],
          "MLM": ["mlm", f"mlm {HALF}", "mlm --mask-rate 0.7"],
          "MLM, fewer steps": EQUAL_FLOPS,
          "reads [MASK]": ["enc-mask", f"enc-mask {HALF}"]}
OTHERS = [RANDOM, f"enc-mask-dec-resets {HALF}", f"random-replace {HALF}", f"mae-lm {HALF} --mask-in-encoder 0.5"]
TITLES = {"tuned": "fine-tuned", "cls": "linear probe of [CLS], encoder frozen"}
DRAWS = 2_000  # of a bootstrap


# ---- 1. Statistics ------------------------------------------------------------------------------------------
def holm(p) -> np.ndarray:
    """Holm's correction of p values."""
    order = np.argsort(p)
    corrected = np.maximum.accumulate(np.array(p)[order] * range(len(p), 0, -1)).clip(max=1)
    return corrected[np.argsort(order)]


@functools.cache
def resampled(seeds: int, texts: int) -> tuple[np.ndarray, np.ndarray]:
    """The weights of seeds and of texts in each draw, (DRAWS, seeds) and (DRAWS, texts); the same for all models."""
    generator = np.random.default_rng(0)
    seed_weights = generator.multinomial(seeds, np.full(seeds, 1 / seeds), DRAWS) / seeds
    text_weights = generator.multinomial(texts, np.full(texts, 1 / texts), DRAWS) / texts
    return seed_weights, text_weights


def bootstrap(scores, right) -> tuple[float, float]:
    """The 95% interval of the mean of scores (S,) of S seeds, drawn again over seeds and texts. `right` (S, T) says
    which of T texts are right; for a difference, minus the same of the other model."""
    seed_weights, text_weights = resampled(*right.shape)
    # A fine-tuned score is a median of three runs, and `right` is from one of them: it only says how texts vary.
    shift = seed_weights @ (scores - 100 * right.mean(1))
    means = 100 * (seed_weights @ right * text_weights).sum(1) + shift
    return tuple(np.quantile(means, [0.025, 0.975]))


def verdicts(differences: dict[str, np.ndarray], least: float = 0.0) -> pandas.DataFrame:
    """A row per claim, whose difference has a value per seed: a two-sided t-test, and Holm's correction over all rows.
    The standard deviation is at least `least`."""
    rows = []
    for claim, values in differences.items():
        mean, deviation, count = values.mean(), values.std(ddof=1), len(values)
        half = half_width(deviation, count, count - 1)
        t = mean * count ** 0.5 / max(least, deviation)
        rows.append({"difference": claim, "by seed": ", ".join(f"{value:.1f}" for value in values),
                     "mean": f"{mean:.1f}", "over seeds": f"{mean - half:.1f} to {mean + half:.1f}",
                     "p": 2 * stats.t.sf(abs(t), count - 1), "verdict": "holds" if mean > 0 else "is reversed"})
    found = pandas.DataFrame(rows)
    found["p"] = holm(found["p"])
    found.loc[found["p"] >= 0.05, "verdict"] = "cannot be decided"
    return found.assign(p=found["p"].map("{:.3f}".format))


# ---- 2. Toys ------------------------------------------------------------------------------------------------
class Record:
    """The models of bench.idea by name and seed. Its methods raise KeyError if a model is missing."""
    def __init__(self, lines: list[dict]):
        self.lines = {(line["name"], line["seed"]): line for line in lines}

    def seeds(self, name: str) -> list[int]:
        """The seeds of a model, in order."""
        return sorted(seed for found, seed in self.lines if found == name)

    def values(self, name: str, field: str, seeds) -> np.ndarray:
        """A field of a model by seed: (S,)."""
        return np.array([self.lines[name, seed][field] for seed in seeds], float)

    def right(self, name: str, score: str, seeds) -> np.ndarray:
        """Which texts are right, by seed: (S, T) of 0 and 1."""
        digits = [self.lines[name, seed][f"{score}_right"] for seed in seeds]
        return np.array([[int(bit) for digit in each for bit in f"{int(digit, 16):04b}"] for each in digits])

    def ranks(self, name: str, curve: str, layer: int, seeds) -> np.ndarray:
        """The effective ranks of a model by seed: (S,)."""
        return np.array([self.lines[name, seed]["ranks"][curve][layer] for seed in seeds], float)

    def chosen(self) -> str:
        """The MLM of equal FLOPs with the best fine-tuned score for the seeds of the choice."""
        return max(EQUAL_FLOPS, key=lambda name: self.values(name, "tuned", CHOICE_SEEDS).mean())


def toys(record: Record) -> pandas.DataFrame:
    """The claims about toys."""
    differences, intervals = {}, []
    for score, *models in CLAIMS:
        one, other = [record.chosen() if name == CHOSEN else name for name in models]
        difference = record.values(one, score, SEEDS) - record.values(other, score, SEEDS)
        right = record.right(one, score, SEEDS) - record.right(other, score, SEEDS)
        differences[f"{score}: `{one}` minus `{other}`"] = difference
        intervals.append("{:.1f} to {:.1f}".format(*bootstrap(difference, right)))
    return verdicts(differences).assign(**{"over seeds and texts": intervals})


def ranks(record: Record) -> pandas.DataFrame:
    """Figure 1 and Table 3 in toys, without a claim."""
    differences = {}
    for masks, name in (("15%", "mlm"), ("50%", f"mlm {HALF}")):
        seeds = record.seeds(name)
        text = record.ranks(name, "without_mask", -1, seeds)
        at_mask = record.ranks(name, "mask_only", -1, seeds)
        differences[f"Figure 1a, {masks}"] = record.ranks(name, "with_mask", -1, seeds) - text
        differences[f"Figure 1b, {masks}"] = at_mask - record.ranks(name, "mask_only", 0, seeds)
        mae_lm = name.replace("mlm", "mae-lm")
        differences[f"Table 3, {masks}"] = record.ranks(mae_lm, "without_mask", -1, seeds) - text
    return verdicts(differences, least=0.4).drop(columns=["p", "verdict"])


def table(record: Record) -> pandas.DataFrame:
    """A row per model: means over its seeds, and the bootstrap's intervals of the scores."""
    rows = []
    for name in [*OTHERS, *sum(CURVES.values(), [])]:
        seeds = record.seeds(name)
        row = {"model": "randomly initialized" if name == RANDOM else f"`{name}`", "seeds": len(seeds)}
        for score in SCORES:
            scores = record.values(name, score, seeds)
            low, high = bootstrap(scores, record.right(name, score, seeds))
            row[score] = f"{scores.mean():.1f} ({low:.0f} to {high:.0f})"
        row |= {"validation loss": f"{record.values(name, 'val_loss', seeds).mean():.2f}",
                "rank": f"{record.ranks(name, 'without_mask', -1, seeds).mean():.0f}",
                "at `[MASK]`": f"{record.ranks(name, 'mask_only', -1, seeds).mean():.0f}",
                "FLOPs, 10¹²": f"{record.values(name, 'flops', seeds).mean() / 1e12:.1f}"}
        rows.append(row)
    return pandas.DataFrame(rows)


def draw(record: Record, path: Path):
    """Draw scores over FLOPs: a line per model through the means of its mask rates, with 95% intervals over seeds."""
    with figure(path, panels=2) as axes:
        for axis, (score, title) in zip(axes, TITLES.items()):
            for number, (label, names) in enumerate(CURVES.items()):
                color = f"C{number}"
                side, align = (-6, "right") if names is EQUAL_FLOPS else (6, "left")
                scores = [record.values(name, score, record.seeds(name)) for name in names]
                flops = [record.values(name, "flops", record.seeds(name)).mean() / 1e12 for name in names]
                means = [values.mean() for values in scores]
                bars = [half_width(values.std(ddof=1), len(values), len(values) - 1) for values in scores]
                axis.errorbar(flops, means, bars, fmt="o-", capsize=3, color=color)
                for name, x, y in zip(names, flops, means):
                    masks = shlex.split(name)[2] if "--mask-rate" in name else "0.15"
                    is_last = name == names[-1]
                    text = f"{label}, {float(masks):.0%}" if is_last else f"{float(masks):.0%}"
                    height = 5 if is_last or label == "MAE-LM" else -12  # MAE-LM's line falls to the right
                    axis.annotate(text, (x, y), (side, height), textcoords="offset points", color=color,
                                  fontsize="small", ha=align)
            random = record.values(RANDOM, score, record.seeds(RANDOM)).mean()
            axis.axhline(random, color="gray", linestyle=":", label="randomly initialized encoder")
            axis.legend(fontsize="small", loc="lower right")
            axis.set(title=title, xlabel="trillions of FLOPs (labels: masks; bars: 95% over seeds)",
                     ylabel="accuracy on docs, %")
            axis.set_xlim(6, 60)


# ---- 3. Toys by layer ---------------------------------------------------------------------------------------
LAYERED = {"probe of `[CLS]`": ("probe", "cls"), "probe of the mean": ("probe", "mean"),
           "rank of text": ("uncentered", "without_mask"), "rank at `[MASK]`": ("uncentered", "mask_only")}


def layers(lines: list[dict]) -> pandas.DataFrame:
    """A row per model: means over seeds of probes and ranks, from layer 0 on."""
    rows = []
    for name in dict.fromkeys(line["name"] for line in lines):
        mine = [line for line in lines if line["name"] == name]
        row = {"model": f"`{name}`", "seeds": len(mine)}
        for title, (kind, key) in LAYERED.items():
            row[title] = ", ".join(f"{value:.0f}" for value in np.mean([line[kind][key] for line in mine], 0))
        rows.append(row)
    return pandas.DataFrame(rows)


def correlations(lines: list[dict]) -> pandas.DataFrame:
    """Spearman's correlation of ranks with probes of trained models: over all layers from 1 on, over the last layers,
    and within a model, as the mean over models."""
    trained = [line for line in lines if line["name"] != "random"]
    rows = []
    for score, curve in itertools.product(list(LAYERED)[:2], list(LAYERED)[2:]):
        found = [np.array([line[kind][key][1:] for line in trained]) for kind, key in (LAYERED[score], LAYERED[curve])]
        of_layers = stats.spearmanr(*[values.ravel() for values in found]).statistic
        of_last = stats.spearmanr(*[values[:, -1] for values in found]).statistic
        within = np.nanmean([stats.spearmanr(*pair).statistic for pair in zip(*found)])
        rows.append({"correlation": f"{curve}, {score}", f"{found[0].size} layers": f"{of_layers:.2f}",
                     f"{len(trained)} last layers": f"{of_last:.2f}", "within a model": f"{within:.2f}"})
    return pandas.DataFrame(rows)


# ---- 4. The laptop preset -----------------------------------------------------------------------------------
def laptop(jobs: dict[str, dict]) -> pandas.DataFrame:
    """The claims about `laptop`, from the programs' results by job."""
    def after(task: str, model: str):  # ranks after fine-tuning: the median of the runs
        runs = [jobs[f"{task} {model} {seed}"]["found"]["effective_rank"]["after"] for seed in LAPTOP_SEEDS]
        return np.array([np.median([rank["uncentered"] for rank in each if rank]) for each in runs])

    def score(model: str):
        docs, sst2 = [[jobs[f"{task} {model} {seed}"]["found"]["median"] for seed in LAPTOP_SEEDS]
                      for task in ("docs", "sst2")]
        return np.add(docs, sst2) / 2

    def rank(model: str, curve: str, layer: int = -1):
        found = [jobs[f"rank {model} {seed}"]["found"] for seed in LAPTOP_SEEDS]
        last = [each[max(each, key=int)]["layers"] for each in found]
        return np.array([layers[layer]["uncentered"][curve] for layers in last], float)

    text = rank("mlm", "without_mask")
    return verdicts({"Figure 1a": rank("mlm", "with_mask") - text,
                     "Figure 1b": rank("mlm", "mask_only") - rank("mlm", "mask_only", 0),
                     "Table 3": rank("mae-lm", "without_mask") - text,
                     "Table 3, docs": after("docs", "mae-lm") - after("docs", "mlm"),
                     "Table 3, SST-2": after("sst2", "mae-lm") - after("sst2", "mlm"),
                     "Table 1": score("mae-lm") - score("mlm")}, least=0.4)


def main(argv=None):
    with clear_errors("bench.claims"):
        parser = Parser("bench.claims", __doc__)
        parser.add_argument("--figure", type=Path, default=ROOT / "docs/masks.png", help="[%(default)s]")
        flags = parser.parse_args(argv)
        record = Record(read_lines(RECORD))
        lines = read_lines(RECORD.with_name("layers.jsonl"))
        parts = {"laptop": laptop(read_json(LAPTOP)["jobs"]), "toys": toys(record), "ranks of toys": ranks(record),
                 "all toys": table(record), "toys by layer": layers(lines), "ranks and probes": correlations(lines)}
        for title, part in parts.items():
            print(f"{title}:\n\n{markdown(part)}\n")
        draw(record, flags.figure)


if __name__ == "__main__":
    main()
