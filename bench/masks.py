"""The tables and the figure of bench/results/masks.md, from its record.

    python -m bench.masks

The models were trained and measured by runs/masks.py of commit 233a6f2.
"""
import json
import statistics

from scipy import stats

from support.program import ROOT, figure

RECORD = ROOT / "bench/results/masks.jsonl"
CLAIMS = {  # measure; added (+) and subtracted (-) models
    "A1": ("cls", "+mae-lm-0.5 -enc-mask-0.5"), "A2": ("mean", "+mae-lm-0.5 -enc-mask-0.5"),
    "B1": ("cls", "+mae-lm-0.5 -mlm-0.5"), "B2": ("mean", "+mae-lm-0.5 -mlm-0.5"),
    "C": ("cls", "+mae-lm-0.5 -enc-mask-0.5 -mae-lm-0.15 +enc-mask-0.15"), "D": ("tuned", "+mae-lm-0.5 -mae-lm-0.15"),
    "E": ("tuned", "+mlm-0.5-max-steps-1524 -mlm-0.15"), "F": ("tuned", "+mae-lm-0.5 -mlm-0.5")}
DRAWN = {"mae-lm": "MAE-LM", "mlm": "MLM", "enc-mask": "enc-mask"}  # names in the figure
RATES = {"0.15": "o", "0.3": "v", "0.5": "s", "0.7": "^"}  # mask rates and their markers in the figure


def scores(line: dict) -> dict[str, float]:
    """The scores of a model by measure, in percent."""
    return line["frozen"] | {"tuned": statistics.median(line["tuned"]["docs"])}


def cost(line: dict) -> float:
    """The FLOPs of a model's whole training, in 10^12."""
    return line["tokens"] * line["flops_per_token"] / 1e12


def difference(lines: list[dict], measure: str, terms: str) -> dict[int, float]:
    """The sum of a measure over models with their signs, by seed, for the seeds that all models have."""
    found = {(line["name"], line["seed"]): scores(line)[measure] for line in lines}
    values = {}
    for seed in range(2, 7):
        signed = [(1 if term[0] == "+" else -1, found.get((term[1:], seed))) for term in terms.split()]
        if all(value is not None for _, value in signed):
            values[seed] = sum(sign * value for sign, value in signed)
    return values


def interval(values: list[float], level: float) -> str:
    """The mean and its interval by Student's t, as text."""
    mean = statistics.mean(values)
    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.1f} ({mean - half:.1f} to {mean + half:.1f})"


def holm(p: dict[str, float]) -> dict[str, float]:
    """p-values corrected for the number of claims; Holm, 1979."""
    corrected = {}
    highest = 0.0
    for place, claim in enumerate(sorted(p, key=p.get)):
        highest = max(highest, min(1.0, (len(p) - place) * p[claim]))
        corrected[claim] = highest
    return corrected


def print_claims(lines: list[dict]):
    """Print a row of Markdown for each claim."""
    found = {claim: difference(lines, *how) for claim, how in CLAIMS.items()}
    p = holm({claim: stats.ttest_1samp([*values.values()], 0).pvalue for claim, values in found.items()})
    for claim, values in found.items():
        sign = "shown" if statistics.mean(values.values()) > 0 else "reversed"
        verdict = sign if p[claim] < 0.05 else "undecided"
        each = ", ".join(f"{value:.1f}" for value in values.values())
        mean = interval([*values.values()], 0.95)
        print(f"| {claim} | {', '.join(map(str, values))} | {each} | {mean} | {p[claim]:.2g} | {verdict} |")
    for measure in ("cls", "mean"):
        values = difference(lines, measure, "+enc-mask-0.5 -mlm-0.5")
        print(f"enc-mask minus MLM at 0.5, {measure}: {interval([*values.values()], 0.9)} (90%)")


def print_models(lines: list[dict]):
    """Print a row of Markdown for each model: FLOPs, scores by task, probes, loss, ranks of text and at [MASK]."""
    for name in sorted({line["name"] for line in lines}):
        mine = [line for line in lines if line["name"] == name]
        cells = [name, f"{cost(mine[0]):.1f}"]
        for task in mine[0]["tuned"]:
            cells.append(", ".join(f"{statistics.median(line['tuned'][task]):.1f}" for line in mine))
        for measure in ("mean", "cls"):
            cells.append(", ".join(f"{scores(line)[measure]:.1f}" for line in mine))
        cells.append(", ".join(f"{line['val_loss_at_15']:.3f}" for line in mine))
        for curve in ("without_mask", "mask_only"):
            cells.append(", ".join(str(line["ranks"]["uncentered"][curve][-1]) for line in mine))
        print(f"| {' | '.join(cells)} |")


def print_noise(lines: list[dict]):
    """Print the standard deviation between seeds of one model, pooled over models, by measure."""
    names = {line["name"] for line in lines}
    for measure in ("tuned", "mean", "cls"):
        groups = [[scores(line)[measure] for line in lines if line["name"] == name] for name in names]
        groups = [group for group in groups if len(group) > 1]
        squares = sum((len(group) - 1) * statistics.variance(group) for group in groups)
        print(f"standard deviation, {measure}: {(squares / sum(len(group) - 1 for group in groups)) ** 0.5:.1f}")


def draw(lines: list[dict]):
    """Draw the frozen and the fine-tuned scores of all models over the FLOPs of their training."""
    with figure(ROOT / "docs/masks.png", panels=2) as axes:
        for axis, measure, title in zip(axes, ("cls", "tuned"), ("linear probe of [CLS]", "fine-tuned")):
            for number, (row, name) in enumerate(DRAWN.items()):
                for rate, marker in RATES.items():
                    mine = [line for line in lines if line["name"].startswith(f"{row}-{rate}")]
                    x = [cost(line) for line in mine]
                    y = [scores(line)[measure] for line in mine]
                    label = f"{name}, {float(rate):.0%} masked" if mine else None
                    axis.plot(x, y, marker, color=f"C{number}", fillstyle="none", label=label)
            axis.set(xlabel="training FLOPs, 10¹²", ylabel="accuracy on docs, %", ylim=(36, 70))
            axis.set_title(f"{title}: toys, a dot for each seed")
        axes[1].legend(fontsize="small", loc="lower right")


if __name__ == "__main__":
    models = [json.loads(line) for line in RECORD.read_text().splitlines()]
    models.sort(key=lambda line: line["seed"])
    print_claims(models)
    print_models(models)
    print_noise(models)
    draw(models)
