"""How much of the text to mask; see bench/results/masks.md. Repeat the command to continue; two may run at a time.

    OMP_NUM_THREADS=1 python runs/masks.py GLUE TEXT [--out DIR] [--record FILE]

GLUE is a folder with the Hub's files, and TEXT the value of train.py's --data for the models of the last part. Each
finished model adds a line to the record.
"""
import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from sklearn.linear_model import LogisticRegressionCV
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.model.checkpoints import load_model  # noqa: E402
from support.program.worker import make_worker  # noqa: E402
from support.tasks.classification import Classification  # noqa: E402
from support.tasks.examples import read_task  # noqa: E402
from support.tasks.task import labels_of  # noqa: E402
from support.text.corpus import prepared_corpus  # noqa: E402
from support.text.corpus import Rows  # noqa: E402
from support.training.log import commit, read_log  # noqa: E402
from train import evaluate, make_settings  # noqa: E402

FEW, ALL = (2, 3, 4), (2, 3, 4, 5, 6)
SMALL_GLUE = ("sst2", "cola", "mrpc", "rte", "stsb")


def toys():
    """(name, flags, seed) of every toy, the most important first."""
    def rows(seeds, *kinds):
        for seed in seeds:
            for row, rate, *more in kinds:
                name = "-".join([row, str(rate), *[flag.strip("-") for flag in more]])
                yield name, ["--ablation", row, "--mask-rate", str(rate), *more], seed
    core = [(row, rate) for rate in (0.5, 0.15) for row in ("mae-lm", "enc-mask", "mlm")]
    yield from rows(FEW, *core[:3])
    yield from rows(FEW, *core[3:])
    yield from rows(FEW, ("mlm", 0.5, "--max-steps", "1524"), ("mae-lm", 0.7), ("mlm", 0.7))
    yield from rows(ALL[3:], *core)
    yield from rows(FEW, ("random-replace", 0.5), ("dec-2", 0.5), ("mae-lm", 0.5, "--max-steps", "2280"))
    yield from rows(FEW, ("mae-lm", 0.3), ("mlm", 0.3))


def long_runs(text):
    """(name, flags, seed) of the models on `laptop`'s text."""
    recipes = {1900: [], 6000: ["--max-steps", "6000", "--learning-rate", "3e-3", "--muon-learning-rate", "1e-2",
                                "--weight-decay", "0.01", "--warmup-steps", "122"]}
    for steps, flags in recipes.items():
        for rate in (0.15, 0.5):
            for row in ("mae-lm", "mlm"):
                yield (f"text-{row}-{rate}-{steps}",
                       ["--ablation", row, "--mask-rate", str(rate), "--data", text, *flags], 2)


def run(*command):
    subprocess.run([sys.executable, *map(str, command)], check=True)


@torch.no_grad()
def vectors_of(model, encoded):
    """The vectors of a split, (N, d) each, by name: the mean and [CLS], of the last layer and of the layer below."""
    found = {}
    for ids in encoded.ids:
        tokens = torch.from_numpy(ids)[None]
        states = model.encoder.hidden_states(tokens, torch.arange(len(ids))[None])
        for layer, h in (("", states[-1]), ("-below", states[-2])):
            found.setdefault(f"mean{layer}", []).append(h[0].mean(0).numpy())
            found.setdefault(f"cls{layer}", []).append(h[0, 0].numpy())
    return {name: np.stack(each).astype(np.float64) for name, each in found.items()}


def probes(model, tokenizer, examples):
    """The accuracy of linear probes on the dev split of docs, in percent."""
    tune = argparse.Namespace(seq_len=512)
    kind = Classification(tokenizer, model.config, tune, labels_of("docs", examples["train"]))
    train, dev = kind.encode(examples["train"]), kind.encode(examples["dev"])
    train_vectors, dev_vectors = vectors_of(model, train), vectors_of(model, dev)
    result = {}
    for name, vectors in train_vectors.items():
        folds = StratifiedKFold(5, shuffle=True, random_state=0)
        fit = LogisticRegressionCV(Cs=np.logspace(-3, 1, 9), cv=folds, max_iter=1000, use_legacy_attributes=False,
                                   l1_ratios=(0,), scoring="accuracy")
        probe = make_pipeline(StandardScaler(), fit).fit(vectors, train.targets.numpy())
        result[name] = 100 * probe.score(dev_vectors[name], dev.targets.numpy())
    return result


def at_one_rate(out, settings):
    """The validation loss and accuracy of a finished run with 15% masks."""
    model, _ = load_model(out)
    model.config = replace(model.config, mask_rate=0.15)
    values = json.loads((out / "config.json").read_bytes())
    config, _, options = make_settings({name: value for name, value in values.items() if name != "corpus"})
    folder = prepared_corpus(values, None, values["corpus"])
    worker = make_worker("fp32", "cpu")
    return evaluate(model, Rows(folder, "val", config.seq_len), options, worker)


def measure(name, flags, seed, out, tasks):
    """Train and measure one model; returns a line of the record."""
    run("train.py", *flags, "--seed", seed, "--out", out, "--precision", "fp32", "--eval-interval", "500")
    run("rank.py", out, "--out", f"{out}-rank")
    tuned = {}
    for task, data in tasks.items():
        where = f"{out}-{task}"
        run("finetune.py", "--init", out, "--task", task, "--seeds", 3, "--precision", "fp32", "--out", where, *data)
        tuned[task] = json.loads(Path(where, "result.json").read_bytes())["values"]
    log = read_log(out)
    last = [line for line in log if "val_loss" in line][-1]
    model, tokenizer = load_model(out)
    loss, accuracy = at_one_rate(out, flags)
    entry = json.loads(Path(f"{out}-rank", "rank.json").read_bytes())["models"][str(out)]
    start = log[0]["start"]
    return {"name": name, "seed": seed, "flags": flags, "commit": commit(), "torch": start["torch"],
            "python": start["python"], "steps": last["step"], "seconds": round(last["seconds"]),
            "flops_per_token": start["flops_per_token"], "tokens": last["step"] * 64 * 64,
            "val_loss": last["val_loss"], "val_loss_at_15": loss, "accuracy_at_15": accuracy, "tuned": tuned,
            "frozen": probes(model, tokenizer, read_task("docs", None, {"val_share": 0.01})),
            "ranks": {name: entry[name] for name in ("uncentered", "centered")}}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("glue")
    parser.add_argument("text")
    parser.add_argument("--out", type=Path, default=Path("out/masks"))
    parser.add_argument("--record", type=Path, default=Path("bench/results/masks.jsonl"))
    flags = parser.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    small = {"docs": []} | {task: ["--data", flags.glue, "--epochs", 1 if task == "sst2" else 3, "--learning-rate",
                                   "4e-4"] for task in SMALL_GLUE}
    jobs = [(job, {"docs": []}) for job in toys()] + [(job, small) for job in long_runs(flags.text)]
    for (name, settings, seed), tasks in jobs:
        lines = flags.record.read_text().splitlines() if flags.record.is_file() else []
        done = {(line["name"], line["seed"]) for line in map(json.loads, lines)}
        if (name, seed) in done:
            continue
        try:
            with FileLock(flags.out / f"{name}-{seed}.lock", timeout=0):
                line = measure(name, settings, seed, flags.out / f"{name}-{seed}", tasks)
                with open(flags.record, "a") as file:
                    file.write(json.dumps(line) + "\n")
        except Timeout:
            continue
        print(name, seed, statistics.median(line["tuned"]["docs"]), line["frozen"], flush=True)


if __name__ == "__main__":
    main()
