"""The results of fine-tuning: a folder for the runs of a task, and what is shown of them."""
import statistics
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from support.classification import DIVERGED
from support.program import code_hash, compare, json_lines, read_json, read_lines, write_json, write_text
from support.tasks import SWEPT, TuneConfig


def shown(value: float) -> str:
    """A metric as text."""
    return "diverged" if value == DIVERGED else f"{value:.2f}"


class Results:
    """The folder for the runs of a task. config.json is the `record` of what all runs share, and runs.jsonl has a line
    for each; result.json has their medians."""
    def __init__(self, out: Path, record: dict):
        """Claim the folder. Raises UserError if it has runs with other settings, data or code; the encoder may have
        moved."""
        self.out, self.record = out, record | {"code": code_hash()}
        if (out / "config.json").is_file():
            compare(out, read_json(out / "config.json"), self.record, self.record.keys() - {"init"})
        write_json(out / "config.json", self.record)
        self.runs = read_lines(out / "runs.jsonl")

    def find(self, tune: TuneConfig, seed: int) -> dict | None:
        """The run with these settings and this seed, if it is done."""
        found = [run for run in self.runs if (run["tune"], run["seed"]) == (asdict(tune), seed)]
        return found[0] if found else None

    def add(self, run: dict, files: dict[str, str]):
        """Write a run, and its prediction files by name."""
        for name, text in files.items():
            write_text(self.out / name, text)
        self.runs.append(run)
        write_text(self.out / "runs.jsonl", json_lines(self.runs))

    def show(self, run: dict, number: int, count: int):
        """Print a run, which is the one with this number of several."""
        settings = {"l2": run["l2"]} if self.record["frozen"] else {name: run["tune"][name] for name in SWEPT}
        setting = "  ".join(f"{name} {x:g}" for name, x in settings.items())
        left = timedelta(seconds=round((count - number) * run["seconds"]))
        print(f"{self.record['task']}  {setting}  seed {run['seed']}  {self.record['metric']} {shown(run['value'])}  "
              f"{run['seconds']:.0f} s  run {number} of {count}, {left} left")

    def finish(self, runs: list[dict], sweep: list[dict], before: dict | None, dim: int,
               pretraining_step: int | None) -> dict:
        """Write and print the result of some runs: medians over seeds, and the effective ranks of `dim` dimensions
        before and after fine-tuning (Table 3)."""
        values = [run["value"] for run in runs]
        metrics = {name: statistics.median(run["metrics"][name] for run in runs) for name in runs[0]["metrics"]}
        after = [run["ranks"] for run in runs]
        task = self.record["task"]
        result = {name: self.record[name] for name in ("task", "init", "frozen", "metric")}
        result |= {"median": statistics.median(values), "values": values, "metrics": metrics, "sweep": sweep,
                   "seeds": [run["seed"] for run in runs], "steps": [run.get("step") for run in runs],
                   "tune": runs[0]["tune"], "pretraining_step": pretraining_step,
                   "effective_rank": {"tau": 0.9, "d": dim, "before": before, "after": after}}
        write_json(self.out / "result.json", result)
        print(f"{task}  {'  '.join(f'{name} {shown(x)}' for name, x in metrics.items())}  (medians; seeds: "
              f"{', '.join(map(shown, values))})")
        for name, rank in (before or {}).items():  # None if the dev split has too few tokens
            tuned = [each[name] for each in after if each]  # none of a frozen encoder
            change = f" -> {statistics.median(tuned):.0f}" if tuned else ""
            print(f"effective rank on the dev split, {name}, of {dim}: {rank}{change}")
        print(f"{self.out}: {', '.join(sorted(path.name for path in self.out.glob('[!.]*.*')))}")
        return result


def table1(results: list[dict], out: Path):
    """Print and write a row of Table 1: the medians of GLUE's tasks, and their average."""
    medians = {result["task"]: result["median"] for result in results}
    average = statistics.mean(medians.values())
    write_json(out / "result.json", {"task": "glue", "average": average, "medians": medians, "results": results})
    print("  ".join(f"{task} {shown(value)}" for task, value in (medians | {"average": average}).items()))
