"""The evidence in docs/results.md: what a laptop can check of the paper's claims, with seeds and intervals.

    python -m bench.evidence --data TEXT --glue DIR --hours 3  # pre-train, measure, fine-tune; run it again to continue
    python -m bench.evidence --out out/evidence --report       # out/evidence/evidence.md and .png, so far
    python -m bench.evidence --report                          # the same, and docs/results.md, of the project's record

TEXT is what `train.py --data` takes. DIR has the files of GLUE's original releases (`hub`: from the Hub); without
--glue only `docs` is fine-tuned. Each job is a command of this project. What it finds goes into evidence.json in --out.
--hours stops jobs in progress. One job for each core (--at-once) is fastest. The tables need requirements-test.txt.
"""
import argparse
import itertools
import math
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bench.speed import HERE, commit, cpu_name
from finetune import rank_after
from rank import CENTERINGS, CURVES, LINES
from support.checkpoints import checkpoint_path
from support.cli import Parser, UserError, clear_errors
from support.figures import figure
from support.run_folder import atomic, lock_folder, read_json, read_log, write_json
from train import PRESETS, make_recipe

RECORD = HERE / "results"
PAGE = HERE.parent / "docs" / "results.md"
MODELS = {"mae-lm": "MAE-LM", "mlm": "MLM"}
KEPT = 6  # checkpoints of a run whose ranks are measured
TUNED = 3  # fine-tuning seeds
EPOCHS = {"docs": 30.0, "sst2": 1.0, "cola": 3.0, "mrpc": 3.0, "rte": 3.0, "stsb": 3.0}  # of fine-tuning
TASKS = list(EPOCHS)
DECIDING = TASKS[:2]  # for Tables 1 and 3: what models of this size learn
# bench/results/plan.md says how these were chosen.
RATES = {"docs": {"mae-lm": 4e-4, "mlm": 4e-4}, "sst2": {"mae-lm": 8e-4, "mlm": 8e-4}}
COMMON_RATE = 4e-4  # of the other tasks; those of RATES are fine-tuned at it, too
# The score of always giving the most frequent answer of the dev part; a constant correlates with nothing.
FREQUENT = {"docs": 12.5, "sst2": 50.9, "cola": 0.0, "mrpc": 68.4, "rte": 52.7, "stsb": 0.0}
PAUSE = 1.0  # seconds between looks at the jobs in progress


# ---- 1. The jobs --------------------------------------------------------------------------------------------
class Job(NamedTuple):
    """A command, and how its results are read from the folder that it leaves."""
    name: str
    command: list[str]  # a program and its flags
    folder: Path
    read: Callable[[Path], dict]
    needs: list[str]  # jobs that must have ended before


def read_training(folder: Path) -> dict:
    """The validation losses of a run."""
    return {"losses": [[line["step"], round(line["val_loss"], 4)] for line in read_log(folder) if "val_loss" in line]}


def read_ranks(folder: Path) -> dict:
    """Step -> rank_0.9 by layer, centering and curve."""
    found = {}
    for name, model in read_json(folder / "rank.json")["models"].items():
        layers = []
        for layer in model["layers"]:
            layers.append({})
            for centering, curves in layer.items():
                layers[-1][centering] = {curve: ranks["0.9"] for curve, ranks in curves.items()}
        step = int(Path(name).stem[5:])  # of step_0001234.pt
        found[str(step)] = {"d": model["d"], "n": model["n"], "layers": layers}
    return found


def jobs(options: argparse.Namespace) -> list[Job]:
    """The jobs that --only chooses, the most important first."""
    found = []
    recipe = make_recipe(options.preset, "", {})[0]
    steps = options.steps or recipe.max_steps
    interval = max(1, steps // KEPT)
    kept = [*range(interval, steps, interval)][:KEPT - 1] + [steps]

    def folder_of(name: str) -> Path:
        return options.out / name.replace(" ", "-")

    def add(name: str, read: Callable, needs: list[str], *command) -> None:
        if options.only is None or any(f"{name} ".startswith(f"{words} ") for words in options.only):
            command = [*map(str, command), "--out", str(folder_of(name))]
            found.append(Job(name, command, folder_of(name), read, needs))

    def add_training(name: str, steps: int, *flags) -> None:
        warmup = round(recipe.warmup_steps * steps / recipe.max_steps)
        add(name, read_training, [], "train.py", "--preset", options.preset, "--data", options.data, *flags,
            "--max-steps", steps, "--warmup-steps", warmup)

    def add_tuning(task: str, name: str, start: Path | str, rate: float, needs: str) -> None:
        data = [] if task == "docs" or options.glue == "hub" else ["--data", options.glue]
        epochs = options.docs_epochs if task == "docs" else EPOCHS[task]
        add(name, lambda folder: read_json(folder / "result.json"), [needs], "finetune.py", "--init", start, "--task",
            task, *data, "--epochs", epochs, "--learning-rate", rate, "--seeds", TUNED)

    def add_run(task: str, run: str) -> None:
        start = folder_of(f"train {run}")
        rate = options.learning_rate or RATES.get(task, {}).get(run.split()[0], COMMON_RATE)
        add_tuning(task, f"{task} {run}", start, rate, f"train {run}")
        if rate != COMMON_RATE:
            add_tuning(task, f"common {task} {run}", start, COMMON_RATE, f"train {run}")

    tasks = TASKS if options.glue else ["docs"]
    for seed in options.seeds:  # pair after pair
        pair = [f"{model} {seed}" for model in MODELS]
        for run in pair:
            add_training(f"train {run}", steps, "--ablation", run.split()[0], "--seed", seed, "--checkpoint-interval",
                         interval, "--keep-checkpoints", 0)
        for run in pair:
            paths = [checkpoint_path(folder_of(f"train {run}"), step) for step in kept]
            add(f"rank {run}", read_ranks, [f"train {run}"], "rank.py", *paths, "--tokens", 300_000)
        for task, run in itertools.product(tasks[:len(DECIDING)], pair):
            add_run(task, run)
    first = f"train mlm {options.seeds[0]}"
    for task, seed, model in itertools.product(tasks[len(DECIDING):], options.seeds, MODELS):
        add_run(task, f"{model} {seed}")
    for task in tasks:
        add_tuning(task, f"floor {task}", f"random:{folder_of(first)}", COMMON_RATE, first)
    return found


# ---- 2. Running them ----------------------------------------------------------------------------------------
def recorded(path: Path) -> dict:
    """The results so far: job -> command, commit, machine, minutes, and what it found."""
    return read_json(path)["jobs"] if path.is_file() else {}


def run_jobs(todo: list[Job], options: argparse.Namespace, path: Path) -> list[str]:
    """Run what is not recorded, --at-once at a time, for at most --hours. What a job prints goes into a .log file next
    to its folder. Returns the jobs that failed. UserError if one is recorded with another command."""
    done = recorded(path)
    for job in todo:
        before, now = done.get(job.name, {}).get("command"), " ".join(job.command)
        if before not in (None, now):
            raise UserError(f"{path}: '{job.name}' was '{before}', not '{now}'; give the same flags, or another --out")
    waiting = [job for job in todo if job.name not in done]
    running, failed = [], []  # (job, process, start) of each in progress; names
    threads = max(1, (os.cpu_count() or 1) // options.at_once)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{cpu_name()}, {threads} thread(s)"
    about = {"commit": commit(), "machine": machine}
    end = time.monotonic() + 3600 * options.hours
    try:
        while time.monotonic() < end:
            ready = [job for job in waiting if done.keys() >= set(job.needs)]
            for job in ready[:options.at_once - len(running)]:
                waiting.remove(job)
                print(f"{time.strftime('%H:%M')}  {job.name}: {' '.join(job.command)}", flush=True)
                program, *flags = job.command
                with open(f"{job.folder}.log", "a") as log:
                    process = subprocess.Popen([sys.executable, str(HERE.parent / program), *flags], stdout=log,
                                               stderr=log, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
                running.append((job, process, time.monotonic()))
            if not running:
                return failed
            time.sleep(PAUSE)
            for job, process, start in [one for one in running if one[1].poll() is not None]:
                running.remove((job, process, start))
                if process.returncode == 0:
                    done[job.name] = {"command": " ".join(job.command), **about, "found": job.read(job.folder),
                                      "minutes": round((time.monotonic() - start) / 60, 1)}
                    write_json(path, {"jobs": done})
                else:
                    failed.append(job.name)
                    print(f"{job.name} failed: see the end of {job.folder}.log", flush=True)
        print("the time is up: the same command continues")
        return failed
    finally:  # also after Ctrl-C. Every program saves what it has.
        for _, process, _ in running:
            process.terminate()
        for _, process, _ in running:
            process.wait()


# ---- 3. What is recorded, as numbers ------------------------------------------------------------------------
WITH, WITHOUT, MASKS = range(3)  # as in CURVES


class Numbers(NamedTuple):
    """What is recorded, NaN for what is not. Models are MAE-LM and MLM, seeds those of pre-training."""
    ranks: np.ndarray  # (model, seed, centering, curve, checkpoint, layer): rank_0.9
    seeds: list[int]
    scores: np.ndarray  # (task, model, seed): medians over fine-tuning seeds
    after: np.ndarray  # (task, model, seed, centering): medians of rank_0.9 of H^L after fine-tuning
    other: np.ndarray  # (task, 2, model, seed): the same, uncentered, at COMMON_RATE and at the last step
    floors: np.ndarray  # (task,): scores of random weights


def rank_array(checkpoints: dict) -> np.ndarray:
    """The ranks of a run: (centering, curve, checkpoint, layer)."""
    rows = []
    for by, curve, step in itertools.product(CENTERINGS, CURVES, sorted(checkpoints, key=int)):
        rows.append([layer[by][curve] for layer in checkpoints[step]["layers"]])
    return np.array(rows, float).reshape(2, 3, len(checkpoints), -1)


def numbers_of(found: dict) -> Numbers:
    """The numbers of a record."""
    results = defaultdict(dict, {name: job["found"] for name, job in found.items()})
    seeds = sorted(int(name.split()[-1]) for name in found if name.startswith("train mlm "))  # the last of each pair
    runs = [f"{model} {seed}" for model in MODELS for seed in seeds]

    def ranks_of(name: str, centering: str = "uncentered", when: str = "after") -> float | None:
        ranks = results[name].get("effective_rank", {})
        return rank_after(ranks, centering, when) if when in ranks else None

    ranks = {run: rank_array(results[f"rank {run}"]) for run in runs if results[f"rank {run}"]}
    nothing = np.full(next((one.shape for one in ranks.values()), (2, 3, KEPT, 2)), math.nan)
    names = [f"{task} {run}" for task in TASKS for run in runs]
    after = [ranks_of(name, by) for name in names for by in CENTERINGS]
    common = [ranks_of(f"common {name}") for name in names]
    last = [ranks_of(name, when="at_the_end") for name in names]
    shape_of_scores = len(TASKS), len(MODELS), len(seeds)
    # None becomes NaN.
    return Numbers(np.reshape([ranks.get(run, nothing) for run in runs], (2, len(seeds), *nothing.shape)), seeds,
                   np.array([results[name].get("median") for name in names], float).reshape(shape_of_scores),
                   np.array(after, float).reshape(*shape_of_scores, 2),
                   np.stack([np.array(one, float).reshape(shape_of_scores) for one in (common, last)], axis=1),
                   np.array([results[f"floor {task}"].get("median") for task in TASKS], float))


# ---- 4. Intervals and claims --------------------------------------------------------------------------------
ROUNDING = (1 / 12) ** 0.5  # standard deviation of the error of a rank, which is a whole number


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
    mean, error = values.mean(), max(values.std(ddof=1), ranks ** 0.5 * ROUNDING) / n ** 0.5
    half = t.ppf(0.975, n - 1) * error
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
        if self.p < 0.05:
            return "shown" if self.interval.mean > 0 else "reversed"
        return "undecided"

    def power(self) -> str:
        """Whether the paper's number lies in the interval: one that has no room for it excludes it."""
        if self.size is None or math.isinf(self.interval.high):
            return self.paper
        place = "inside" if self.interval.low <= self.size <= self.interval.high else "outside"
        return f"{self.paper}: {self.size:.1f}, {place}"


def claims(numbers: Numbers) -> list[Claim]:
    """The paper's claims that are measured, of bench/results/plan.md."""
    found = []

    def add(where: str, statement: str, paper: str, size: float | None, values: np.ndarray, ranks: int = 0) -> None:
        """values (seed,), or (seed, centering) of sums of `ranks` ranks."""
        plain, centered = values.T if ranks else (values, np.array([]))
        if np.isfinite(plain).any():
            found.append(Claim(where, statement, paper, size, plain, interval_of(plain, ranks),
                               interval_of(centered, ranks)))

    last = numbers.ranks[..., -1, :]  # (model, seed, centering, curve, layer)
    top = last[..., -1]
    masks_add = top[..., WITH] - top[..., WITHOUT]  # (model, seed, centering)
    rise = top[..., MASKS] - last[..., MASKS, 0]
    mae, mlm = top[..., WITHOUT]  # (seed, centering)
    add("Figure 1a", "MLM's top rank, text with `[MASK]` minus without", "above 0", None, masks_add[1], 2)
    add("Figure 1b", "MLM's rank at `[MASK]`, top minus embeddings", "above 0", None, rise[1], 2)
    add("Table 3", "top rank of text without `[MASK]`, MAE-LM minus MLM", "29 of 768", 29 / 6, mae - mlm, 2)
    gaps = numbers.scores[:, 0] - numbers.scores[:, 1]  # (task, seed)
    measured = [task for task in range(len(DECIDING)) if np.isfinite(gaps[task]).any()]
    for task in measured:
        ours, theirs = numbers.after[task]
        add(f"Table 3, {TASKS[task]}", "the same after fine-tuning", "62 of 768 (MNLI)", 62 / 6, ours - theirs, 2)
    if measured:
        names = " and ".join(TASKS[task] for task in measured)
        add("Table 1", f"score on {names}, MAE-LM minus MLM", "0.9 (GLUE)", 0.9, gaps[measured].mean(0))
    corrected = holm([claim.interval.p for claim in found])
    return [claim._replace(p=p) for claim, p in zip(found, corrected)]


# ---- 5. The page --------------------------------------------------------------------------------------------
def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [head, ["---"] * len(head), *rows])


def format_numbers(values: np.ndarray, digits: int = 0) -> str:
    """Numbers for print; - for what is not measured."""
    return ", ".join("-" if math.isnan(value) else f"{value:.{digits}f}" for value in values)


def verdicts(found: dict) -> str:
    """The table of verdicts, in Markdown, narrow enough for a phone."""
    rows = []
    for claim in claims(numbers_of(found)):
        p = "< 0.001" if claim.p < 0.0005 else f"{claim.p:.3f}"
        rows.append([f"{claim.where}: {claim.statement}", claim.power(), claim.interval, p, f"**{claim.verdict()}**"])
    return table(["above 0 if it holds", "paper", "here", "p", "verdict"], rows)


def details(found: dict) -> str:
    """The long tables, in Markdown: origin, claims by seed, Figure 1, fine-tuning."""
    numbers = numbers_of(found)
    rows, ranks, tuned, others = [], [], [], []
    for claim in claims(numbers):
        rows.append([claim.where, claim.interval, claim.centered, format_numbers(claim.seeds, digits=1)])
    last = np.moveaxis(numbers.ranks[:, :, 0, :, -1], 1, 2)  # (model, curve, seed, layer), uncentered
    for (name, curve), by_seed in zip(itertools.product(MODELS.values(), CURVES), last.reshape(6, *last.shape[2:])):
        ranks.append([name, curve, *map(format_numbers, by_seed)])
    for t, task in enumerate(TASKS):
        if not np.isfinite(numbers.scores[t]).any():
            continue
        for m, name in enumerate(MODELS.values()):
            tuned.append([task, name, format_numbers(numbers.scores[t, m], digits=1),
                          *map(format_numbers, (numbers.after[t, m, :, 0], *numbers.other[t, :, m]))])
        gap = interval_of(numbers.scores[t, 0] - numbers.scores[t, 1])
        gaps = [interval_of(tops[0] - tops[1], 2) for tops in (numbers.after[t, ..., 0], *numbers.other[t])]
        tuned.append([task, "MAE-LM minus MLM", gap, *gaps])
        others.append([task, format_numbers([FREQUENT[task]], 1), format_numbers([numbers.floors[t]], 1)])
    losses = {name: job["found"]["losses"][-1][1] for name, job in found.items() if "losses" in job["found"]}
    trained = []
    for model, name in MODELS.items():
        runs = [f"train {model} {seed}" for seed in numbers.seeds]
        trained.append([name, format_numbers([losses.get(run, math.nan) for run in runs], 3)])
    hours = sum(job["minutes"] for job in found.values()) / 60
    made = sorted({f"{job['machine']} (commit {job['commit']})" for job in found.values()})
    head = ["task", "", "score", "rank_0.9 of H^L afterwards", f"at {COMMON_RATE:g}, if not chosen", "at the last step"]
    return "\n\n".join([
        f"{len(found)} jobs, {hours:.1f} hours one after another, on {', '.join(made)}. All commands: evidence.json.",
        table(["", f"validation loss, seeds {format_numbers(numbers.seeds)}"], trained),
        "The claims, each a number that is above 0 if it holds:",
        table(["", "mean (95 % interval)", "with centered ranks", "by seed"], rows),
        "Figure 1, rank_0.9 at layers 0 to L of the last checkpoint:",
        table(["", "", *[f"seed {seed}" for seed in numbers.seeds]], ranks),
        f"Fine-tuning by pre-training seed, medians of {TUNED} seeds without those that diverged:",
        table(head, tuned),
        "What these scores are above, if anything is learned:",
        table(["task", "the most frequent answer", "random weights"], others)]) + "\n"


def draw(found: dict, path: Path) -> None:
    """The figure: losses, Figure 1, Table 3. Markers are those of rank.png."""
    numbers = numbers_of(found)
    tasks = [task for task, scores in enumerate(numbers.scores) if np.isfinite(scores).all()]
    with figure(path, panels=3) as (_, (learned, layers, tuned)):
        for m, (model, name) in enumerate(MODELS.items()):
            style = {"color": f"C{m}", "alpha": 0.6, "markersize": 4}
            ranks = numbers.ranks[m, :, 0]  # (seed, curve, checkpoint, layer)
            for curve, (_, line, _) in enumerate(LINES.values()):
                layers.plot(ranks[:, curve, -1].T, line, **style)
            tops = [ranks[:, WITHOUT, -1, -1], *numbers.after[tasks, m, :, 0]]  # (task, seed)
            tuned.plot(tops, "s", **style)
            for job in [job for run, job in found.items() if run.startswith(f"train {model} ")]:
                learned.plot(*np.transpose(job["found"]["losses"][1:]), **style)  # without that of step 0
            for axis in (learned, layers, tuned):
                axis.plot([], [], "s", color=style["color"], label=name)
        for _, line, label in LINES.values():
            layers.plot([], [], line, color="gray", markersize=4, label=label)
        for axis in (learned, layers, tuned):
            axis.legend(fontsize="small")
        learned.set(xlabel="step", ylabel="validation loss, nats per masked token", title="Learning")
        layers.set(xticks=range(ranks.shape[-1]), xlabel="layer (0 = embeddings)", ylabel="rank_0.9", title="Figure 1")
        tuned.set_xticks(range(len(tops)), ["before", *[TASKS[task] for task in tasks]])
        tuned.set(xlabel="fine-tuned on", ylabel="rank_0.9 of H^L, text without [MASK]", title="Table 3")


def first_picture(numbers: Numbers, path: Path) -> None:
    """The README's figure: ranks by layer, means over the seeds, with the names on the lines."""
    names = {WITHOUT: "text without [MASK]", MASKS: "its vectors at [MASK]"}
    means = numbers.ranks[:, :, 0, :, -1].mean(1)  # (model, curve, layer)
    lines = [(means[m, curve], m, curve) for m in range(2) for curve in names]
    last = means.shape[2] - 1
    height = math.inf  # of the name above
    with figure(path) as (drawn, axes):
        drawn.set_size_inches(7.5, 4.2)
        for ranks, m, curve in sorted(lines, key=lambda line: -line[0][last]):
            axes.plot(ranks, LINES[CURVES[curve]][1], color=f"C{m}")
            height = min(ranks[last], height - 5)
            axes.text(last + 0.07, height, f"{list(MODELS.values())[m]}: {names[curve]}", color=f"C{m}", va="center")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, 1.75 * last)  # room for the names
        axes.set_ylim(bottom=0)
        axes.set_xticks(range(last + 1))
        axes.set(xlabel="layer (0 = embeddings)", ylabel="effective rank, of 128 dimensions")


def report(folder: Path) -> None:
    """Write evidence.md next to evidence.json, with all tables. Of the project's own record also put the verdicts
    between the marks of docs/results.md and draw the figures of docs/. UserError if there is no record, or no marks."""
    found = recorded(folder / "evidence.json")
    if not found:
        raise UserError(f"{folder}: nothing is recorded yet; give --data")
    page, picture, text = folder / "evidence.md", folder / "evidence.png", details(found)
    if folder == RECORD:
        picture = PAGE.with_name("evidence.png")
        before, start, rest = PAGE.read_text(encoding="utf-8").partition("<!-- verdicts -->")
        _, end, after = rest.partition("<!-- end of verdicts -->")
        if not end:
            raise UserError(f"{PAGE}: lacks <!-- verdicts --> and <!-- end of verdicts -->, between which they go")
        with atomic(PAGE) as temporary:
            temporary.write_text(f"{before}{start}\n{verdicts(found)}\n{end}{after}", encoding="utf-8")
        first_picture(numbers_of(found), PAGE.with_name("rank.png"))
    else:
        text = f"{verdicts(found)}\n\n![figure](evidence.png)\n\n{text}"
    with atomic(page) as temporary:
        temporary.write_text(text, encoding="utf-8")
    draw(found, picture)
    print(f"{len(found)} jobs recorded: {page}, {picture}")


# ---- 6. Command line ----------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> None:
    parser = Parser("bench.evidence", __doc__)
    add = parser.add_argument
    add("--data", help="text for pre-training")
    add("--glue", help="folder of GLUE's files, or hub")
    add("--hours", type=float, default=1000.0, help="end after so many [when all is done]")
    add("--at-once", type=int, default=1, help="jobs at a time: one for each core [1]")
    add("--preset", default="laptop", choices=PRESETS, help="of all runs [laptop]")
    add("--steps", type=int, help="of the main runs [the preset's]")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of pre-training [0 1 2]")
    add("--only", nargs="+", metavar="JOB", help="jobs that begin with these words: rank docs 'train mlm'")
    add("--learning-rate", type=float, help="of fine-tuning, besides 4e-4 [those of bench/results/plan.md]")
    add("--docs-epochs", type=float, default=EPOCHS["docs"], help="of fine-tuning on docs [%(default)s]")
    add("--out", type=Path, help="for the runs and the record [out/evidence]")
    add("--report", action="store_true", help="make the tables and the figure from the record")
    options = parser.parse_args(argv)
    if not options.data and not options.report:
        parser.error("give --data TEXT or --report")
    options.out = options.out or (Path("out/evidence") if options.data else RECORD)
    path = options.out / "evidence.json"
    failed = []
    with clear_errors("bench.evidence"):
        if options.data:
            with lock_folder(options.out):
                failed = run_jobs(jobs(options), options, path)
        if options.report:
            report(options.out)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
