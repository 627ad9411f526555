"""The results of fine-tuning: a folder for the runs of a task, and a table of them."""
import ast
import math
import statistics
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from support.classification import Scores
from support.program import ROOT, compare, figure, json_lines, path_of, read_json, read_lines, short_hash, write_json
from support.program import write_text
from support.tasks import SWEPT, TuneConfig

# A hash of our code without its comments, taken when a program starts: a later edit is not part of its results.
PROGRAMS = ("maelm.py", "train.py", "finetune.py", "rank.py")
FILES = [*[ROOT / name for name in PROGRAMS], *sorted(ROOT.glob("support/*.py"))]
CODE = short_hash("".join(ast.dump(ast.parse(file.read_bytes())) for file in FILES))


def ordered(value: float | None) -> float:
    """A value for comparisons: a run that has diverged has none, and is the lowest."""
    return -math.inf if value is None else value


def median(values: list[float | None]) -> float | None:
    """The median of values, None if it is that of a run that has diverged."""
    found = statistics.median(map(ordered, values))
    return found if math.isfinite(found) else None


def shown(value: float | None) -> str:
    """A metric as text."""
    return "diverged" if value is None else f"{value:.2f}"


class Results:
    """The folder for the runs of a task. config.json is the `record` of all that they share, runs.jsonl has a line for
    each, seedN/ the predictions of a seed, and result.json the medians. encoder.pt is the best of the seeds on dev."""
    def __init__(self, out: Path, record: dict):
        """Open the folder. Raises UserError if it has runs with other settings, examples or code; the encoder may
        have moved."""
        self.out, self.record = out, record | {"examples": short_hash(repr(record["examples"])), "code": CODE}
        if (out / "config.json").is_file():
            compare(out, read_json(out / "config.json"), self.record, self.record.keys() - {"init"})
        self.runs = read_lines(out / "runs.jsonl")

    def find(self, tune: TuneConfig, seed: int) -> dict | None:
        """The run with these settings and this seed, if it is done."""
        wanted = asdict(tune), seed
        return next((run for run in self.runs if (run["tune"], run["seed"]) == wanted), None)

    def best(self) -> dict | None:
        """The best run that is done, except those of a sweep, which have seed 0; None if there is none."""
        seeds = [run for run in self.runs if run["seed"] > 0 and run["value"] is not None]
        return max(seeds, key=lambda run: run["value"], default=None)

    def add(self, run: dict, scores: Scores):
        """Write a run, and the predictions of a seed."""
        if run["seed"] > 0:
            for name, text in scores.files.items():
                write_text(self.out / f"seed{run['seed']}" / name, text)
        self.runs.append(run)
        write_json(self.out / "config.json", self.record)
        write_text(self.out / "runs.jsonl", json_lines(self.runs))

    def show(self, run: dict, number: int, count: int):
        """Print a run, which is the one with this number of several."""
        settings = {name: run["tune"][name] for name in SWEPT}
        if self.record["frozen"]:
            settings = {"strength": run["strength"]}
        setting = "  ".join(f"{name} {x:g}" for name, x in settings.items())
        left = timedelta(seconds=round((count - number) * run["seconds"]))
        print(f"{self.record['task']}  {setting}  seed {run['seed']}  {self.record['metric']} {shown(run['value'])}  "
              f"{run['seconds']:.0f} s  run {number} of {count}, {left} left")

    def finish(self, runs: list[dict], sweep: list[dict], before: dict | None, dim: int,
               pretraining_step: int | None) -> dict:
        """Write and print the result of some runs: medians over seeds, and the effective ranks of `dim` dimensions
        before and after fine-tuning (Table 3)."""
        values = [run["value"] for run in runs]
        names = dict.fromkeys(name for run in runs for name in run["metrics"])
        metrics = {name: median([run["metrics"].get(name) for run in runs]) for name in names}
        after = [run["ranks"] for run in runs]
        result = {name: self.record[name] for name in ("task", "init", "frozen", "shots", "metric")}
        result |= {
            "median": median(values),
            "values": values,
            "seeds": [run["seed"] for run in runs],
            "steps": [run.get("step") for run in runs],
            "metrics": metrics,
            "tune": runs[0]["tune"],
            "sweep": sweep,
            "pretraining_step": pretraining_step,
            "effective_rank": {"tau": 0.9, "d": dim, "before": before, "after": after}}
        write_json(self.out / "result.json", result)
        medians = "  ".join(f"{name} {shown(x)}" for name, x in metrics.items())
        print(f"{self.record['task']}  {medians}  (medians; seeds: {', '.join(map(shown, values))})")
        for name, rank in (before or {}).items():  # None if the dev split has too few tokens
            tuned = [each[name] for each in after if each]  # none of a frozen encoder
            change = f" -> {statistics.median(tuned):.0f}" if tuned else ""
            print(f"effective rank on the dev split, {name}, of {dim}: {rank}{change}")
        best = self.best()
        if best:
            print(f"{self.out}: result.json; seed{best['seed']}/, of the best seed on dev: {shown(best['value'])}")
        return result


def table1(results: list[dict], missing: list[str], out: Path):
    """Print and write a row of Table 1: the medians of tasks, and their average. Some may be `missing`."""
    medians = {result["task"]: result["median"] for result in results}
    average = None if None in medians.values() else statistics.mean(medians.values())
    write_json(out / "result.json", {"tasks": [*medians], "missing": missing, "average": average, "medians": medians,
                                     "results": results})
    print("  ".join(f"{task} {shown(value)}" for task, value in medians.items()))
    print(f"average of {len(medians)} tasks: {shown(average)}" + "".join(f", without {name}" for name in missing))


def draw_steps(entries: dict[str, dict], tau: float, run: Path, path: Path):
    """Draw over the steps of a run (Figure 3): the ranks of the last layer in entries of rank.json, for text without
    [MASK], and the medians of finetune.py in folders beside the run whose --init is a checkpoint of it."""
    scores = {}
    for file in run.resolve().parent.glob("*/result.json"):
        result = read_json(file)
        of_run = path_of(result.get("init", "")).resolve().parent == run.resolve()
        if of_run and result["median"] is not None:
            name = " ".join(str(result[key]) for key in ("task", "frozen", "shots") if result.get(key))
            scores.setdefault(name, []).append((result["pretraining_step"], result["median"]))
    with figure(path, panels=2) as (left, right):
        for centering in ("uncentered", "centered"):
            points = [(entry["step"], entry[centering]["without_mask"][-1]) for entry in entries.values()]
            left.plot(*zip(*points), "o-", label=centering)
        for name, points in scores.items():
            right.plot(*zip(*sorted(points)), "o-", label=name)
        left.set(ylabel=f"effective rank of the last layer, tau = {tau}")
        right.set(ylabel="score on dev, %", title="" if scores else "no result.json of its checkpoints")
        for axis in (left, right):
            axis.set(xlabel="step of pre-training")
            if axis.get_lines():
                axis.legend(fontsize="small")
