"""What fine-tuning found: the files of runs, medians over seeds, result.json and Table 1."""
import math
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from support.cli import UserError
from support.files import read_json, write_json
from support.tasks import SWEPT

REPEAT = "delete it: then that run is done again"


@dataclass(frozen=True)
class Evaluation:
    """A checkpoint on the dev split; without arguments, one of a run that diverged."""
    value: float | None = None  # of the task's metric in percent; None: not a number
    metrics: dict[str, float | None] = field(default_factory=dict)
    ranks: dict[str, int] | None = None  # of Table 3
    step: int | None = None


@dataclass(frozen=True)
class Run:
    """A finished run: the settings that a sweep may vary, the seed, the best and the last evaluation."""
    setting: dict[str, float]
    seed: int
    best: Evaluation
    last: Evaluation
    seconds: float


# ---- 1. Folders and files of runs ---------------------------------------------------------------------------
def name_of(init: str) -> str:
    """A name for the encoder in --init, such as toy, toy-step_0000500 or random-toy."""
    path = Path(init.removeprefix("random:")).resolve()
    name = f"{path.parent.name}-{path.stem}" if path.suffix == ".pt" else path.name
    return f"random-{name}" if init.startswith("random:") else name


def path_of_run(out: Path, tune, seed: int) -> Path:
    """The file of a run, of a TuneConfig and a seed."""
    name = "-".join(f"{getattr(tune, field):g}" for field in SWEPT)
    return out / "runs" / f"{name}-{seed}.json"


def is_done(out: Path, tune, seed: int) -> bool:
    """Whether a run has its file and, if it is the run whose model is kept, this model. UserError as read_run."""
    path = path_of_run(out, tune, seed)
    if not path.is_file():
        return False
    diverged = read_run(path).best.step is None
    return seed != 1 or diverged or (out / "encoder.pt").is_file()


def wait_for(path: Path):
    """Wait for a file that another of torchrun's processes writes; torchrun ends all of them if one fails."""
    while not path.is_file():
        time.sleep(0.2)


def read_run(path: Path) -> Run:
    """The run in a file, as soon as it is there. UserError if it is damaged or of another version of this program."""
    wait_for(path)
    found = read_json(path, "setting", "seed", "best", "last", "seconds", advice=f"or of an older version; {REPEAT}")
    try:
        return Run(**found | {"best": Evaluation(**found["best"]), "last": Evaluation(**found["last"])})
    except TypeError as error:
        raise UserError(f"{path}: damaged ({error}); {REPEAT}") from error


# ---- 2. Values of several runs ------------------------------------------------------------------------------
def height(value: float | None) -> float:
    """A value to compare by: None, of a run that diverged, is the lowest."""
    return -math.inf if value is None else value


def median(values: Iterable[float | None]) -> float | None:
    """The median over seeds. A seed that diverged (None) is the lowest, so that the median may be None."""
    middle = statistics.median([height(value) for value in values])
    return middle if math.isfinite(middle) else None


def rank_after(ranks: dict, centering: str, when: str = "after") -> float | None:
    """The median rank after fine-tuning, from `effective_rank` of result.json. Seeds that diverged have no rank. When:
    "after", of the best checkpoints, or "at_the_end"."""
    found = [after[centering] for after in ranks[when] if after]
    return statistics.median(found) if found else None


def format_number(value: float | None, digits: int = 2) -> str:
    """A number, or - for None."""
    return "-" if value is None else f"{value:.{digits}f}"


# ---- 3. result.json, and how it is printed ------------------------------------------------------------------
def summarize(runs: list[Run], before: dict[str, int], dim: int) -> dict:
    """The part of result.json about the runs of all seeds. `before` are Table 3's ranks before fine-tuning."""
    names = []
    for run in runs:  # a run that diverged has no metrics
        names += [name for name in run.best.metrics if name not in names]
    metrics = {}
    for name in names:
        metrics[name] = median(run.best.metrics.get(name) for run in runs)
    ranks = {"tau": 0.9, "d": dim, "before": before,
             "after": [run.best.ranks for run in runs],
             "at_the_end": [run.last.ranks for run in runs],
             "steps": [[run.best.step, run.last.step] for run in runs]}
    values = [run.best.value for run in runs]
    return {"median": median(values), "values": values, "metrics": metrics,
            "last": median(run.last.value for run in runs), "setting": runs[0].setting, "effective_rank": ranks}


def report(result: dict) -> str:
    """result.json in three lines: the metrics, the value of the last checkpoints, and Table 3's ranks."""
    ranks = result["effective_rank"]
    metrics = "  ".join(f"{name} {format_number(value)}" for name, value in result["metrics"].items())
    values = ", ".join(format_number(value) for value in result["values"])
    changes = []
    for name, before in ranks["before"].items():
        changes.append(f"{name} {before} -> {format_number(rank_after(ranks, name), digits=0)}")
    return (f"{result['task']}  {metrics}  (medians; seeds: {values})\n"
            f"the best checkpoint of each run counts; the last ones have {format_number(result['last'])}\n"
            f"effective rank on the dev split, before -> after, of {ranks['d']}: {', '.join(changes)}")


def table1(results: list[dict], out: Path):
    """Print the medians of GLUE's tasks and their average, a row of Table 1, and write them to result.json. Without a
    median of each task there is no average."""
    medians = {result["task"]: result["median"] for result in results}
    average = None if None in medians.values() else statistics.mean(medians.values())
    write_json(out / "result.json", {"task": "glue", "average": average, "medians": medians, "results": results})
    print("  ".join(f"{task} {format_number(value, 1)}" for task, value in (medians | {"average": average}).items()))
    print(f"{out}: result.json")
