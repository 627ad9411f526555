"""The evidence of docs/evidence.md: what a laptop can check of the paper's six claims, with seeds and intervals.

    python bench/evidence.py --data TEXT --glue DIR --hours 3   # pre-train, measure, fine-tune; the same again goes on
    python bench/evidence.py --data TEXT --glue DIR --report    # ... and tables and a figure of what there is
    python bench/evidence.py --preset toy --data docs --docs-epochs 5 --learning-rate 8e-4 --seeds 1 \
        --only train rank docs --out out/day --report
    python bench/evidence.py --report                           # docs/evidence.md, from the project's own record

TEXT is what `train.py --data` takes, DIR has the files of GLUE's original releases (`hub`: they come from the Hub;
without --glue only the `docs` task is fine-tuned). Each job is a command of this project. When one ends, its results
are added to the record, evidence.json in --out, and it is not run again. After --hours the jobs in progress are told to
stop, and continue next time. One job for each core, --at-once, makes more of them than one job with many threads. The
third command is a quarter of an hour for a lecture: its tables and figure are out/day/evidence.md and .png.
"""
import argparse
import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import finetune  # noqa: E402
from cpu import commit, cpu_name, table  # noqa: E402
from files import (  # noqa: E402
    Parser,
    UserError,
    append_line,
    atomic,
    claim_folder,
    clear_errors,
    read_json,
    read_lines,
    write_json,
)
from rank import CENTERINGS, CURVES  # noqa: E402
from run import checkpoint_path, figure, read_log, step_of  # noqa: E402
from train import TRAIN_PRESETS, TrainConfig  # noqa: E402

RECORD = HERE / "results" / "evidence.json"
PAGE = HERE.parent / "docs" / "evidence.md"
MODELS = {"mae-lm": "MAE-LM", "mlm": "MLM"}
SEEDS = 3  # of pre-training
KEPT = 6  # so many checkpoints of a run are measured, evenly spaced, the last one at its end
EACH = 2  # of these, every second one is fine-tuned for Figure 3
TUNED = 5  # fine-tuning seeds
CURVE_TUNED = 2  # those of each checkpoint of Figure 3
SHORT_TUNED = 3  # those of short runs
# How all encoders are fine-tuned alike, on docs and the sets of GLUE that a laptop tunes in minutes: chosen on training
# parts alone, docs/results.md.
RATE = 4e-4
EPOCHS = {"docs": 30.0, "cola": 3.0, "mrpc": 3.0, "rte": 3.0, "stsb": 3.0, "sst2": 1.0}  # docs: never read before
ANATOMY = ("identity", "attention", "ffn")  # of rank.anatomy
PAUSE = 1.0  # seconds between looks at the jobs in progress
# Short runs, a fifth of the steps with one seed: the sweep of Figure 4 and the first group of Table 2, name -> flags.
DELTAS = {f"delta {delta}": ["--mask-in-encoder", delta] for delta in ("0", "0.25", "0.5", "0.75", "1")}
GROUP = {name: ["--ablation", name] for name in ("mlm", "enc-mask-dec-resets", "random-replace")}


# ---- 1. The jobs ----------------------------------------------------------------------------------------------
class Job(NamedTuple):
    """A command, and how its results are read from the folder that it leaves."""
    name: str
    command: list[str]  # a program and its flags
    folder: Path
    read: Callable[[Path], dict]
    needs: tuple[str, ...] = ()  # the jobs that must have ended before

    @property
    def line(self) -> str:
        """The command, as it is recorded."""
        return " ".join(self.command)


def read_training(folder: Path) -> dict:
    """The validation losses of a run, and its time: in all, and its median of a step, which neither pauses nor what
    else the machine did at times have a part in."""
    log = read_log(folder)
    lines = [line for line in log if "loss" in line]
    start = {"step": 0, "seconds": 0.0}  # the first interval is the only one of a very short run
    intervals = itertools.pairwise(lines if len(lines) > 1 else [start, *lines])
    paces = [(b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in intervals]
    losses = [[line["step"], round(line["val_loss"], 4)] for line in log if "val_loss" in line]
    entropy = next(line["unigram_entropy"] for line in log if "unigram_entropy" in line)
    return {"losses": losses, "unigram_entropy": round(entropy, 4), "seconds": round(log[-1]["seconds"]),
            "seconds_per_step": statistics.median(paces)}


def read_ranks(folder: Path) -> dict:
    """Step -> by layer rank_0.9 of each curve and centring, and what the layers hold."""
    found = {}
    for name, model in read_json(folder / "rank.json", {"models": dict})["models"].items():
        layers = []
        for layer, anatomy in zip(model["layers"], model["anatomy"]):
            ranks = {}
            for centering, curves in layer.items():
                ranks[centering] = {curve: measures["0.9"] for curve, measures in curves.items()}
            layers.append(ranks | {"anatomy": anatomy})
        found[step_of(Path(name))] = {"d": model["d"], "n": model["n"], "layers": layers}
    return {str(step): found[step] for step in sorted(found)}


def read_tuning(folder: Path) -> dict:
    """The values of the fine-tuning seeds and their ranks."""
    result = read_json(folder / "result.json", {"task": str})
    return {name: result[name] for name in ("metric", "median", "values", "keep", "setting", "effective_rank")}


def read_figure3(folder: Path) -> dict:
    """The curves of Figure 3: model -> step, score and rank after fine-tuning of its checkpoints."""
    found = read_json(folder / "figure3.json", {"points": list})
    curves = {}
    for point in found["points"]:
        curves.setdefault(model_of(point["run"]), []).append({
            "step": step_of(Path(point["checkpoint"])), "median": point["median"], "rank": point["rank"]["uncentered"]})
    return curves


def model_of(folder: str) -> str:
    """The model of a run's folder, train-MODEL-SEED."""
    return Path(folder).name.removeprefix("train-").rpartition("-")[0]


def jobs(options: argparse.Namespace) -> list[Job]:
    """All jobs, the most important first."""
    out, found = options.out, []
    recipe = TrainConfig(**TRAIN_PRESETS[options.preset])
    steps = options.steps or recipe.max_steps
    tasks = list(EPOCHS) if options.glue else ["docs"]

    def setting(task: str) -> list[str]:
        epochs = options.docs_epochs if task == "docs" else EPOCHS[task]
        flags = ["--task", task, "--epochs", str(epochs), "--learning-rate", str(options.learning_rate)]
        return flags if task == "docs" or options.glue == "hub" else [*flags, "--data", options.glue]

    def add(name: str, command: list[str], read: Callable[[Path], dict], *needs: str) -> Path:
        folder = out / name.replace(" ", "-")
        found.append(Job(name, [*command, "--out", str(folder)], folder, read, needs))
        return folder

    def train(name: str, flags: list[str], steps: int) -> Path:
        command = ["train.py", "--preset", options.preset, "--data", options.data, *flags]
        if steps != recipe.max_steps:
            warmup = round(recipe.warmup_steps * steps / recipe.max_steps)
            command += ["--max-steps", str(steps), "--warmup-steps", str(warmup)]
        return add(name, command, read_training)

    def tune(name: str, init: Path, task: str, seeds: int, needs: str) -> None:
        add(name, ["finetune.py", "--init", str(init), *setting(task), "--seeds", str(seeds)], read_tuning, needs)

    runs, checkpoints = {}, {}
    interval = max(1, steps // KEPT)
    kept = ["--checkpoint-interval", str(interval), "--keep-checkpoints", "0"]
    # Both models of a seed before the next seed: whenever this ends, there are pairs to compare.
    for seed, model in itertools.product(range(options.seeds), MODELS):
        run = f"{model} {seed}"
        folder = train(f"train {run}", ["--ablation", model, "--seed", str(seed), *kept], steps)
        measured = [*range(interval, steps, interval)][:KEPT - 1] + [steps]
        runs[run], checkpoints[run] = folder, [str(checkpoint_path(folder, step)) for step in measured]
    for run, paths in checkpoints.items():
        add(f"rank {run}", ["rank.py", *paths, "--tokens", "300000"], read_ranks, f"train {run}")
    for task, (run, folder) in itertools.product(tasks, runs.items()):
        tune(f"{task} {run}", folder, task, TUNED, f"train {run}")
    for seed in range(options.seeds):
        both = [f"{model} {seed}" for model in MODELS]
        paths = [path for run in both for path in checkpoints[run][EACH - 1::EACH]]
        add(f"figure3 {seed}", ["finetune.py", "--figure3", *paths, *setting("docs"), "--seeds", str(CURVE_TUNED)],
            read_figure3, *[f"train {run}" for run in both])
    for name, flags in {**DELTAS, **GROUP}.items():
        folder = train(f"short train {name}", flags, steps // 5)
        tune(f"short docs {name}", folder, "docs", SHORT_TUNED, f"short train {name}")
    if options.only:
        found = [job for job in found if any(f"{job.name} ".startswith(f"{words} ") for words in options.only)]
    return found


# ---- 2. Running them --------------------------------------------------------------------------------------------
class Running(NamedTuple):
    """A job in progress."""
    job: Job
    process: subprocess.Popen
    start: float
    commit: str  # when it began


def beside(job: Job, suffix: str) -> Path:
    """A file of the job, next to its folder: .log has what it prints, .jsonl each time that it was started."""
    return job.folder.with_name(job.folder.name + suffix)


def start(job: Job, threads: int) -> Running:
    """Start a job."""
    program, *flags = job.command
    with open(beside(job, ".log"), "a") as log:
        process = subprocess.Popen([sys.executable, str(HERE.parent / program), *flags], stdout=log, stderr=log,
                                   env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    print(f"{time.strftime('%H:%M')}  {job.name}: {job.line}", flush=True)
    return Running(job, process, time.monotonic(), commit())


def recorded(path: Path) -> dict:
    """The results so far, job -> what it found."""
    return read_json(path, {"jobs": dict})["jobs"] if path.is_file() else {}


def close(running: Running, threads: int) -> list[dict]:
    """Note that a program has ended, well or not. Returns the notes of the job: of each time that it was started."""
    notes = beside(running.job, ".jsonl")
    append_line(notes, {"commit": running.commit, "machine": f"{cpu_name()}, {threads} thread(s)",
                        "minutes": (time.monotonic() - running.start) / 60})
    return read_lines(notes)


def record(running: Running, threads: int, path: Path) -> None:
    """Add the results of a job that has ended well."""
    job, notes = running.job, close(running, threads)
    found = {"command": job.line, "found": job.read(job.folder),
             "minutes": round(sum(note["minutes"] for note in notes), 1)}
    for name in ("commit", "machine"):
        found[name] = ", ".join(dict.fromkeys(note[name] for note in notes))
    write_json(path, {"jobs": recorded(path) | {job.name: found}})


def refuse_others(todo: list[Job], path: Path) -> None:
    """UserError if a job of this name is recorded that was another command: its result is another experiment's."""
    done = recorded(path)
    for job in todo:
        if job.name in done and done[job.name]["command"] != job.line:
            raise UserError(f"{path}: '{job.name}' is recorded as\n  {done[job.name]['command']}\nand would now be\n"
                            f"  {job.line}\nGive the same flags, or another --record and --out")


def next_job(todo: list[Job], running: list[Running], done: dict) -> Job | None:
    """The first job that can start: not done, not in progress, and what it needs is done."""
    at_it = [one.job.name for one in running]
    for job in todo:
        if job.name not in done and job.name not in at_it and all(need in done for need in job.needs):
            return job
    return None


def run_jobs(todo: list[Job], options: argparse.Namespace) -> list[str]:
    """Run what is not recorded, --at-once at a time, for at most --hours. Returns the jobs that failed; this command
    does not try them again. UserError if the record is another experiment's."""
    refuse_others(todo, options.record)
    end = time.monotonic() + 3600 * options.hours
    threads = max(1, (os.cpu_count() or 1) // options.at_once)
    running, failed = [], []
    try:
        while time.monotonic() < end:
            while len(running) < options.at_once and (job := next_job(todo, running, recorded(options.record))):
                running.append(start(job, threads))
            if not running:
                return failed
            time.sleep(PAUSE)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                if one.process.returncode == 0:
                    record(one, threads, options.record)
                else:
                    close(one, threads)
                    todo.remove(one.job)
                    failed.append(one.job.name)
                    log = beside(one.job, ".log")
                    said = log.read_text(encoding="utf-8", errors="replace").splitlines() or ["nothing"]
                    print(f"{one.job.name} failed: {said[-1]}\n  all that it said: {log}", flush=True)
        print("the time is up: the same command continues")
        return failed
    finally:  # also after Ctrl-C: every program of this project saves what it has
        for one in running:
            one.process.send_signal(signal.SIGTERM)
        for one in running:
            one.process.wait()
            close(one, threads)


# ---- 3. The six claims ------------------------------------------------------------------------------------------
ROUNDING = (1 / 12) ** 0.5  # standard deviation of what rounding a rank to a whole number has changed
# 97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom. The last one serves all beyond.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
     2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
MOST = 100  # seeds that anybody would train


class Interval(NamedTuple):
    """A mean, and the ends of its 95 % confidence interval."""
    mean: float
    low: float
    high: float
    decided: int | None = None  # by so many seeds if mean and spread stay as they are; None: by no number up to MOST


class Claim(NamedTuple):
    """A statement as a number that is above 0 if it holds."""
    where: str
    statement: str
    paper: str  # its number, or OURS
    seeds: list[float | None]  # the number for each pre-training seed; None: not measured, or all diverged
    interval: Interval | None  # None: not measured yet
    centered: Interval | None = None  # the same of centred ranks


OURS = "ours, no claim of the paper"


def interval_of(mean: float, spread: float, n: int, freedom: Callable[[int], int]) -> Interval:
    """The interval of a mean by Student's t: spread, the standard deviation of one of n seeds; freedom, n -> degrees of
    freedom."""
    def half(n: int) -> float:
        if freedom(n) == 0:
            return float("inf")
        return T[min(freedom(n), len(T)) - 1] * spread / n ** 0.5

    decided = next((more for more in range(n, MOST + 1) if half(more) < abs(mean)), None)
    return Interval(mean, mean - half(n), mean + half(n), decided)


def over_seeds(values: list[float | None], ranks: int = 0) -> Interval | None:
    """The interval of numbers by pre-training seed, each made of so many `ranks`; endless for one seed. Ranks are
    rounded, so that three equal ones are not certain."""
    measured = there(values)
    if not measured:
        return None
    spread = 0.0
    if len(measured) > 1:
        spread = max(statistics.stdev(measured), ranks ** 0.5 * ROUNDING)
    return interval_of(statistics.mean(measured), spread, len(measured), lambda n: n - 1)


def verdict(interval: Interval | None) -> str:
    """shown: all of the interval is above 0; not shown: all of it is below; else undecided, and what would decide."""
    if interval is None:
        return "not measured, or diverged"
    if interval.low > 0:
        return "**shown**"
    if interval.high < 0:
        return "**not shown**: it is the other way round"
    if interval.high == float("inf"):
        return "**undecided** at this scale: one seed has no interval"
    seeds = f"more than {MOST}" if interval.decided is None else f"at least {interval.decided}"
    return f"**undecided** at this scale: {seeds} seeds would decide, if mean and spread stay"


def seeds_of(found: dict) -> range:
    """The pre-training seeds of a record, from 0."""
    seeds = [int(job.split()[-1]) for job in found if job.startswith("train ")]
    return range(max(seeds, default=-1) + 1)


def by_seed(found: dict, names: tuple[str, ...], number: Callable[..., object]) -> list:
    """number(result of names[0], ...) for each seed, None where one is missing, up to the last seed that has them."""
    values = []
    for seed in seeds_of(found):
        results = [found.get(f"{name} {seed}") for name in names]
        missing = None in results
        values.append(None if missing else number(*[result["found"] for result in results]))
    while values and values[-1] is None:
        values.pop()
    return values


def there(values: list) -> list:
    """The values of the seeds that have one."""
    return [value for value in values if value is not None]


def last(ranks: dict) -> list[dict]:
    """The layers of a run's last checkpoint."""
    return ranks[max(ranks, key=int)]["layers"]


def rank_at(ranks: dict, layer: int, centering: str, curve: str = "without_mask") -> int:
    """rank_0.9 of a layer of a run's last checkpoint: 0 the embeddings, -1 the top."""
    return last(ranks)[layer][centering][curve]


def rise(ranks: dict, centering: str) -> int:
    """Rank_0.9 of [MASK] alone at the top, minus that at the embeddings."""
    return rank_at(ranks, -1, centering, "mask_only") - rank_at(ranks, 0, centering, "mask_only")


def masks_add(ranks: dict, centering: str) -> int:
    """Rank_0.9 of the top for text with [MASK], minus that without."""
    return rank_at(ranks, -1, centering, "with_mask") - rank_at(ranks, -1, centering)


def rank_after(tuned: dict, centering: str = "uncentered") -> float:
    """The median over seeds of rank_0.9 of H^L after fine-tuning."""
    return finetune.rank_after(tuned["effective_rank"], centering)


def pair(task: str) -> tuple[str, ...]:
    """The jobs of a task, but for their seeds."""
    return tuple(f"{task} {model}" for model in MODELS)


def lead(mae: dict, mlm: dict) -> float | None:
    """Score of MAE-LM minus MLM; None if all fine-tuning seeds of one diverged."""
    if mae["median"] is None or mlm["median"] is None:
        return None
    return mae["median"] - mlm["median"]


def rank_lead(mae: dict, mlm: dict, centering: str = "uncentered") -> float:
    """Rank of MAE-LM minus MLM after fine-tuning."""
    return rank_after(mae, centering) - rank_after(mlm, centering)


def tasks_of(found: dict) -> list[str]:
    """The tasks that all pre-training seeds have scores of: means over tasks are of the same tasks for each seed."""
    trained = by_seed(found, pair("train"), lambda mae, mlm: 0.0)
    tasks = []
    for task in EPOCHS:
        ahead = by_seed(found, pair(task), lead)
        if ahead and [value is None for value in ahead] == [value is None for value in trained]:
            tasks.append(task)
    return tasks


def gains(found: dict) -> list[float | None]:
    """Score of MAE-LM minus MLM, the mean over tasks, of each pre-training seed."""
    by_task = [by_seed(found, pair(task), lead) for task in tasks_of(found)]
    return [None if None in ahead else statistics.mean(ahead) for ahead in zip(*by_task)]


def timed(curves: dict, mae: dict, mlm: dict) -> dict:
    """The curves of Figure 3 with hours of pre-training: steps at the median pace of their runs."""
    found = {}
    for model, run in zip(MODELS, (mae, mlm)):
        found[model] = [point | {"hours": point["step"] * run["seconds_per_step"] / 3600} for point in curves[model]]
    return found


def figure3_of(found: dict) -> list[dict | None]:
    """The curves of Figure 3 by seed."""
    return by_seed(found, ("figure3", *pair("train")), timed)


def ahead_in_time(curves: dict) -> float | None:
    """Score of MAE-LM minus MLM at the hour at which MLM ends: above 0 if MAE-LM has MLM's last score sooner than MLM
    itself. Between two of its checkpoints MAE-LM is on the line between them."""
    mae = [point for point in curves["mae-lm"] if point["median"] is not None]
    end = curves["mlm"][-1]
    if not mae or end["median"] is None:
        return None
    ours = np.interp(end["hours"], [point["hours"] for point in mae], [point["median"] for point in mae])
    return float(ours) - end["median"]


def fall(found: dict) -> Interval | None:
    """How much the score falls from delta 0 to 1, by the line through Figure 4's points, with its 95 % interval."""
    names = [f"short docs {name}" for name in DELTAS]
    if not all(name in found for name in names):
        return None
    x = [float(name.split()[-1]) for name in names]
    y = [found[name]["found"]["median"] for name in names]
    if None in y:
        return None
    slope, intercept = statistics.linear_regression(x, y)
    squares = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y))
    width = sum((a - statistics.mean(x)) ** 2 for a in x)
    error = (squares / (len(x) - 2) / width) ** 0.5  # of the slope
    return interval_of(-slope, error, 1, lambda seeds: seeds * len(x) - 2)


def of_ranks(found: dict, names: tuple[str, ...], ranks: int, number: Callable[..., float]) -> tuple:
    """The last fields of a claim that is number(*results of names, centering), made of so many `ranks`."""
    def values(centering: str) -> list[float | None]:
        return by_seed(found, names, lambda *results: number(*results, centering))

    uncentered = values("uncentered")
    return uncentered, over_seeds(uncentered, ranks), over_seeds(values("centered"), ranks)


def of_scores(values: list[float | None]) -> tuple:
    """The last fields of a claim about numbers that are not rounded."""
    return values, over_seeds(values)


def claims(found: dict) -> list[Claim]:
    """The paper's claims, and three comparisons of ours, on what is recorded."""
    mlm, both = ("rank mlm",), pair("rank")
    rows = [
        Claim("Figure 1a", "MLM, top layer: rank of text with `[MASK]`, minus without", "above 0",
              *of_ranks(found, mlm, 2, masks_add)),
        Claim("", "the same, minus MAE-LM's, whose encoder never reads `[MASK]` in training", OURS,
              *of_ranks(found, both, 4, lambda mae, mlm, by: masks_add(mlm, by) - masks_add(mae, by))),
        Claim("Figure 1b", "MLM: rank of `[MASK]` alone, at the top minus at the embeddings", "above 0",
              *of_ranks(found, mlm, 2, rise)),
        Claim("", "the same, minus MAE-LM's", OURS,
              *of_ranks(found, both, 4, lambda mae, mlm, by: rise(mlm, by) - rise(mae, by))),
        Claim("Table 3", "rank without `[MASK]` at the top, MAE-LM minus MLM", "491 - 462 = 29, of 768",
              *of_ranks(found, both, 2, lambda mae, mlm, by: rank_at(mae, -1, by) - rank_at(mlm, -1, by))),
        Claim("", "the same one layer below the top, added after the first runs", OURS,
              *of_ranks(found, both, 2, lambda mae, mlm, by: rank_at(mae, -2, by) - rank_at(mlm, -2, by))),
    ]
    tasks = tasks_of(found)
    for task in tasks:
        rows.append(Claim("Table 3", f"that of the top after fine-tuning on {task}", "MNLI 62, SQuAD 157, of 768",
                          *of_ranks(found, pair(task), 2, rank_lead)))
    rows += [
        Claim("Table 1", f"score of MAE-LM minus MLM at equal steps, mean over {', '.join(tasks) or 'tasks'}, points",
              "GLUE 86.1 - 85.2 = 0.9", *of_scores(gains(found))),
        Claim("Figure 3", "score of MAE-LM on docs at the hour at which MLM ends, minus MLM's, points", "MAE-LM has "
              "MLM's last score after 40 % of its time",
              *of_scores([curves and ahead_in_time(curves) for curves in figure3_of(found)])),
        Claim("Figure 4", "fall of the score on docs from delta 0 to 1, points, along the straight line through five "
              "deltas (one seed, a fifth of the steps)", "above 0", [], fall(found)),
    ]
    return rows


# ---- 4. The page ------------------------------------------------------------------------------------------------
def in_print(interval: Interval | None) -> str:
    """A mean with its interval, for print."""
    if interval is None:
        return "-"
    ends = "one seed" if interval.high == float("inf") else f"{interval.low:.1f} to {interval.high:.1f}"
    return f"{interval.mean:.1f} ({ends})"


def over(values: list[float | None], digits: int = 0) -> str:
    """The values of seeds, or of layers, for print; - where there is none."""
    return ", ".join("-" if value is None else f"{value:.{digits}f}" for value in values)


def verdicts(found: dict) -> str:
    """The table of claims."""
    head = ["", "the number that is above 0 if it holds", "paper", "here: mean (95 % interval)", "of centred ranks",
            "by seed", "verdict"]
    rows = []
    for claim in claims(found):
        said = "-" if claim.paper == OURS else verdict(claim.interval)
        rows.append([claim.where, claim.statement, claim.paper, in_print(claim.interval), in_print(claim.centered),
                     over(claim.seeds, digits=1), said])
    return table(head, rows)


def training_table(found: dict) -> str:
    """The last validation loss of each run, and its minutes, over all commands that went on with it; and how much
    longer a step of MAE-LM takes."""
    rows = []
    for model, name in MODELS.items():
        losses = by_seed(found, (f"train {model}",), lambda run: run["losses"][-1][1])
        minutes = by_seed(found, (f"train {model}",), lambda run: run["seconds"] / 60)
        rows.append([name, over(losses, digits=3), over(minutes)])
    pace = by_seed(found, pair("train"), lambda mae, mlm: mae["seconds_per_step"] / mlm["seconds_per_step"])
    rows.append(["a step of MAE-LM / of MLM", "", over(pace, digits=2)])
    return table(["", "validation loss, by seed", "minutes"], rows)


def rank_table(found: dict) -> str:
    """Figure 1 in numbers: rank_0.9 by layer of the last checkpoints."""
    rows = []
    for model, centering, curve in itertools.product(MODELS, CENTERINGS, CURVES):
        row = [MODELS[model], centering, curve]
        for run in by_seed(found, (f"rank {model}",), last):
            row.append(over([layer[centering][curve] for layer in run or []]))
        rows.append(row)
    return table(["", "", "", *[f"seed {seed}" for seed in seeds_of(found)]], rows)


def tops_over_time(ranks: dict) -> dict[int, int]:
    """Step -> rank_0.9 of H^L without [MASK], at each checkpoint of a run."""
    return {int(step): ranks[step]["layers"][-1]["uncentered"]["without_mask"] for step in ranks}


def time_table(found: dict) -> str:
    """Table 3 over training time: rank_0.9 of H^L, before fine-tuning and after it on docs from each checkpoint."""
    rows, steps = [], set()
    for model, name in MODELS.items():
        before = there(by_seed(found, (f"rank {model}",), tops_over_time))
        after = [{point["step"]: point["rank"] for point in curves[model] if point["rank"] is not None}
                 for curves in there(figure3_of(found))]
        for when, runs in (("before", before), ("after", after)):
            steps = steps.union(*runs)
            rows.append((name, when, runs))
    steps = sorted(steps)
    cells = []
    for name, when, runs in rows:
        cells.append([name, when, *[over([run[step] for run in runs if step in run]) for step in steps]])
    return table(["", "fine-tuning", *[f"{step:,}" for step in steps]], cells)


def anatomy_table(found: dict) -> str:
    """What the layers of the last checkpoints are made of."""
    rows = []
    for model, what in itertools.product(MODELS, ANATOMY):
        row = [MODELS[model], what]
        for run in by_seed(found, (f"rank {model}",), last):
            row.append(over(there([layer["anatomy"][what] for layer in run or []]), digits=2))
        rows.append(row)
    return table(["", "", *[f"seed {seed}" for seed in seeds_of(found)]], rows)


def tuning_table(found: dict) -> str:
    """Scores and ranks after fine-tuning."""
    rows = []
    for task in EPOCHS:
        for model, name in MODELS.items():
            medians = by_seed(found, (f"{task} {model}",), lambda tuned: tuned["median"])
            after = by_seed(found, (f"{task} {model}",), rank_after)
            if medians:
                rows.append([task, name, over(medians, digits=1), over(after)])
        if ahead := by_seed(found, pair(task), lead):
            rows.append([task, "MAE-LM minus MLM", in_print(over_seeds(ahead)), ""])
    return table(["task", "", "score, by pre-training seed", "rank afterwards"], rows)


def hours_table(found: dict) -> str:
    """Figure 3 in numbers: when has a run MLM's last score, in the time of MLM's run?"""
    rows = []
    for seed, curves in enumerate(figure3_of(found)):
        if curves is None:
            continue
        for model, name in MODELS.items():
            share = finetune.share_of_time(curves[model], curves["mlm"])
            rows.append([name, str(seed), over([point["median"] for point in curves[model]], digits=1),
                         over([60 * point["hours"] for point in curves[model]]),
                         "never" if share is None else f"{share:.0%}"])
    return table(["", "seed", "score on docs", "minutes", "MLM's last score first after, of MLM's time"], rows)


def short_table(found: dict) -> str:
    """Figure 4 and the first group of Table 2."""
    rows = []
    for name in (*DELTAS, *GROUP):
        if f"short docs {name}" in found:
            tuned = found[f"short docs {name}"]["found"]
            loss = found[f"short train {name}"]["found"]["losses"][-1][1]
            ranks = [tuned["effective_rank"]["before"]["uncentered"], rank_after(tuned)]
            rows.append([name, f"{loss:.3f}", over([tuned["median"]], digits=1), over(ranks)])
    return table(["", "validation loss", "score on docs", "rank at the top before, after"], rows)


def origin(found: dict) -> str:
    """Where the numbers come from. The seconds of a run are from its log: older records have the minutes of the last
    command alone that went on with it."""
    machines = sorted({job["machine"] for job in found.values()})
    commits = sorted({one for job in found.values() for one in job["commit"].split(", ")})
    seconds = [job["found"].get("seconds", 60 * job["minutes"]) for job in found.values()]
    return (f"{len(found)} jobs, {sum(seconds) / 3600:.0f} hours one after another, on {', '.join(machines)}; "
            f"commits {', '.join(commits)}.")


def tables(found: dict) -> str:
    """All tables of the page, in Markdown."""
    return "\n\n".join([
        verdicts(found),
        origin(found),
        "Pre-training:", training_table(found),
        "Figure 1, rank_0.9 at layers 0 to L of the last checkpoint:", rank_table(found),
        "Table 3 over time, rank_0.9 of H^L at each step, by seed:", time_table(found),
        "What layers 0 to L are made of: `identity`, the share of their variance that the tokens alone explain, and "
        "the mean squares that attention and FFN of layers 1 to L write:", anatomy_table(found),
        f"Fine-tuning, medians of {TUNED} seeds, less those that diverged:", tuning_table(found),
        f"Figure 3, medians of {CURVE_TUNED} seeds of fine-tuning from each checkpoint:", hours_table(found),
        f"Shorter runs, one seed, medians of {SHORT_TUNED} seeds of fine-tuning (delta 0: `mae-lm`, 1: `enc-mask`):",
        short_table(found)])


def word(found: dict, where: str, task: str = "") -> str:
    """The verdict on a claim of the paper in one or two words, for the title of a panel."""
    intervals = [claim.interval for claim in claims(found) if claim.where == where and claim.statement.endswith(task)]
    said = verdict(intervals[0] if intervals else None)
    return re.match("[a-z ]+", said.replace("*", ""))[0].removesuffix(" at this scale")


def draw(found: dict, path: Path) -> None:
    """The page of figures, a panel for each claim: Figure 1, Table 3 over time and after fine-tuning on each task,
    Table 1, Figures 3 and 4."""
    with figure(path, panels=3, rows=2) as (_, ((layers, before, after), (downstream, times, sweep))):
        for number, (model, name) in enumerate(MODELS.items()):
            style = {"color": f"C{number}", "alpha": 0.7}
            for ranks in there(by_seed(found, (f"rank {model}",), lambda ranks: ranks)):
                for curve, line in (("without_mask", "o-"), ("with_mask", "s--"), ("mask_only", "^:")):
                    if model == "mlm" or curve == "without_mask":  # MAE-LM never reads [MASK]
                        layers.plot([layer["uncentered"][curve] for layer in last(ranks)], line, **style)
                tops = tops_over_time(ranks)
                before.plot(list(tops), list(tops.values()), "o-", **style)
            for curves in there(figure3_of(found)):
                hours, medians = [[point[name] for point in curves[model]] for name in ("hours", "median")]
                times.plot(hours, medians, "o-", **style)
            for axis in (layers, before, times):
                axis.plot([], [], color=style["color"], label=name)
                axis.legend(fontsize="small")
        tasks = tasks_of(found)
        downstream.set_yscale("symlog", linthresh=5)  # one encoder can be far ahead
        for axis, number in ((after, rank_lead), (downstream, lead)):
            for place, task in enumerate(tasks):
                ahead = there(by_seed(found, pair(task), number))
                axis.plot([place] * len(ahead), ahead, "o", color="C2", alpha=0.7)
            axis.axhline(0, color="gray")
            axis.set(xticks=range(len(tasks)), xticklabels=tasks, xlim=(-0.5, max(1, len(tasks)) - 0.5))
        limits = downstream.get_ylim()
        downstream.set(yticks=[-50, -20, -10, -5, 0, 5, 10, 20, 50])
        downstream.yaxis.set_major_formatter("{x:g}")
        downstream.set_ylim(limits)
        done = [name for name in DELTAS if f"short docs {name}" in found]
        sweep.plot([float(name.split()[-1]) for name in done],
                   [found[f"short docs {name}"]["found"]["median"] for name in done], "o-", color="C0")
        layers.set(xlabel="layer: text without [MASK] (o), with (s), [MASK] (^)", ylabel="rank_0.9",
                   title=f"Figure 1: [MASK] adds rank ({word(found, 'Figure 1a')}), rises ({word(found, 'Figure 1b')})")
        layers.xaxis.get_major_locator().set_params(integer=True)
        before.locator_params(axis="x", nbins=5)
        before.set(xlabel="step", ylabel="rank_0.9 of H^L",
                   title=f"Table 3: MAE-LM has more rank ({word(found, 'Table 3')})")
        after.set(xticklabels=[f"{task}\n{word(found, 'Table 3', f'on {task}')}" for task in tasks],
                  ylabel="rank_0.9 of MAE-LM minus MLM", title="... after fine-tuning")
        after.tick_params(axis="x", labelsize="small")
        downstream.set(ylabel="score of MAE-LM minus MLM, points",
                       title=f"Table 1: MAE-LM scores higher ({word(found, 'Table 1')})")
        times.set(xlabel="hours of pre-training", ylabel="score on docs",
                  title=f"Figure 3: MAE-LM is there sooner ({word(found, 'Figure 3')})")
        sweep.set(xlabel="delta: share of [MASK] that the encoder reads", ylabel="score on docs",
                  title=f"Figure 4: [MASK] costs score ({word(found, 'Figure 4')})")


def report(path: Path) -> None:
    """Put the tables of a record between the marks of docs/evidence.md and draw its figure; of another record than the
    project's, write both beside it."""
    found = recorded(path)
    if not found:
        raise UserError(f"{path}: nothing is recorded yet; give --data")
    page, text = path.with_suffix(".md"), "<!-- tables -->\n\n<!-- end of tables -->\n"
    if path.resolve() == RECORD.resolve():
        page, text = PAGE, PAGE.read_text(encoding="utf-8")
    marks = re.compile("(<!-- tables -->\n).*(\n<!-- end of tables -->)", re.DOTALL)
    content = f"![a panel for each claim of the paper]({page.stem}.png)\n\n{tables(found)}"
    with atomic(page) as temporary:
        temporary.write_text(marks.sub(lambda match: match[1] + content + match[2], text), encoding="utf-8")
    draw(found, page.with_suffix(".png"))
    print(f"{len(found)} jobs recorded: {page}, {page.with_suffix('.png')}")


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="bench/evidence.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="text for pre-training")
    parser.add_argument("--glue", help="folder of GLUE's files, or hub")
    parser.add_argument("--hours", type=float, default=1000.0, help="end after so many [when all is done]")
    parser.add_argument("--at-once", type=int, default=1, help="jobs at a time: one for each core [%(default)s]")
    parser.add_argument("--preset", default="laptop", choices=TRAIN_PRESETS, help="of all runs [%(default)s]")
    parser.add_argument("--steps", type=int, help="of the main runs, instead of the preset's")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of pre-training: 0, 1, ... [so many: %(default)s]")
    parser.add_argument("--only", nargs="+", metavar="JOB", help="jobs of these first words: rank docs 'train mlm'")
    parser.add_argument("--learning-rate", type=float, default=RATE,
                        help="of fine-tuning, for all encoders and tasks alike [%(default)s]")
    parser.add_argument("--docs-epochs", type=float, default=EPOCHS["docs"],
                        help="of fine-tuning on docs: 5 are enough if docs was the text of pre-training [%(default)s]")
    parser.add_argument("--out", type=Path, default=Path("out/evidence"), help="for the runs [%(default)s]")
    parser.add_argument("--record", type=Path, help="where results are kept [evidence.json in --out; without --data "
                        "the project's own]")
    parser.add_argument("--report", action="store_true", help="make the tables and the figure from the record")
    options = parser.parse_args(argv)
    if not options.data and not options.report:
        parser.error("give --data TEXT, or --report")
    for flag in ("at_once", "seeds"):
        if getattr(options, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} {getattr(options, flag)}: use 1 or more")
    if not options.record:
        options.record = options.out / "evidence.json" if options.data else RECORD
    failed = []
    with clear_errors("bench/evidence.py"):
        if options.data:
            options.out.mkdir(parents=True, exist_ok=True)
            with claim_folder(options.record.parent, "evidence"):
                failed = run_jobs(jobs(options), options)
        if options.report:
            report(options.record)
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
