"""The evidence in docs/results.md: what a laptop can check of the paper's claims, with seeds and intervals.

    SEEDS="3 4 5" bash runs/evidence.sh TEXT GLUE out/evidence   # pre-train, measure, fine-tune; again to continue
    python -m bench.evidence --collect out/evidence              # what has ended so far: evidence.json, .md and .png
    python -m bench.evidence --report                            # the project's record: tables, docs/results.md

runs/evidence.sh says what TEXT and GLUE are; at its end it collects. The tables need requirements-test.txt.
"""
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bench.speed import HERE, commit, cpu_name
from rank import CURVES, LINES
from support.cli import Parser, UserError, clear_errors
from support.files import atomic, figure, read_json, write_json
from support.log import read_log
from support.models import run_settings
from support.results import rank_after

RECORD = HERE / "results"
PAGE = HERE.parent / "docs" / "results.md"
MODELS = {"mae-lm": "MAE-LM", "mlm": "MLM"}
# The score of always giving the most frequent answer of the dev part; a constant correlates with nothing.
FREQUENT = {"docs": 12.5, "sst2": 50.9, "cola": 0.0, "mrpc": 68.4, "rte": 52.7, "stsb": 0.0}
DECIDING = ("docs", "sst2")  # for Tables 1 and 3: what models of this size learn


# ---- 1. From run folders to evidence.json -------------------------------------------------------------------
def found_in(folder: Path) -> dict[str, object]:
    """What a job found; {} if it has not ended. Of rank.json, rank_0.9 by model, layer, centering and curve."""
    if (folder / "result.json").is_file():
        return read_json(folder / "result.json")
    if (folder / "rank.json").is_file():
        models = read_json(folder / "rank.json")["models"]
        for model in models.values():
            for layer in model["layers"]:
                for centering, curves in layer.items():
                    layer[centering] = {curve: ranks["0.9"] for curve, ranks in curves.items()}
        return models
    losses = [[line["step"], round(line["val_loss"], 4)] for line in read_log(folder) if "val_loss" in line]
    return {"losses": losses} if losses and losses[-1][0] == run_settings(folder)["max_steps"] else {}


def collect(out: Path):
    """Add the jobs of runs/evidence.sh that have ended since to evidence.json. UserError if none ever has."""
    path = out / "evidence.json"
    jobs = read_json(path)["jobs"] if path.is_file() else {}
    cpu = f"{cpu_name()}, {torch.get_num_threads()} thread(s)"
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    for log in sorted(out.glob("*.log")):  # a job has a folder NAME and NAME.log
        name = log.stem.replace("-", " ").replace("mae lm", "mae-lm")
        found, printed = found_in(log.with_suffix("")), log.read_text(encoding="utf-8")
        if found and found != jobs.get(name, {}).get("found"):
            command = re.findall(r"(?m)^\+ (.*)", printed)[-1]
            minutes = sum(map(int, re.findall(r"(?m)^= (\d+) s", printed))) / 60
            jobs[name] = {"command": command, "commit": commit(), "machine": machine, "found": found,
                          "minutes": minutes}
    if not jobs:
        raise UserError(f"{out}: nothing has ended there; start runs/evidence.sh")
    write_json(path, {"jobs": jobs})


# ---- 2. A record and its numbers ----------------------------------------------------------------------------
class Record(NamedTuple):
    """The jobs of an evidence.json, by name. Lists and arrays go by seed of pre-training; an array is (seeds,) float64.
    NaN is not measured. Ranks are rank_0.9, with one of CENTERINGS."""
    jobs: dict[str, dict]
    centering: str = "uncentered"

    @property
    def seeds(self) -> list[int]:
        """The seeds of pre-training."""
        return sorted({int(name.split()[-1]) for name in self.jobs if name.startswith("train ")})

    def found(self, job: str, model: str) -> list[dict]:
        """What the jobs of a kind found; {} for one that has not ended."""
        return [self.jobs.get(f"{job} {model} {seed}", {"found": {}})["found"] for seed in self.seeds]

    def losses(self, model: str) -> list[list]:
        """[step, validation loss] of each evaluation."""
        return [found.get("losses", [[0, math.nan]]) for found in self.found("train", model)]

    def ranks(self, model: str, curve: str) -> list[list[float]]:
        """The ranks of layers 0 to L after the last step."""
        ranks = []
        for checkpoints in self.found("rank", model):
            layers = [*checkpoints.values()][-1]["layers"] if checkpoints else []
            ranks.append([layer[self.centering][curve] for layer in layers] or [math.nan])
        return ranks

    def rank(self, model: str, curve: str, layer: int = -1) -> np.ndarray:
        """The rank of one layer after the last step."""
        return np.array([ranks[layer] for ranks in self.ranks(model, curve)], float)

    def score(self, task: str, model: str) -> np.ndarray:
        """The median over fine-tuning seeds."""
        return np.array([found.get("median") for found in self.found(task, model)], float)  # None becomes NaN

    def score_gap(self, task: str) -> np.ndarray:
        """MAE-LM's score minus the MLM's."""
        return self.score(task, "mae-lm") - self.score(task, "mlm")

    def rank_after(self, task: str, model: str, when: str = "after") -> np.ndarray:
        """The top rank after fine-tuning, at the best evaluation or `at_the_end`: the median over fine-tuning seeds."""
        ranks = [found.get("effective_rank", {}) for found in self.found(task, model)]
        return np.array([rank_after(one, self.centering, when) if when in one else None for one in ranks], float)


# ---- 3. Intervals and claims --------------------------------------------------------------------------------
class Interval(NamedTuple):
    """A mean, the ends of its 95 % confidence interval, and the two-sided p-value of 0."""
    mean: float
    low: float
    high: float
    p: float

    def __str__(self) -> str:
        ends = "one seed" if math.isinf(self.high) else f"{self.low:.1f} to {self.high:.1f}"
        return "-" if math.isnan(self.mean) else f"{self.mean:.1f} ({ends})"


def interval_of(values: np.ndarray, ranks: int = 0) -> Interval:
    """The interval, by Student's t, of the mean of numbers by seed, each a sum of `ranks` ranks: these are rounded, so
    three equal ones are not certain. Endless for one seed; NaN for none."""
    from scipy.stats import t
    values = values[np.isfinite(values)]
    n = len(values)
    if n < 2:
        return Interval(values.mean() if n else math.nan, -math.inf, math.inf, 1.0)
    error = max(values.std(ddof=1), (ranks / 12) ** 0.5) / n ** 0.5  # 1 / 12: the variance of a rounding error
    mean, half = values.mean(), t.ppf(0.975, n - 1) * error
    return Interval(mean, mean - half, mean + half, 2 * t.sf(abs(mean) / error, n - 1))


def holm(p: list[float]) -> list[float]:
    """p-values corrected for their number by Holm's method: the smallest times n, the next times n - 1, and so on."""
    corrected, highest = [1.0] * len(p), 0.0
    for k, i in enumerate(np.argsort(p)):
        highest = max(highest, (len(p) - k) * p[i])  # never below that of a smaller one
        corrected[i] = min(1.0, highest)
    return corrected


class Claim(NamedTuple):
    """A statement as a number that is above 0 if it holds."""
    where: str  # in the paper
    statement: str
    paper: str  # its number
    size: float | None  # the same for a model of 128 dimensions
    seeds: np.ndarray  # the number for each pre-training seed
    interval: Interval
    centered: Interval  # the same with centered ranks
    p: float = 1.0  # corrected for the number of claims

    def verdict(self) -> str:
        sign = "shown" if self.interval.mean > 0 else "reversed"
        return sign if self.p < 0.05 else "undecided"

    def power(self) -> str:
        """Whether the paper's number lies in the interval: one that has no room for it excludes it."""
        if self.size is None or math.isinf(self.interval.high):
            return self.paper
        place = "inside" if self.interval.low <= self.size <= self.interval.high else "outside"
        return f"{self.paper}: {self.size:.1f}, {place}"


def rank_claims(record: Record) -> list[tuple]:
    """The first fields of each claim about a difference of two ranks."""
    found = [
        ("Figure 1a", "MLM's top rank, text with `[MASK]` minus without", "above 0", None,
         record.rank("mlm", "with_mask") - record.rank("mlm", "without_mask")),
        ("Figure 1b", "MLM's rank at `[MASK]`, top minus embeddings", "above 0", None,
         record.rank("mlm", "mask_only") - record.rank("mlm", "mask_only", layer=0)),
        ("Table 3", "top rank of text without `[MASK]`, MAE-LM minus MLM", "29 of 768", 29 / 6,
         record.rank("mae-lm", "without_mask") - record.rank("mlm", "without_mask"))]
    for task in DECIDING:
        found.append((f"Table 3, {task}", "the same after fine-tuning", "62 of 768 (MNLI)", 62 / 6,
                      record.rank_after(task, "mae-lm") - record.rank_after(task, "mlm")))
    return found


def claims(record: Record) -> list[Claim]:
    """The paper's claims that are measured, of bench/results/plan.md."""
    found = []
    for plain, centered in zip(rank_claims(record), rank_claims(record._replace(centering="centered"))):
        found.append(Claim(*plain, interval_of(plain[-1], ranks=2), interval_of(centered[-1], ranks=2)))
    measured = [task for task in DECIDING if np.isfinite(record.score_gap(task)).any()]
    if measured:
        mean = np.mean([record.score_gap(task) for task in measured], axis=0)
        found.append(Claim("Table 1", f"score on {' and '.join(measured)}, MAE-LM minus MLM", "0.9 (GLUE)", 0.9, mean,
                           interval_of(mean), interval_of(mean[:0])))
    found = [claim for claim in found if np.isfinite(claim.seeds).any()]
    corrected = holm([claim.interval.p for claim in found])
    return [claim._replace(p=p) for claim, p in zip(found, corrected)]


# ---- 4. The page --------------------------------------------------------------------------------------------
def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [head, ["---"] * len(head), *rows])


def format_numbers(values: np.ndarray, digits: int = 0) -> str:
    """Numbers for print; - for what is not measured."""
    return ", ".join("-" if math.isnan(value) else f"{value:.{digits}f}" for value in np.array(values, float))


def verdicts(record: Record) -> str:
    """The table of verdicts, in Markdown, narrow enough for a phone."""
    rows = []
    for claim in claims(record):
        p = "< 0.001" if claim.p < 0.0005 else f"{claim.p:.3f}"
        rows.append([f"{claim.where}: {claim.statement}", claim.power(), claim.interval, p, f"**{claim.verdict()}**"])
    return table(["above 0 if it holds", "paper", "here", "p", "verdict"], rows)


def tuned_rows(record: Record, task: str) -> list[list[str]]:
    """What fine-tuning on a task gave: a row for each model, and one for the difference."""
    rows, columns = [], []
    for model, name in MODELS.items():
        columns.append([record.rank_after(task, model), record.rank_after(f"common {task}", model),
                        record.rank_after(task, model, "at_the_end")])
        rows.append([task, name, format_numbers(record.score(task, model), 1), *map(format_numbers, columns[-1])])
    gaps = [interval_of(ours - theirs, ranks=2) for ours, theirs in zip(*columns)]
    return [*rows, [task, "MAE-LM minus MLM", interval_of(record.score_gap(task)), *gaps]]


def details(record: Record) -> str:
    """The long tables, in Markdown: origin, claims by seed, Figure 1, fine-tuning."""
    jobs = record.jobs.values()
    hours = sum(job["minutes"] for job in jobs) / 60
    trained, rows, ranks, tuned, others = [], [], [], [], []
    for model, name in MODELS.items():
        trained.append([name, format_numbers([lines[-1][1] for lines in record.losses(model)], 3)])
        for curve in CURVES:
            ranks.append([name, curve, *map(format_numbers, record.ranks(model, curve))])
    for claim in claims(record):
        rows.append([claim.where, claim.interval, claim.centered, format_numbers(claim.seeds, 1)])
    for task in FREQUENT:
        if any(name.startswith(f"{task} ") for name in record.jobs):
            tuned += tuned_rows(record, task)
            floor = record.jobs.get(f"floor {task}", {"found": {}})["found"].get("median")
            others.append([task, FREQUENT[task], format_numbers([floor], 1)])
    made = sorted({f"{job['machine']} (commit {job['commit']})" for job in jobs})
    return "\n\n".join([
        f"{len(jobs)} jobs, {hours:.1f} hours one after another, on {', '.join(made)}. All commands: evidence.json.",
        table(["", f"validation loss, seeds {format_numbers(record.seeds)}"], trained),
        "The claims, each a number that is above 0 if it holds:",
        table(["", "mean (95 % interval)", "with centered ranks", "by seed"], rows),
        "Figure 1, rank_0.9 at layers 0 to L of the last checkpoint:",
        table(["", "", *[f"seed {seed}" for seed in record.seeds]], ranks),
        "Fine-tuning by pre-training seed, medians of 3 seeds without those that diverged:",
        table(["task", "", "score", "rank_0.9 of H^L afterwards", "at 0.0004, if not chosen", "at the last step"],
              tuned),
        "What these scores are above, if anything is learned:",
        table(["task", "the most frequent answer", "random weights"], others)]) + "\n"


def draw(record: Record, path: Path):
    """The figure: losses, Figure 1, Table 3. Markers are those of rank.png."""
    tasks = [task for task in FREQUENT if np.isfinite(record.score_gap(task)).all()]
    with figure(path, panels=3) as (_, axes):
        learned, layers, tuned = axes
        for m, (model, name) in enumerate(MODELS.items()):
            style = {"color": f"C{m}", "alpha": 0.6, "markersize": 4}
            for curve, (_, line, _) in LINES.items():
                for ranks in record.ranks(model, curve):
                    layers.plot(ranks, line, **style)
            for losses in record.losses(model):
                learned.plot(*np.transpose(losses[1:]), **style)  # without that of step 0
            before = record.rank(model, "without_mask")
            tuned.plot([before, *[record.rank_after(task, model) for task in tasks]], "s", **style)
            for axis in axes:
                axis.plot([], [], f"C{m}s", label=name)
        for _, line, label in LINES.values():
            layers.plot([], [], line, color="gray", markersize=4, label=label)
        for axis in axes:
            axis.legend(fontsize="small")
        learned.set(xlabel="step", ylabel="validation loss, nats per masked token", title="Learning")
        layers.set(xticks=range(len(ranks)), xlabel="layer (0 = embeddings)", ylabel="rank_0.9", title="Figure 1")
        tuned.set_xticks(range(1 + len(tasks)), ["before", *tasks])
        tuned.set(xlabel="fine-tuned on", ylabel="rank_0.9 of H^L, text without [MASK]", title="Table 3")


def first_picture(record: Record, path: Path):
    """The README's figure: ranks by layer, means over the seeds, with the names on the lines."""
    curves = {"without_mask": "text without [MASK]", "mask_only": "its vectors at [MASK]"}
    lines = []
    for m, (model, name) in enumerate(MODELS.items()):
        for curve, text in curves.items():
            means = np.mean(record.ranks(model, curve), axis=0)  # (layers,)
            lines.append((means, LINES[curve][1], f"C{m}", f"{name}: {text}"))
    last, height = len(means) - 1, math.inf  # the top layer; the height of the name above
    with figure(path) as (drawn, axes):
        drawn.set_size_inches(7.5, 4.2)
        for means, style, color, name in sorted(lines, key=lambda line: -line[0][last]):
            axes.plot(means, style, color=color)
            height = min(means[last], height - 5)
            axes.text(last + 0.07, height, name, color=color, va="center")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(xlabel="layer (0 = embeddings)", ylabel="effective rank, of 128 dimensions", xticks=range(last + 1),
                 ylim=0, xlim=(0, 1.75 * last))  # room for the names


def write_between(mark: str, text: str):
    """Replace what stands between <!-- MARK --> and <!-- end of MARK --> in docs/results.md. UserError without them."""
    before, start, rest = PAGE.read_text(encoding="utf-8").partition(f"<!-- {mark} -->")
    _, end, after = rest.partition(f"<!-- end of {mark} -->")
    if not end:
        raise UserError(f"{PAGE}: lacks <!-- {mark} --> and <!-- end of {mark} -->, between which the table goes")
    with atomic(PAGE) as temporary:
        temporary.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")


def report(folder: Path):
    """Write evidence.md and .png; of the project's record also the verdicts in docs/results.md."""
    record = Record(read_json(folder / "evidence.json")["jobs"])
    text, picture = details(record), folder / "evidence.png"
    if folder != RECORD:
        text = f"{verdicts(record)}\n\n![figure](evidence.png)\n\n{text}"
    else:
        picture = PAGE.with_name("evidence.png")
        write_between("verdicts", verdicts(record))
        first_picture(record, PAGE.with_name("rank.png"))
    with atomic(folder / "evidence.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    draw(record, picture)
    print(f"{len(record.jobs)} jobs recorded: {folder / 'evidence.md'}, {picture}")


# ---- 5. Command line ----------------------------------------------------------------------------------------
def main(argv: list[str] | None = None):
    parser = Parser("bench.evidence", __doc__)
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--collect", type=Path, metavar="OUT", help="read what has ended there, and report")
    either.add_argument("--report", type=Path, metavar="FOLDER", nargs="?", const=RECORD, help="[bench/results]")
    options = parser.parse_args(argv)
    with clear_errors("bench.evidence"):
        if options.collect:
            collect(options.collect)
        report(options.collect or options.report)


if __name__ == "__main__":
    main()
