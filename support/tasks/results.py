"""The results of fine-tuning: files of runs, medians over seeds, result.json and Table 1.

A run is a dictionary with its `setting` in a sweep, its `seed` and `seconds`, and, for its best checkpoint on the dev
split, the `value` of the task's first metric and all `metrics` in percent, the `ranks` of Table 3, and the `step`. A
diverged run has no value (None), metrics, ranks or step.
"""
import math
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

from support.program.cli import say
from support.program.files import read_json, write_json
from support.tasks.table1 import SWEPT


def path_of_run(out: Path, tune, seed: int) -> Path:
    """The file of the run with this TuneConfig and seed."""
    name = "-".join(f"{getattr(tune, field):g}" for field in SWEPT)
    return out / "runs" / f"{name}-{seed}.json"


def wait_for(path: Path) -> dict:
    """Read a JSON file when another process has written it; the wait may be longer than torch.distributed allows."""
    while not path.is_file():
        time.sleep(0.2)
    return read_json(path)


def height(value: float | None) -> float:
    """A value as a number for comparisons; None (a diverged run) is the lowest."""
    return -math.inf if value is None else value


def median(values: Iterable[float | None]) -> float | None:
    """The median over seeds. A diverged seed (None) counts as the lowest, so the median may be None."""
    middle = statistics.median([height(value) for value in values])
    return middle if math.isfinite(middle) else None


def format_number(value: float | None, digits: int = 2) -> str:
    """A number as text, or - for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def summarize(runs: list[dict], before: dict[str, int], dim: int) -> dict:
    """The part of result.json about the runs of all seeds. `before` has the ranks before fine-tuning (Table 3)."""
    metrics = {}
    for name in max([run["metrics"] for run in runs], key=len):  # a diverged run has no metrics
        metrics[name] = median(run["metrics"].get(name) for run in runs)
    values = [run["value"] for run in runs]
    ranks = {"tau": 0.9, "d": dim, "before": before, "after": [run["ranks"] for run in runs]}
    return {"median": median(values), "values": values, "metrics": metrics, "setting": runs[0]["setting"],
            "steps": [run.get("step") for run in runs], "effective_rank": ranks}


def report(result: dict) -> str:
    """result.json in two lines: the metrics, and Table 3's ranks."""
    ranks = result["effective_rank"]
    metrics = "  ".join(f"{name} {format_number(value)}" for name, value in result["metrics"].items())
    values = ", ".join(map(format_number, result["values"]))
    lines = [f"{result['task']}  {metrics}  (medians; seeds: {values})"]
    if ranks["before"] is None:
        lines.append("effective rank: the dev split has too few tokens")
    for name, before in (ranks["before"] or {}).items():
        after = [after[name] for after in ranks["after"] if after]  # none of a frozen encoder or a diverged run
        change = f"{before} -> {statistics.median(after):.0f}" if after else before
        lines.append(f"effective rank on the dev split, {name}, of {ranks['d']}: {change}")
    return "\n".join(lines)


def table1(results: list[dict], out: Path):
    """Print and write a row of Table 1: the medians of GLUE's tasks, and their average if every task has a median."""
    medians = {result["task"]: result["median"] for result in results}
    average = None if None in medians.values() else statistics.mean(medians.values())
    write_json(out / "result.json", {"task": "glue", "average": average, "medians": medians, "results": results})
    say("  ".join(f"{task} {format_number(value, 1)}" for task, value in (medians | {"average": average}).items()))
