"""Is an idea better than MAE-LM? Trains it with several seeds, and compares its scores with recorded ones.

    python -m bench.idea relu --seeds 11 12 13                # a row of maelm.ABLATIONS
    python -m bench.idea mae-lm --learning-rate 3e-3 --quick  # flags of train.py; a first look in minutes
    python -m bench.idea                                      # prints the record

Each seed is trained, fine-tuned on the task `docs` with three seeds, and probed without fine-tuning, at the mean vector
and at [CLS]; scores are accuracies in percent. They are compared by seed with those of --against. Models that the
record has for this machine's text and precision are not made again. Repeat a command to continue it.
"""
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

import torch
from scipy import stats

import finetune  # noqa: F401, so that code_hashes has its code
import train
from maelm import ABLATIONS, Config
from support.model.checkpoints import changed_code
from support.program import ROOT, Parser, UserError, add_flags, clear_errors, code_hashes, fields_of, json_lines
from support.program import path_of, read_json, read_lines, write_json, write_text
from support.text.corpus import Text, prepared_corpus
from support.worker import make_worker

RECORD = ROOT / "bench/results/ideas.jsonl"
QUICK = 500  # steps of --quick
FOLLOWED = ("preset", "mask_rate", "max_steps", "precision")  # flags of an idea that its baseline also gets
SCORES = {"tuned": "fine-tuned", "mean": "probe of the mean", "cls": "probe of `[CLS]`"}
EVALUATIONS = {"rank": "rank.py", "tuned": "finetune.py --task docs --seeds 3 --init",
               "mean": "finetune.py --task docs --frozen mean --init",
               "cls": "finetune.py --task docs --frozen cls --init"}
TRAINING = 0.73  # share of a model's time, about


# ---- 1. Models ----------------------------------------------------------------------------------------------
class Model(NamedTuple):
    """A row and flags, as on train.py's command line, and a seed. Its run folder is `run`; other files lie beside."""
    name: str
    seed: int
    run: Path

    def beside(self, end: str) -> Path:
        return self.run.with_name(self.run.name + end)

    def stages(self, environment: dict) -> Iterator[subprocess.Popen]:
        """Start the programs that train and measure the model, each after the one before it has ended; then write its
        line. Raises UserError if a program fails."""
        run = shlex.quote(str(self.run))
        commands = [f"train.py --ablation {self.name} --seed {self.seed} --out {run}"]
        commands += [f"{program} {run} --out {run}-{stage}" for stage, program in EVALUATIONS.items()]
        log = self.beside(".log")
        log.parent.mkdir(parents=True, exist_ok=True)
        for command in commands:
            program, *arguments = shlex.split(command)
            with open(log, "ab") as file:
                process = subprocess.Popen([sys.executable, ROOT / program, *arguments], stdout=file, stderr=file,
                                           env=os.environ | environment)
            yield process
            if process.returncode != 0:
                raise UserError(f"python {command}: failed; see {log}")
        write_json(self.beside(".json"), self.line())

    def done(self) -> float:
        """The share of the model's time that has passed, in [0, 1]."""
        if self.beside(".json").is_file():
            return 1.0
        log = read_lines(self.run / "log.jsonl")
        return TRAINING * log[-1]["step"] / read_json(self.run / "config.json")["max_steps"] if log else 0.0

    def line(self) -> dict:
        """The model's line in the record."""
        log = read_lines(self.run / "log.jsonl")
        starts = [line["start"] for line in log if "start" in line]
        losses = [line["val_loss"] for line in log if "val_loss" in line]
        trained = [line for line in log if "loss" in line][-1]
        line = origin(self.name) | {"name": self.name, "seed": self.seed, "commit": starts[-1]["commit"]}
        line |= {"torch": starts[-1]["torch"], "tokens": trained["tokens"], "seconds": round(trained["seconds"])}
        line |= {"flops": starts[-1]["flops_per_token"] * trained["tokens"], "val_loss": losses[-1]}
        [ranks] = read_json(self.beside("-rank") / "rank.json")["models"].values()
        line["ranks"] = ranks["uncentered"]
        for stage in SCORES:
            line[stage] = read_json(self.beside(f"-{stage}") / "result.json")["median"]
            # Which texts are right, four per digit; when fine-tuned, by the first of the seeds.
            answers = read_lines(self.beside(f"-{stage}") / "predictions.jsonl")
            bits = "".join(str(int(answer["prediction"] == answer["label"])) for answer in answers)
            line[f"{stage}_right"] = f"{int(bits, 2):0{len(bits) // 4}x}"
        changed = [name for start in starts for name in start["changed"]]
        return line | {"changed": changed, "code": code_hashes()}


def name_of(flags: Namespace) -> str:
    """The row and the flags of a model, in the order of the fields."""
    words = [flags.row]
    for name in ("preset", *[field.name for field in (*fields(Config), *fields(train.Recipe))]):
        value = vars(flags).get(name)
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words.append(f"--{flag} {shlex.quote(str(value))}")
    return " ".join(words)


def origin(name: str) -> dict:
    """The text and the precision of a model on this machine. Raises UserError if a flag of the model is wrong."""
    config, recipe, _, _ = train.parse(["--ablation", *shlex.split(name)])
    meta = read_json(prepared_corpus(Text(**fields_of(Text, asdict(config) | asdict(recipe)))) / "meta.json")
    worker = make_worker(recipe.precision, recipe.device, config.encoder_dim)
    return {"text": f"{meta['tokenizer']}-{meta['tokens']['train']}", "dtype": str(worker.dtype)}


def make(models: list[Model], jobs: int):
    """Train and measure models, `jobs` at a time. Raises UserError if a program fails."""
    gpus = torch.cuda.device_count()
    waiting = list(models)
    running = {}  # place -> (stages of a model, the process of the present one)
    start = sum(model.done() for model in models)
    began = shown = time.monotonic()
    try:
        while waiting or running:
            for place in range(jobs):
                if place in running and running[place][1].poll() is None:
                    continue
                if place in running:
                    stages, _ = running.pop(place)
                elif waiting:
                    one = {"CUDA_VISIBLE_DEVICES": str(place % gpus)} if gpus else {"OMP_NUM_THREADS": "1"}
                    stages = waiting.pop(0).stages(one)
                else:
                    continue
                process = next(stages, None)
                if process:
                    running[place] = stages, process
            time.sleep(1)
            now, done = time.monotonic(), sum(model.done() for model in models)
            if now - shown > 30 and done > start:
                left = (now - began) * (len(models) - done) / (done - start) / 60
                print(f"{done:.1f} of {len(models)} models, {left:.0f} min left")
                shown = now
    finally:
        for _, process in running.values():
            process.terminate()  # train.py saves a checkpoint
            process.wait()


# ---- 2. Comparing them --------------------------------------------------------------------------------------
def spread(lines: list[dict], score: str) -> tuple[float, int]:
    """The standard deviation between seeds, pooled over models, and its degrees of freedom."""
    names = {line["name"] for line in lines}
    groups = [[line[score] for line in lines if line["name"] == name] for name in names]
    freedom = sum(len(group) - 1 for group in groups)
    squares = sum((len(group) - 1) * statistics.variance(group) for group in groups if len(group) > 1)
    return (squares / freedom) ** 0.5 if freedom else 0.0, freedom


def half_width(deviation: float, freedom: int, count: int, level: float = 0.95) -> float:
    """Half of the interval of a mean of `count` values with this standard deviation, by Student's t."""
    return float(stats.t.ppf((1 + level) / 2, freedom)) * deviation / count ** 0.5


def verdict(values: list[float], deviation: float, freedom: int) -> str:
    """The mean of differences between equal seeds, its interval, and one word. With one seed, the deviation between
    the recorded seeds decides: that of a difference is larger by the root of 2."""
    mean, count = statistics.mean(values), len(values)
    if count > 1:
        deviation, freedom = statistics.stdev(values), count - 1
    else:
        deviation *= 2 ** 0.5
    half = half_width(deviation, freedom, count) if freedom else float("inf")
    if abs(mean) > half:
        word = "better" if mean > 0 else "worse"
    else:
        enough = [n for n in range(count + 1, 100) if half_width(deviation, n - 1, n) < abs(mean)]
        word = f"cannot be told; if this is the difference, {enough[0] if enough else '100 or more'} seeds would tell"
    return f"{mean:+.1f} ({mean - half:.1f} to {mean + half:.1f}): {word}"


def table(lines: list[dict]) -> str:
    """The means over seeds as Markdown, a row per model."""
    heads = ["toy", "seeds", *SCORES.values(), "validation loss", "rank", "at `[MASK]`", "FLOPs, 10¹²", "minutes"]
    rows = ["|".join(["", *heads, ""]), "|" + len(heads) * "---|"]
    for name in dict.fromkeys(line["name"] for line in lines):
        mine = [line for line in lines if line["name"] == name]
        cells = [f"`{name}`", " ".join(str(line["seed"]) for line in mine)]
        cells += [f"{statistics.mean(line[score] for line in mine):.1f}" for score in SCORES]
        cells.append(f"{statistics.mean(line['val_loss'] for line in mine):.3f}")
        for curve in ("without_mask", "mask_only"):
            cells.append(f"{statistics.mean(line['ranks'][curve][-1] for line in mine):.0f}")
        cells.append(f"{statistics.mean(line['flops'] for line in mine) / 1e12:.1f}")
        cells.append(f"{statistics.mean(line['seconds'] for line in mine) / 60:.1f}")
        rows.append("|".join(["", *cells, ""]))
    return "\n".join(rows)


def difference(lines: list[dict], name: str, against: str, score: str) -> dict[int, float]:
    """The difference between two models by seed, for the seeds that both have."""
    values = {(line["name"], line["seed"]): line[score] for line in lines}
    seeds = sorted(seed for found, seed in values if found == name and (against, seed) in values)
    return {seed: values[name, seed] - values[against, seed] for seed in seeds}


# ---- 3. Command line ----------------------------------------------------------------------------------------
def parse(argv) -> Namespace:
    """Read the command line."""
    parser = Parser("bench.idea", __doc__)
    add = parser.add_argument
    add("row", choices=ABLATIONS, nargs="?", help="a row of Table 2, or your own; none prints the record")
    add("--preset", choices=train.PRESETS, help="[toy]")
    add("--seeds", type=int, nargs="+", help="[11 12 13; with --quick, 11]")
    add("--quick", action="store_true", help=f"train for {QUICK} steps")
    add("--against", help='row and flags of the baseline, such as "mlm --mask-rate 0.5" [mae-lm, and those of '
                          f"--{', --'.join(FOLLOWED).replace('_', '-')} that are given]")
    add("--jobs", type=int, help="models at a time [the number of GPUs or, without a GPU, of CPU cores]")
    add("--record", action="store_true", help=f"add the models to {RECORD.relative_to(ROOT)}")
    add("--out", type=path_of, default=Path("out/ideas"), help="[%(default)s]")
    for part in (Config, train.Recipe):
        add_flags(parser, part, train.PRESETS["toy"])
    flags = parser.parse_args(argv)
    if "seed" in flags:
        raise UserError(f"--seed {flags.seed}: use --seeds")
    if flags.quick:
        flags.max_steps = QUICK
    return flags


def main(argv=None):
    with clear_errors("bench.idea"):
        flags = parse(argv)
        recorded = read_lines(RECORD)
        if flags.row is None:
            print(table(recorded))
            return
        name = name_of(flags)
        baseline = Namespace(row="mae-lm", **{each: vars(flags).get(each) for each in FOLLOWED})
        if flags.against:
            baseline = parse(shlex.split(flags.against))
        against = name_of(baseline)
        seeds = flags.seeds or ([11] if flags.quick else [11, 12, 13])
        names = list(dict.fromkeys([against, name]))
        origins = {each: origin(each) for each in names}
        usable = [line for line in recorded if origins[against].items() <= line.items()]
        models = []
        for seed in seeds:
            for each in names:
                known = [line for line in usable if (line["name"], line["seed"]) == (each, seed)]
                if not known:
                    models.append(Model(each, seed, flags.out / re.sub(r"[^\w.+]+", "-", f"{each}-{seed}")))
        missing = [model for model in models if model.done() < 1]
        print(f"{name}, against {against}: {len(missing)} models to train, with logs in {flags.out}")
        make(missing, flags.jobs or torch.cuda.device_count() or torch.get_num_threads())
        for model in models:
            line = read_json(model.beside(".json"))
            changed = [*line.pop("changed"), *changed_code({"code": line.pop("code")})]
            if changed:
                print(f"{model.name}, seed {model.seed}: made by other code ({', '.join(changed)}); to make it again, "
                      f"delete {model.run}*")
            usable.append(line)
        if flags.record:
            write_text(RECORD, json_lines(recorded + usable[len(usable) - len(models):]))
        tokens = [line["tokens"] for line in usable if line["name"] == against]
        others = [line for line in usable if line["tokens"] in tokens]
        shown = [line for line in usable if line["seed"] in seeds and (line in others or line["name"] == name)]
        print(table(sorted(shown, key=lambda line: line["name"] == name)))
        if name != against:
            print(f"\n{name} minus {against}, by seed:")
            for score, title in SCORES.items():
                values = difference(usable, name, against, score)
                values = [values[seed] for seed in seeds]
                by_seed = ", ".join(f"{value:+.1f}" for value in values)
                print(f"{title}: {by_seed}; mean {verdict(values, *spread(others, score))}")


if __name__ == "__main__":
    main()
