"""The evidence in docs/results.md: which of the paper's claims small models confirm, with seeds and intervals.

    SEEDS="3 4 5" bash runs/evidence.sh TEXT GLUE out/evidence   # pre-train, measure, fine-tune; run again to continue
    python -m bench.evidence --collect out/evidence              # record finished jobs: evidence.json, .md, rank.png
    python -m bench.evidence --report                            # the project's record: docs/results.md and rank.png

runs/evidence.sh explains TEXT and GLUE, and ends with --collect. The verdicts need requirements-test.txt.
"""
import math
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bench.speed import HERE, commit, cpu_name
from rank import CENTERINGS, CURVES, LINES
from support.checkpoints import run_settings
from support.cli import Parser, UserError, clear_errors
from support.files import figure, read_json, write_json, write_texts
from support.log import read_log
from support.results import rank_after

RECORD = HERE / "results"
PAGE = HERE.parent / "docs" / "results.md"
MODELS = {"mae-lm": "MAE-LM", "mlm": "MLM"}
DECIDING = ("docs", "sst2")  # for Tables 1 and 3: tasks that models of this size learn


# ---- 1. From run folders to evidence.json -------------------------------------------------------------------
def found_in(folder: Path) -> dict[str, object]:
    """The results of a job; {} if it has not ended."""
    if (folder / "result.json").is_file():
        return read_json(folder / "result.json")
    if (folder / "rank.json").is_file():
        models = read_json(folder / "rank.json")["models"]
        return {name: {"d": model["d"], "n": model["n"], "layers": layers_of(model)} for name, model in models.items()}
    losses = [[line["step"], round(line["val_loss"], 4)] for line in read_log(folder) if "val_loss" in line]
    return {"losses": losses} if losses and losses[-1][0] == run_settings(folder)["max_steps"] else {}


def layers_of(model: dict) -> list[dict]:
    """A model's ranks from rank.json, arranged as in evidence.json: by layer, centering and curve."""
    layers = []
    for layer in range(len(model["uncentered"]["with_mask"])):
        ranks = {}
        for centering in CENTERINGS:
            ranks[centering] = {curve: model[centering][curve][layer] for curve in CURVES}
        layers.append(ranks)
    return layers


def collect(out: Path):
    """Add newly finished jobs of runs/evidence.sh to evidence.json. Raises UserError if no job has ever finished."""
    path = out / "evidence.json"
    jobs = read_json(path)["jobs"] if path.is_file() else {}
    cpu = f"{cpu_name()}, {torch.get_num_threads()} thread(s)"
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    for log in sorted(out.glob("*.log")):  # a job has a folder NAME and a file NAME.log
        name = log.stem.replace("-", " ").replace("mae lm", "mae-lm")
        found, printed = found_in(log.with_suffix("")), log.read_text(encoding="utf-8")
        if found and found != jobs.get(name, {}).get("found"):
            command = re.findall(r"(?m)^\+ (.*)", printed)[-1]
            minutes = sum(map(int, re.findall(r"(?m)^= (\d+) s", printed))) / 60
            jobs[name] = {"command": command, "commit": commit(), "machine": machine, "found": found,
                          "minutes": minutes}
    if not jobs:
        raise UserError(f"{out}: no job has ended there; start runs/evidence.sh")
    write_json(path, {"jobs": jobs})


# ---- 2. A record and its numbers ----------------------------------------------------------------------------
class Record(NamedTuple):
    """The jobs of an evidence.json, by name. Lists and arrays have an entry per pre-training seed. Arrays are (seeds,)
    float64, with NaN where nothing was measured. Ranks are rank_0.9, uncentered."""
    jobs: dict[str, dict]

    @property
    def seeds(self) -> list[int]:
        """The pre-training seeds."""
        return sorted({int(name.split()[-1]) for name in self.jobs if name.startswith("train ")})

    def found(self, job: str, model: str) -> list[dict]:
        """The results of all jobs of a kind; {} for a job that has not ended."""
        return [self.jobs.get(f"{job} {model} {seed}", {"found": {}})["found"] for seed in self.seeds]

    def ranks(self, model: str, curve: str) -> list[list[float]]:
        """The ranks of layers 0 to L after the last step."""
        ranks = []
        for checkpoints in self.found("rank", model):
            layers = [*checkpoints.values()][-1]["layers"] if checkpoints else []
            ranks.append([layer["uncentered"][curve] for layer in layers] or [math.nan])
        return ranks

    def rank(self, model: str, curve: str, layer: int = -1) -> np.ndarray:
        """The rank of one layer after the last step."""
        return np.array([ranks[layer] for ranks in self.ranks(model, curve)], float)

    def score(self, task: str, model: str) -> np.ndarray:
        """The median score over fine-tuning seeds."""
        return np.array([found.get("median") for found in self.found(task, model)], float)  # None becomes NaN

    def score_gap(self, task: str) -> np.ndarray:
        """MAE-LM's score minus the MLM's."""
        return self.score(task, "mae-lm") - self.score(task, "mlm")

    def rank_after(self, task: str, model: str) -> np.ndarray:
        """The last layer's rank after fine-tuning: the median over fine-tuning seeds."""
        ranks = [found.get("effective_rank") for found in self.found(task, model)]
        return np.array([rank_after(one, "uncentered") if one else None for one in ranks], float)


# ---- 3. Intervals and claims --------------------------------------------------------------------------------
class Interval(NamedTuple):
    """A mean, the ends of its 95 % confidence interval, and the two-sided p-value for a mean of 0."""
    mean: float
    low: float
    high: float
    p: float

    def __str__(self) -> str:
        ends = "one seed" if math.isinf(self.high) else f"{self.low:.1f} to {self.high:.1f}"
        return "-" if math.isnan(self.mean) else f"{self.mean:.1f} ({ends})"


def interval_of(values: np.ndarray, ranks: int = 0) -> Interval:
    """The mean of one number per seed, with its Student's t interval. Each number is a sum of `ranks` rounded ranks,
    so even equal numbers are uncertain. For one seed, the interval is infinite; for none, the mean is NaN."""
    from scipy.stats import t
    values = values[np.isfinite(values)]
    n = len(values)
    if n < 2:
        return Interval(values.mean() if n else math.nan, -math.inf, math.inf, 1.0)
    error = max(values.std(ddof=1), (ranks / 12) ** 0.5) / n ** 0.5  # 1 / 12: the variance of a rounding error
    mean, half = values.mean(), t.ppf(0.975, n - 1) * error
    return Interval(mean, mean - half, mean + half, 2 * t.sf(abs(mean) / error, n - 1))


def holm(p: list[float]) -> list[float]:
    """p-values corrected by Holm's method: the smallest is multiplied by n, the next one by n - 1, and so on."""
    corrected, highest = [1.0] * len(p), 0.0
    for k, i in enumerate(np.argsort(p)):
        highest = max(highest, (len(p) - k) * p[i])  # never below the result for a smaller p
        corrected[i] = min(1.0, highest)
    return corrected


class Claim(NamedTuple):
    """A statement, with a number that is above 0 if it holds."""
    where: str  # in the paper
    statement: str
    paper: str  # the paper's number
    size: float | None  # the number to expect from a model of 128 dimensions
    seeds: np.ndarray  # the number for each pre-training seed
    interval: Interval
    p: float = 1.0  # corrected for the number of claims

    def verdict(self) -> str:
        sign = "confirmed" if self.interval.mean > 0 else "reversed"
        return sign if self.p < 0.05 else "inconclusive"

    def power(self) -> str:
        """The paper's number, and whether it lies in the interval."""
        if self.size is None or math.isinf(self.interval.high):
            return self.paper
        place = "inside" if self.interval.low <= self.size <= self.interval.high else "outside"
        return f"{self.paper}: {self.size:.1f}, {place}"


def claims(record: Record) -> list[Claim]:
    """The claims of the paper that were measured, as in bench/results/plan.md."""
    ranks = [
        ("Figure 1a", "MLM's rank in the last layer, text with `[MASK]` minus without", "above 0", None,
         record.rank("mlm", "with_mask") - record.rank("mlm", "without_mask")),
        ("Figure 1b", "MLM's rank at `[MASK]`, top minus embeddings", "above 0", None,
         record.rank("mlm", "mask_only") - record.rank("mlm", "mask_only", layer=0)),
        ("Table 3", "rank of text without `[MASK]`, MAE-LM minus MLM", "29 of 768", 29 / 6,
         record.rank("mae-lm", "without_mask") - record.rank("mlm", "without_mask"))]
    for task in DECIDING:
        ranks.append((f"Table 3, {task}", "the same after fine-tuning", "62 of 768 (MNLI)", 62 / 6,
                      record.rank_after(task, "mae-lm") - record.rank_after(task, "mlm")))
    found = [Claim(*fields, interval_of(fields[-1], ranks=2)) for fields in ranks]
    measured = [task for task in DECIDING if np.isfinite(record.score_gap(task)).any()]
    if measured:
        mean = np.mean([record.score_gap(task) for task in measured], axis=0)
        found.append(Claim("Table 1", f"score on {' and '.join(measured)}, MAE-LM minus MLM", "0.9 (GLUE)", 0.9, mean,
                           interval_of(mean)))
    found = [claim for claim in found if np.isfinite(claim.seeds).any()]
    corrected = holm([claim.interval.p for claim in found])
    return [claim._replace(p=p) for claim, p in zip(found, corrected)]


# ---- 4. The page --------------------------------------------------------------------------------------------
def verdicts(record: Record) -> str:
    """The table of verdicts in Markdown, narrow enough for a phone."""
    lines = ["| above 0 if it holds | paper | here | p | verdict |", "| --- | --- | --- | --- | --- |"]
    for claim in claims(record):
        p = "< 0.001" if claim.p < 0.0005 else f"{claim.p:.3f}"
        cells = [f"{claim.where}: {claim.statement}", claim.power(), str(claim.interval), p, f"**{claim.verdict()}**"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(record: Record, path: Path):
    """Draw the README's figure, if anything was measured: ranks by layer, as means over the measured seeds, with a name
    on each line."""
    found = [one for model in MODELS for one in record.found("rank", model) if one]
    if not found:
        return
    d = [*found[0].values()][-1]["d"]
    curves = {"without_mask": "text without [MASK]", "mask_only": "its vectors at [MASK]"}
    lines = []
    for m, (model, name) in enumerate(MODELS.items()):
        for curve, text in curves.items():
            measured = [ranks for ranks in record.ranks(model, curve) if len(ranks) > 1]
            if measured:
                lines.append((np.mean(measured, axis=0), LINES[curve][1], f"C{m}", f"{name}: {text}"))
    last, height = len(lines[0][0]) - 1, math.inf  # the top layer; the height of the name above
    with figure(path) as (drawn, axes):
        drawn.set_size_inches(7.5, 4.2)
        for means, style, color, name in sorted(lines, key=lambda line: -line[0][last]):
            axes.plot(means, style, color=color)
            height = min(means[last], height - 0.04 * d)
            axes.text(last + 0.07, height, name, color=color, va="center")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(xlabel="layer (0 = embeddings)", ylabel=f"effective rank, of {d} dimensions", xticks=range(last + 1),
                 ylim=0, xlim=(0, 1.75 * last))  # room for the names


def write_verdicts(text: str):
    """Replace the verdicts in docs/results.md. Raises UserError if the page does not mark their place."""
    before, start, rest = PAGE.read_text(encoding="utf-8").partition("<!-- verdicts -->")
    _, end, after = rest.partition("<!-- end of verdicts -->")
    if not end:
        raise UserError(f"{PAGE}: must have <!-- verdicts --> and <!-- end of verdicts --> around the table")
    write_texts(PAGE.parent, {PAGE.name: f"{before}{start}\n{text}\n{end}{after}"})


def report(folder: Path):
    """Write evidence.md and rank.png or, for the project's record, docs/results.md and the README's figure."""
    record = Record(read_json(folder / "evidence.json", "jobs")["jobs"])
    page, picture = folder / "evidence.md", folder / "rank.png"
    if folder == RECORD:
        page, picture = PAGE, PAGE.with_name("rank.png")
        write_verdicts(verdicts(record))
    else:
        write_texts(folder, {page.name: f"{verdicts(record)}\n\n![effective rank by layer]({picture.name})\n"})
    draw(record, picture)
    print(f"{len(record.jobs)} jobs recorded: {page}")


# ---- 5. Command line ----------------------------------------------------------------------------------------
def main(argv: list[str] | None = None):
    parser = Parser("bench.evidence", __doc__)
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--collect", type=Path, metavar="OUT", help="record jobs that have ended in OUT, then report")
    either.add_argument("--report", type=Path, metavar="FOLDER", nargs="?", const=RECORD, help="[bench/results]")
    options = parser.parse_args(argv)
    with clear_errors("bench.evidence"):
        if options.collect:
            collect(options.collect)
        report(options.collect or options.report)


if __name__ == "__main__":
    main()
