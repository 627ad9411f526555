"""Is an idea better than MAE-LM? Trains both with several seeds, and compares their scores.

    python -m bench.idea relu                                       # a row of maelm.ABLATIONS, with three seeds
    python -m bench.idea mae-lm --learning-rate 3e-3 --seeds 11     # flags of train.py; a first look, with one seed
    python -m bench.idea                                            # prints the record

Each seed is trained, fine-tuned on the task `docs` (`tuned`: the median of three seeds), and probed without
fine-tuning, at the mean vector and at [CLS], with all labels and with 8 per class. Accuracies in percent are compared
by seed with those of --against; tables are Markdown. Repeat a command to continue it; models in --out are not made
again.
"""
import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import pandas
import torch
from scipy import stats

import train
from maelm import ABLATIONS
from support.program import ROOT, Parser, UserError, clear_errors, json_lines, read_json, read_lines, write_json
from support.program import write_text
from support.results import CODE

RECORD = ROOT / "bench/results/ideas.jsonl"
FOLLOWED = ("mask_rate", "max_steps", "precision")  # flags of an idea that its baseline also gets
SCORES = {  # flags of finetune.py
    "tuned": "--task docs --seeds 3", "quick": "--task docs --seeds 1",
    **{f"order{factor}": f"--task bshift --epochs 3 --seeds 1 --learning-rate {8e-4 * factor}"
       for factor in (0.5, 1, 2, 4)},
    **{pooling: f"--task docs --frozen {pooling}" for pooling in ("mean", "cls")},
    **{f"{pooling}{shots}": f"--task docs --frozen {pooling} --seeds 20 --shots {shots}"
       for pooling in ("mean", "cls") for shots in (4, 8, 16, 32)},
    **{f"modules-{pooling}8": f"--task modules --frozen {pooling} --seeds 20 --shots 8" for pooling in ("mean", "cls")}}
USUAL = ["tuned", "mean8", "cls8", "mean", "cls"]


# ---- 1. Models ----------------------------------------------------------------------------------------------
class Model(NamedTuple):
    """A row and flags, as on train.py's command line, and a seed. Its run is in `folder`; other files lie beside it."""
    name: str
    seed: int
    folder: Path

    def beside(self, end: str) -> Path:
        return self.folder.with_name(self.folder.name + end)

    def lacks(self, scores: list[str]) -> bool:
        """Whether the model must be made, or lacks a score."""
        path = self.beside(".json")
        return not path.is_file() or not {*scores} <= read_json(path).keys()

    def make(self, scores: list[str], environment: dict):
        """Train and measure the model, and write its line. Raises UserError if a program fails."""
        folder = shlex.quote(str(self.folder))
        commands = [f"train.py --ablation {self.name} --seed {self.seed} --out {folder}",
                    f"rank.py {folder} --out {folder}-rank"]
        commands += [f"finetune.py {SCORES[score]} --init {folder} --out {folder}-{score}" for score in scores]
        log = self.beside(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        for command in commands:
            program, *arguments = shlex.split(command)
            with open(log, "ab") as file:
                done = subprocess.run([sys.executable, ROOT / program, *arguments], stdout=file, stderr=file,
                                      env=os.environ | environment)
            if done.returncode != 0:
                raise UserError(f"python {command}: failed; see {log}")
        path = self.beside(".json")
        before = read_json(path) if path.is_file() else {}  # other scores
        write_json(path, (before if before.get("code") == CODE else {}) | self.line(scores))

    def line(self, scores: list[str]) -> dict:
        """The model's line in the record."""
        log = read_lines(self.folder / "log.jsonl")
        starts = [line["start"] for line in log if "start" in line]
        trained = [line for line in log if "loss" in line][-1]
        line = {"name": self.name, "seed": self.seed, "text": read_json(self.folder / "config.json")["corpus"]}
        line |= {key: starts[-1][key] for key in ("commit", "torch", "dtype")}
        line |= {"tokens": trained["tokens"], "seconds": round(trained["seconds"])}
        line["flops"] = starts[-1]["flops_per_token"] * trained["tokens"]
        line["val_loss"] = [line["val_loss"] for line in log if "val_loss" in line][-1]
        [ranks] = read_json(self.beside("-rank") / "rank.json")["models"].values()
        line["ranks"] = ranks["uncentered"]
        for score in scores:
            result = read_json(self.beside(f"-{score}") / "result.json")
            line[score] = result["median"]
            if score == "tuned":
                line["quick"] = result["values"][0]
        return line | {"code": CODE}


def make(models: list[Model], scores: list[str], jobs: int):
    """Train and measure models, `jobs` at a time. Raises UserError if a program fails."""
    began = time.monotonic()
    gpus = [*map(str, range(torch.cuda.device_count()))]
    if gpus and os.environ.get("CUDA_VISIBLE_DEVICES"):
        gpus = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    places = SimpleQueue()
    for place in range(jobs):
        places.put(place)

    def make_one(model: Model):
        place = places.get()
        try:
            model.make(scores, {"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]} if gpus else {"OMP_NUM_THREADS": "1"})
        finally:
            places.put(place)  # also after an error: the next model may wait for it

    pool = ThreadPoolExecutor(jobs)
    try:
        for number, _ in enumerate(pool.map(make_one, models), start=1):
            left = (time.monotonic() - began) / number * (len(models) - number) / 60
            print(f"{number} of {len(models)} models, about {left:.0f} min left")
    finally:  # after Ctrl-C, which train.py also gets, or an error
        pool.shutdown(cancel_futures=True)


# ---- 2. Comparing them --------------------------------------------------------------------------------------
def markdown(table: pandas.DataFrame) -> str:
    """A table as Markdown."""
    rows = [table.columns, ["---"] * len(table.columns), *table.values]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def table(lines: list[dict], scores: list[str]) -> pandas.DataFrame:
    """The means over seeds, a row per model. `rank` and `[MASK]` are effective ranks of the last layer."""
    rows = [{"model": f"`{line['name']}`", **{score: line.get(score) for score in scores}, "val_loss": line["val_loss"],
             "rank": line["ranks"]["without_mask"][-1], "at `[MASK]`": line["ranks"]["mask_only"][-1],
             "10^12 FLOPs": line["flops"] / 1e12, "minutes": line["seconds"] / 60} for line in lines]
    groups = pandas.DataFrame(rows).groupby("model", sort=False)
    means = groups.mean().round(1).assign(val_loss=groups["val_loss"].mean().round(3), seeds=groups.size())
    return means.reset_index()


def half_width(deviation: float, count: int, freedom: int) -> float:
    """Half of the 95% interval of a mean of `count` values, by Student's t."""
    return stats.t.ppf(0.975, freedom) * deviation / count ** 0.5 if freedom else float("inf")


def verdict(values: pandas.Series, deviation: float, freedom: int) -> dict[str, str]:
    """The mean of differences between equal seeds, its 95% interval by Student's t, and a verdict. With one seed, the
    deviation between recorded seeds decides: that of a difference is larger by the root of 2."""
    count, mean = len(values), values.mean()
    if count > 1:
        deviation, freedom = values.std(), count - 1
    else:
        deviation *= 2 ** 0.5
    half = half_width(deviation, count, freedom)
    word = "better" if mean > 0 else "worse"
    if freedom == 0:
        word = "undecided with one seed"
    elif abs(mean) <= half:
        enough = [number for number in range(count + 1, 100)
                  if half_width(deviation, number, number - 1) < abs(mean)]
        word = f"undecided; {enough[0] if enough else '100 or more'} seeds would decide such a difference"
    return {"by seed": ", ".join(f"{value:+.1f}" for value in values), "mean": f"{mean:+.1f}",
            "95% interval": f"{mean - half:.1f} to {mean + half:.1f}", "verdict": word}


def compare(lines: list[dict], scores: list[str], name: str, against: str, seeds: list[int]) -> pandas.DataFrame:
    """The differences between two models by score and seed, and verdicts. The deviation between seeds is pooled over
    all models in `lines` with as many tokens."""
    found = pandas.DataFrame(lines)
    [tokens, *_] = found.loc[found["name"] == against, "tokens"]
    found = found[(found["tokens"] == tokens) | (found["name"] == name)]
    found = found.set_index(["name", "seed"])[scores].astype(float)
    groups = found.groupby("name")
    free = (groups.count() - 1).clip(lower=0)  # a recorded model may lack a score
    freedom = free.sum()
    variance = (groups.var() * free).sum() / freedom.clip(lower=1)
    differences = (found.loc[name] - found.loc[against]).loc[seeds]
    return pandas.DataFrame([{"score": score} | verdict(differences[score], variance[score] ** 0.5, int(freedom[score]))
                             for score in scores])


# ---- 3. Command line ----------------------------------------------------------------------------------------
def main(argv=None):
    with clear_errors("bench.idea"):
        parser = Parser("bench.idea", __doc__)
        add = parser.add_argument
        add("row", choices=ABLATIONS, nargs="?", help="a row of Table 2, or your own; none prints the record")
        add("--seeds", type=int, nargs="+", default=[11, 12, 13], help="[11 12 13]")
        add("--against", help='the baseline, such as "mlm --mask-rate 0.5" [mae-lm, with the given preset, '
                              f"{', '.join(FOLLOWED)}]")
        add("--scores", nargs="+", choices=SCORES, default=USUAL, help=f"[{' '.join(USUAL)}]")
        add("--quick", action="store_true", help="fine-tune with one seed, not three")
        add("--jobs", type=int, help="models at a time [the number of GPUs or, without a GPU, of CPU cores]")
        add("--record", action="store_true", help=f"add the models to {RECORD}")
        add("--out", type=Path, default=Path("out/ideas"), help="[%(default)s]")
        flags, words = parser.parse_known_args(argv)
        recorded = read_lines(RECORD)
        if flags.row is None:
            print(markdown(table(recorded, flags.scores)))
            return
        scores = ["quick" if flags.quick and score == "tuned" else score for score in flags.scores]
        wrong = {"--seed", "--ablation", "--init"} & {word.partition("=")[0] for word in words}
        if wrong:
            raise UserError(f"{', '.join(wrong)}: not here; use --seeds, and a row")
        config, recipe, _, parsed = train.parse(["--ablation", flags.row, *words])
        given = vars(config) | vars(recipe)
        preset = ["--preset", parsed.preset] if parsed.preset != "toy" else []
        config, recipe, *_ = train.parse([*preset, "--ablation", flags.row])
        plain = vars(config) | vars(recipe)
        name = shlex.join([flags.row, *words])
        followed = [f"--{each.replace('_', '-')} {given[each]}" for each in FOLLOWED if given[each] != plain[each]]
        against = flags.against or " ".join(["mae-lm", *preset, *followed])
        train.parse(["--ablation", *shlex.split(against)])  # raises UserError if a flag is wrong
        names = dict.fromkeys([against, name])
        models = [Model(each, seed, flags.out / re.sub(r"[^\w.+]+", "-", f"{each}-{seed}"))
                  for seed in flags.seeds for each in names]
        missing = [model for model in models if model.lacks(scores)]
        print(f"{name}, against {against}: {len(missing)} models to make; logs are in {flags.out}")
        make(missing, scores, flags.jobs or torch.cuda.device_count() or torch.get_num_threads())
        new = [read_json(model.beside(".json")) for model in models]
        for model, line in zip(models, new):
            if line.pop("code") != CODE:
                print(f"{model.name}, seed {model.seed}: made by other code; to make it again, delete {model.folder}*")
        lines = {(line["name"], line["seed"]): line for line in recorded + new}  # a new one replaces a recorded one
        if flags.record:
            write_text(RECORD, json_lines(lines.values()))
        print(markdown(table(new, scores)))
        if name != against:
            print(f"\n`{name}` minus `{against}`:\n")
            print(markdown(compare([*lines.values()], scores, name, against, flags.seeds)))


if __name__ == "__main__":
    main()
