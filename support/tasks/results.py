"""The results of fine-tuning: files of runs, medians over seeds, result.json and Table 1.

A run is a dictionary with its `setting` in a sweep, its `seed` and `seconds`, and, for its best checkpoint on the dev
split, the `value` of the task's first metric and all `metrics` in percent, the `ranks` of Table 3, and the `step`. A
diverged run has no value (None), metrics, ranks or step.
"""
import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from support.program.errors import say
from support.program.files import code_hashes, compare, read_json, write_json, write_text
from support.program.worker import Worker
from support.tasks.classification import or_lowest
from support.tasks.task import SWEPT, TuneConfig

FIRST_SEED = 1  # of a result; a sweep uses seed 0
# The code that computes a run. A result never mixes runs of different code.
CODE = ("maelm.py", "rank.py", "finetune.py", "support/model/build.py", "support/model/checkpoints.py",
        "support/model/heads.py", "support/tasks/classification.py", "support/tasks/probe.py", "support/tasks/squad.py",
        "support/tasks/task.py", "support/text/tokenizer.py")


# ---- 1. The folder of a task --------------------------------------------------------------------------------
def wait_for(path: Path) -> dict:
    """Read a JSON file when another process has written it; the wait may be longer than torch.distributed allows."""
    while not path.is_file():
        time.sleep(0.2)
    return read_json(path)


def claim(out: Path, worker: Worker, record: dict):
    """Write a record of the settings and data of runs, and of the code, to `out`. Raises UserError if another one is
    there; the number of seeds may grow, and the encoder may have moved."""
    path, record = out / "config.json", record | code_hashes(*CODE)
    if path.is_file() or not worker.is_main:
        compare(out, wait_for(path), record, may_change=["init"])
    if worker.is_main:
        write_json(path, record)


def path_of_run(out: Path, tune: TuneConfig, seed: int) -> Path:
    """The file of the run with these settings and this seed."""
    name = "-".join(f"{getattr(tune, field):g}" for field in SWEPT)
    return out / "runs" / f"{name}-{seed}.json"


def write_run(out: Path, tune: TuneConfig, seed: int, run: dict, seconds: float) -> dict:
    """Write the file of a run, and return its content. The first seed's prediction files are also written."""
    for name, text in run.pop("files", {}).items():
        if seed == FIRST_SEED:
            write_text(out / name, text)
    setting = {name: getattr(tune, name) for name in SWEPT}
    run = run | {"setting": setting, "seed": seed, "seconds": round(seconds, 2)}
    write_json(path_of_run(out, tune, seed), run)
    return run


# ---- 2. Medians -------------------------------------------------------------------------------------------
def median(values: Iterable[float | None]) -> float | None:
    """The median over seeds. A diverged seed (None) counts as the lowest, so the median may be None."""
    middle = statistics.median([or_lowest(value) for value in values])
    return middle if math.isfinite(middle) else None


# ---- 3. Printed lines ---------------------------------------------------------------------------------------
def format_number(value: float | None, digits: int = 2) -> str:
    """A number as text, or - for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def line_of_run(run: dict, metric: str, left: float) -> str:
    """A run as a line of text; `left` is the time that all other runs will take, in seconds."""
    setting = {"l2": run["l2"]} if "l2" in run else run["setting"]  # of a probe, or of fine-tuning
    listed = "  ".join(f"{name} {value:g}" for name, value in setting.items())
    return (f"{listed}  seed {run['seed']}  {metric} {format_number(run['value'])}  {run['seconds']:.0f} s  "
            f"{timedelta(seconds=round(left))} left")


def report(summary: dict) -> str:
    """result.json in words: the metrics, and Table 3's ranks."""
    ranks = summary["effective_rank"]
    metrics = "  ".join(f"{name} {format_number(value)}" for name, value in summary["metrics"].items())
    values = ", ".join(map(format_number, summary["values"]))
    lines = [f"{summary['task']}  {metrics}  (medians; seeds: {values})"]
    for name, before in (ranks["before"] or {}).items():  # None if the dev split has too few tokens
        after = [after[name] for after in ranks["after"] if after]  # none of a frozen encoder or a diverged run
        change = f"{before} -> {statistics.median(after):.0f}" if after else before
        lines.append(f"effective rank on the dev split, {name}, of {ranks['d']}: {change}")
    return "\n".join(lines)


# ---- 4. result.json, and Table 1 ----------------------------------------------------------------------------
def write_summary(setup, init: str, tune: TuneConfig, sweep: list[dict], runs: list[dict], before: dict | None) -> dict:
    """Write and print result.json: the medians over `runs`, one for each seed with the settings `tune`, the ranks
    `before` fine-tuning and after it (Table 3), and the runs of a sweep. `setup` is a finetune.Setup."""
    metrics = {}
    for name in max([run["metrics"] for run in runs], key=len):  # a diverged run has no metrics
        metrics[name] = median(run["metrics"].get(name) for run in runs)
    values = [run["value"] for run in runs]
    ranks = {"tau": 0.9, "d": setup.pretrained.config.encoder_dim, "before": before,
             "after": [run["ranks"] for run in runs]}
    summary = {
        "task": setup.task, "init": init, "frozen": setup.frozen, "metric": setup.metric, "median": median(values),
        "values": values, "metrics": metrics, "setting": runs[0]["setting"], "steps": [run.get("step") for run in runs],
        "effective_rank": ranks, "tune": asdict(tune), "sweep": sweep}
    write_json(setup.out / "result.json", summary)
    say(report(summary), f"{setup.out}: {', '.join(sorted(path.name for path in setup.out.glob('[!.]*.*')))}")
    return summary


def table1(summaries: list[dict], out: Path):
    """Print and write a row of Table 1: the medians of GLUE's tasks, and their average if every task has a median."""
    medians = {summary["task"]: summary["median"] for summary in summaries}
    average = None if None in medians.values() else statistics.mean(medians.values())
    write_json(out / "result.json", {"task": "glue", "average": average, "medians": medians, "results": summaries})
    say("  ".join(f"{task} {format_number(value, 1)}" for task, value in (medians | {"average": average}).items()))
