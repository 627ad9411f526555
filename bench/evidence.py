"""The evidence in docs/results.md: what a laptop can check of the paper's claims, with seeds and intervals.

    python -m bench.evidence --data TEXT --glue DIR --hours 3  # pre-train, measure, fine-tune; run it again to continue
    python -m bench.evidence --out out/evidence --report       # out/evidence/evidence.md and .png, so far
    python -m bench.evidence --report                          # the same, and docs/results.md, of the project's record

TEXT is what `train.py --data` takes. DIR has the files of GLUE's original releases (`hub`: from the Hub); without
--glue only `docs` is fine-tuned. Each job is a command of this project. What it finds goes into evidence.json in --out,
and it is not run again. --hours stops jobs in progress, which continue next time. One job for each core (--at-once) is
faster than one with many threads. The tables need requirements-test.txt.
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
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bench.speed import HERE, commit, cpu_name
from finetune import rank_after
from maelm import Config
from rank import CENTERINGS, CURVES, LINES
from support.checkpoints import checkpoint_path
from support.cost import flops
from support.files import UserError, atomic, clear_errors, lock_folder, read_json, write_json
from support.flags import Parser
from support.log import figure, read_log
from train import TRAIN_PRESETS, TrainConfig

RECORD = HERE / "results"
PAGE = HERE.parent / "docs" / "results.md"
MODELS = {"mae-lm": "MAE-LM", "mlm": "MLM"}
KEPT = 6  # checkpoints of a run whose ranks are measured; every second one is fine-tuned for Figure 3
TUNED, CURVE_TUNED = 3, 2  # fine-tuning seeds: of a run, of its checkpoints
# Task -> epochs of fine-tuning; docs/results.md says how these and the learning rate were chosen.
EPOCHS = {"docs": 30.0, "cola": 3.0, "mrpc": 3.0, "rte": 3.0, "stsb": 3.0, "sst2": 1.0}
TASKS = list(EPOCHS)
# Short runs, a fifth of the preset's steps, one seed: the sweep of Figure 4, and rows of Table 2. Name -> flags.
DELTAS = ("0", "0.25", "0.5", "0.75", "1")
SHORT = {f"delta {delta}": ["--mask-in-encoder", delta] for delta in DELTAS}
SHORT |= {name: ["--ablation", name] for name in ("mlm", "enc-mask-dec-resets", "random-replace")}
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
    """The validation losses of a run, and the FLOPs of its steps, in 10^15."""
    settings = read_json(folder / "config.json")
    config = Config(**{field.name: settings[field.name] for field in fields(Config)})
    losses = [[line["step"], round(line["val_loss"], 4)] for line in read_log(folder) if "val_loss" in line]
    return {"losses": losses, "petaflops_per_step": settings["batch_size"] * flops(config) / 1e15}


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


def read_result(folder: Path) -> dict:
    """The scores of the fine-tuning seeds, and their ranks."""
    return read_json(folder / "result.json")


def read_figure3(folder: Path) -> dict:
    """Model -> steps and scores of its checkpoints."""
    curves = {model: [] for model in MODELS}
    for point in read_json(folder / "figure3.json")["points"]:
        model = Path(point["run"]).name.removeprefix("train-").rpartition("-")[0]
        curves[model].append({"step": int(Path(point["checkpoint"]).stem[5:]), "median": point["median"]})
    return curves


def jobs(options: argparse.Namespace) -> list[Job]:
    """The jobs that --only chooses, the most important first."""
    found = []
    recipe = TrainConfig(**TRAIN_PRESETS[options.preset])
    steps = options.steps or recipe.max_steps
    interval = max(1, steps // KEPT)
    kept = [*range(interval, steps, interval)][:KEPT - 1] + [steps]
    runs = [f"{model} {seed}" for seed in options.seeds for model in MODELS]  # pair after pair

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

    def add_tuning(name: str, needs: list[str], task: str, seeds: int, *checkpoints: Path) -> None:
        what = ["--figure3", *checkpoints] if checkpoints else ["--init", folder_of(needs[0])]
        data = [] if task == "docs" or options.glue == "hub" else ["--data", options.glue]
        epochs = options.docs_epochs if task == "docs" else EPOCHS[task]
        add(name, read_figure3 if checkpoints else read_result, needs, "finetune.py", *what, "--task", task, *data,
            "--epochs", epochs, "--learning-rate", options.learning_rate, "--seeds", seeds)

    def checkpoints_of(run: str) -> list[Path]:
        return [checkpoint_path(folder_of(f"train {run}"), step) for step in kept]

    for run in runs:
        model, seed = run.split()
        add_training(f"train {run}", steps, "--ablation", model, "--seed", seed, "--checkpoint-interval", interval,
                     "--keep-checkpoints", 0)
    for run in runs:
        add(f"rank {run}", read_ranks, [f"train {run}"], "rank.py", *checkpoints_of(run), "--tokens", 300_000)
    for run in runs:
        add_tuning(f"docs {run}", [f"train {run}"], "docs", TUNED)
    for seed in options.seeds:
        pair = [f"{model} {seed}" for model in MODELS]
        paths = [path for run in pair for path in checkpoints_of(run)[1::2]]
        add_tuning(f"figure3 {seed}", [f"train {run}" for run in pair], "docs", CURVE_TUNED, *paths)
    for name, flags in SHORT.items():
        add_training(f"short train {name}", recipe.max_steps // 5, *flags)
        add_tuning(f"short docs {name}", [f"short train {name}"], "docs", TUNED)
    for task, run in itertools.product(TASKS[1:] if options.glue else [], runs):
        add_tuning(f"{task} {run}", [f"train {run}"], task, TUNED)
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
            for one in [one for one in running if one[1].poll() is not None]:
                running.remove(one)
                job, process, start = one
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
    scores: np.ndarray  # (task, model, seed): medians over fine-tuning seeds
    after: np.ndarray  # (task, model, seed, centering): medians of rank_0.9 of H^L after fine-tuning
    curves: np.ndarray  # (model, seed, checkpoint, 2): Figure 3, 10^15 FLOPs of training and scores
    short: np.ndarray  # (run,): scores on docs of the short runs
    tasks: list[int]  # those that all seeds of both models have scores of


def rank_array(checkpoints: dict) -> np.ndarray:
    """The ranks of a run: (centering, curve, checkpoint, layer)."""
    rows = []
    for by, curve, step in itertools.product(CENTERINGS, CURVES, sorted(checkpoints, key=int)):
        rows.append([layer[by][curve] for layer in checkpoints[step]["layers"]])
    return np.array(rows, float).reshape(2, 3, len(checkpoints), -1)


def numbers_of(found: dict) -> Numbers:
    """The numbers of a record."""
    results = defaultdict(dict, {name: job["found"] for name, job in found.items()})
    seeds = len([name for name in found if name.startswith("train mlm ")])  # the last of each pair
    runs = [f"{model} {seed}" for model in MODELS for seed in range(seeds)]
    tuned = [results[f"{task} {run}"] for task in EPOCHS for run in runs]
    scores = np.array([one.get("median") for one in tuned], float)  # None becomes NaN
    after = [rank_after(one["effective_rank"], by) if one else None for one in tuned for by in CENTERINGS]
    short = np.array([results[f"short docs {name}"].get("median") for name in SHORT], float)
    ranks = {run: rank_array(results[f"rank {run}"]) for run in runs if results[f"rank {run}"]}
    shape = next((one.shape for one in ranks.values()), (2, 3, KEPT, 2))
    ranks = np.array([ranks.get(run, np.full(shape, math.nan)) for run in runs])
    curves = np.full((2, seeds, KEPT // 2, 2), math.nan)
    for (m, model), seed in itertools.product(enumerate(MODELS), range(seeds)):
        for c, point in enumerate(results[f"figure3 {seed}"].get(model, [])):
            pace = results[f"train {model} {seed}"]["petaflops_per_step"]
            curves[m, seed, c] = point["step"] * pace, point["median"]
    scores, after = scores.reshape(-1, 2, seeds), np.array(after, float).reshape(-1, 2, seeds, 2)
    tasks = [t for t, values in enumerate(scores) if seeds and np.isfinite(values).all()]
    return Numbers(ranks.reshape(2, seeds, *shape), scores, after, curves, short, tasks)


# ---- 4. Intervals, verdicts, claims -------------------------------------------------------------------------
ROUNDING = (1 / 12) ** 0.5  # standard deviation of the error of a rank, which is a whole number


class Interval(NamedTuple):
    """A mean, and the ends of its 95 % confidence interval."""
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        ends = "one seed" if math.isinf(self.high) else f"{self.low:.1f} to {self.high:.1f}"
        return "-" if math.isnan(self.mean) else f"{self.mean:.1f} ({ends})"


def interval_of(values: np.ndarray, ranks: int = 0) -> Interval:
    """The interval, by Student's t, of the mean of numbers by seed, each a sum of `ranks` ranks: these are rounded, so
    three equal ones are not certain. Endless for one seed; NaN for none."""
    from scipy.stats import t
    values = values[np.isfinite(values)]
    n = len(values)
    mean, half = values.mean() if n else math.nan, math.inf
    if n > 1:
        half = t.ppf(0.975, n - 1) * max(values.std(ddof=1), ranks ** 0.5 * ROUNDING) / n ** 0.5
    return Interval(mean, mean - half, mean + half)


def verdict(interval: Interval) -> str:
    """The verdict on a number that is above 0 if the claim holds."""
    if math.isnan(interval.mean):
        return "not measured"
    if interval.low > 0:
        return "shown"
    return "reversed" if interval.high < 0 else "undecided"


class Claim(NamedTuple):
    """A statement as a number that is above 0 if it holds."""
    where: str  # in the paper
    statement: str
    paper: str  # its number
    seeds: np.ndarray  # the number for each pre-training seed
    interval: Interval
    centered: Interval  # the same with centered ranks


def claims(numbers: Numbers) -> list[Claim]:
    """The paper's claims."""
    found = []

    def add(where: str, statement: str, paper: str, values: np.ndarray, ranks: int = 0) -> None:
        """values (seed,), or (seed, centering) of sums of `ranks` ranks."""
        plain, centered = values.T if ranks else (values, np.array([]))
        found.append(Claim(where, statement, paper, plain, interval_of(plain, ranks), interval_of(centered, ranks)))

    last = numbers.ranks[..., -1, :]  # (model, seed, centering, curve, layer)
    top = last[..., -1]
    masks_add = top[..., WITH] - top[..., WITHOUT]  # (model, seed, centering)
    rise = top[..., MASKS] - last[..., MASKS, 0]
    mae, mlm = last[..., WITHOUT, :]  # (seed, centering, layer)
    add("Figure 1a", "MLM's top rank, text with `[MASK]` minus without", "above 0", masks_add[1], 2)
    add("Figure 1b", "MLM's rank at `[MASK]`, top minus embeddings", "above 0", rise[1], 2)
    add("Table 3", "top rank of text without `[MASK]`, MAE-LM minus MLM", "29 of 768", mae[..., -1] - mlm[..., -1], 2)
    names = [TASKS[task] for task in numbers.tasks]
    for name, (ours, theirs) in zip(names, numbers.after[numbers.tasks]):
        add(f"Table 3, {name}", "the same after fine-tuning", "62 (MNLI), 157 (SQuAD)", ours - theirs, 2)
    gaps = numbers.scores[:, 0] - numbers.scores[:, 1]  # (task, seed)
    add("Table 1", f"score, MAE-LM minus MLM, mean of {', '.join(names)}", "0.9 (GLUE)",
        gaps[numbers.tasks].mean(0) if numbers.tasks else np.array([]))
    # Between two checkpoints MAE-LM is on the line between them.
    in_time = [np.interp(mlm[-1, 0], *mae.T) - mlm[-1, 1] for mae, mlm in zip(*numbers.curves)]
    add("Figure 3", "score on docs at the MLM's last FLOPs, MAE-LM minus MLM", "above 0", np.array(in_time))
    return found


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
        if not math.isnan(claim.interval.mean):
            answer = f"**{verdict(claim.interval)}**"
            rows.append([f"{claim.where}: {claim.statement}", claim.paper, claim.interval, answer])
    return table(["above 0 if it holds", "paper", "here", "verdict"], rows)


def details(found: dict) -> str:
    """The long tables, in Markdown: claims by seed, origin, Figure 1, fine-tuning, short runs."""
    numbers = numbers_of(found)
    rows, ranks, tuned = [], [], []
    for claim in claims(numbers):
        if not math.isnan(claim.interval.mean):
            rows.append([claim.where, claim.interval, claim.centered, format_numbers(claim.seeds, digits=1)])
    last = np.moveaxis(numbers.ranks[:, :, 0, :, -1], 1, 2)  # (model, curve, seed, layer), uncentered
    for (name, curve), by_seed in zip(itertools.product(MODELS.values(), CURVES), last.reshape(6, *last.shape[2:])):
        ranks.append([name, curve, *map(format_numbers, by_seed)])
    for task, scores, after in zip(EPOCHS, numbers.scores, numbers.after):
        if not np.isfinite(scores).any():
            continue
        for name, values, tops in zip(MODELS.values(), scores, after[..., 0]):
            tuned.append([task, name, format_numbers(values, digits=1), format_numbers(tops)])
        tuned.append([task, "MAE-LM minus MLM", interval_of(scores[0] - scores[1]), ""])
    losses = {name: job["found"]["losses"][-1][1] for name, job in found.items() if "losses" in job["found"]}
    trained = []
    for model, name in MODELS.items():
        runs = [run for run in sorted(losses) if run.startswith(f"train {model} ")]
        trained.append([name, format_numbers([losses[run] for run in runs], 3)])
    short = [[name, format_numbers([losses[f"short train {name}"]], 3), format_numbers([score], 1)]
             for name, score in zip(SHORT, numbers.short) if np.isfinite(score)]
    hours = sum(job["minutes"] for job in found.values()) / 60
    made = sorted({f"{job['machine']} (commit {job['commit']})" for job in found.values()})
    return "\n\n".join([
        f"{len(found)} jobs, {hours:.1f} hours one after another, on {', '.join(made)}. All commands: evidence.json.",
        table(["", "validation loss, by seed"], trained),
        "The claims of docs/results.md, each a number that is above 0 if it holds:",
        table(["", "mean (95 % interval)", "with centered ranks", "by seed"], rows),
        "Figure 1, rank_0.9 at layers 0 to L of the last checkpoint:",
        table(["", "", *[f"seed {seed}" for seed in range(last.shape[2])]], ranks),
        f"Fine-tuning, medians of {TUNED} seeds without those that diverged:",
        table(["task", "", "score, by pre-training seed", "rank_0.9 of H^L afterwards"], tuned),
        f"Short runs, one seed, medians of {TUNED} fine-tuning seeds (delta 0 is `mae-lm`, 1 is `enc-mask`):",
        table(["", "validation loss", "score on docs"], short)]) + "\n"


def draw(numbers: Numbers, path: Path) -> None:
    """The figure, a panel for each question. Markers are those of rank.png."""
    answer = {claim.where: verdict(claim.interval) for claim in claims(numbers)}
    after = [answer[f"Table 3, {TASKS[task]}"] for task in numbers.tasks]
    with figure(path, panels=3) as (_, (layers, tuned, sweep)):
        for m, name in enumerate(MODELS.values()):
            style = {"color": f"C{m}", "alpha": 0.6, "markersize": 4}
            ranks = numbers.ranks[m, :, 0]  # (seed, curve, checkpoint, layer)
            for curve, (_, line, _) in enumerate(LINES.values()):
                layers.plot(ranks[:, curve, -1].T, line, **style)
            tops = [ranks[:, WITHOUT, -1, -1], *numbers.after[numbers.tasks, m, :, 0]]  # (task, seed)
            tuned.plot(tops, "s", **style)
            for axis in (layers, tuned):
                axis.plot([], [], "s", color=style["color"], label=name)
        for _, line, label in LINES.values():
            layers.plot([], [], line, color="gray", markersize=4, label=label)
        for axis in (layers, tuned):
            axis.legend(fontsize="small")
        sweep.plot([float(delta) for delta in DELTAS], numbers.short[:len(DELTAS)], "o-")
        layers.xaxis.get_major_locator().set_params(integer=True)
        layers.set(xlabel="layer (0 = embeddings)", ylabel="rank_0.9",
                   title=f"Figure 1: a {answer['Figure 1a']}, b {answer['Figure 1b']}")
        tuned.set_xticks(range(len(tops)), ["before", *[TASKS[task] for task in numbers.tasks]])
        tuned.set(xlabel="fine-tuned on", ylabel="rank_0.9 of H^L, text without [MASK]",
                  title=f"Table 3: {answer['Table 3']}; fine-tuned, {after.count('shown')} of {len(after)} shown")
        sweep.set(xlabel="delta: share of [MASK] that the encoder reads", ylabel="score on docs",
                  title="Figure 4: does [MASK] hurt? (one seed)")


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
    draw(numbers_of(found), picture)
    print(f"{len(found)} jobs recorded: {page}, {picture}")


# ---- 6. Command line ----------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> None:
    parser = Parser("bench.evidence", __doc__)
    add = parser.add_argument
    add("--data", help="text for pre-training")
    add("--glue", help="folder of GLUE's files, or hub")
    add("--hours", type=float, default=1000.0, help="end after so many [when all is done]")
    add("--at-once", type=int, default=1, help="jobs at a time: one for each core [1]")
    add("--preset", default="laptop", choices=TRAIN_PRESETS, help="of all runs [laptop]")
    add("--steps", type=int, help="of the main runs [the preset's]")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of pre-training [0 1 2]")
    add("--only", nargs="+", metavar="JOB", help="jobs that begin with these words: rank docs 'train mlm'")
    add("--learning-rate", type=float, default=4e-4, help="of fine-tuning [4e-4]")
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
