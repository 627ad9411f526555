"""Fine-tuning: GLUE, SQuAD 2.0, and a task that needs no download.

    python finetune.py --init out/toy --task docs               # name a docstring's library
    python finetune.py --init out/toy --task docs --frozen      # a linear probe
    python finetune.py --init out/base --task rte --sweep       # Table 5's grid, then five seeds
    python finetune.py --init out/base --task glue --data DIR   # all eight tasks, and their average

--task custom reads train, dev and, if there is one, test (.csv, .tsv, .jsonl or .parquet) in --data, with the
columns text, text2 (optional) and label. Labels in tables are used as written (01 is not 1), and decimals mean
regression. F1 treats the second of two labels as positive. Without dev, a tenth of train is dev. The best of at
most 20 checkpoints is chosen on dev, so its scores are slightly optimistic. predictions_test.jsonl is for test,
which may lack labels. Repeat a command to complete missing runs.
"""
import argparse
import copy
import math
import statistics
import time
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from rank import CENTERINGS, VECTORS_PER_DIM, Moments, tau_rank
from support.model import seed_of
from support.optim import take_step
from support.checkpoints import Pretrained, Tuned, hidden_states
from support.program import Parser, UserError, clear_errors, code_hash, compare, fields_of, json_lines
from support.program import lock_folder, path_of, read_json, read_lines, short_name, write_json, write_text
from support import probe
from support.classification import DIVERGED, Classification, Encoded, batches, by_length, collate, outputs_of
from support.classification import scores, shown
from support.squad import Spans
from support.tasks import DEFAULTS, GLUE, PROBED, SWEPT, TASKS, TuneConfig, grid, hash_of, labels_of
from support.tasks import read_task, tune_of
from support.worker import Worker, make_worker
from train import learning_rate_factor

# The kinds of tasks; Classification describes the five methods that the functions below call.
KINDS = {"classification": Classification, "spans": Spans}
FIRST_SEED = 1  # of a result; a sweep uses seed 0


# ---- 1. A task -----------------------------------------------------------------------------------
class Setup(NamedTuple):
    """Everything that the runs of a task share."""
    task: str
    pretrained: Pretrained
    kind: Classification | Spans
    train: Encoded
    splits: dict[str, Encoded]  # dev, which chooses checkpoints; dev_mm of MNLI; test of custom
    metric: str  # selects checkpoints, and is the value of a run
    frozen: str  # "" to fine-tune; the pooling of a linear probe
    worker: Worker
    out: Path


def make_setup(task: str, pretrained: Pretrained, tune: TuneConfig, examples: dict[str, list], out: Path,
               flags: argparse.Namespace, worker: Worker) -> Setup:
    """Encode the examples of a task, and claim the folder `out` for runs with these settings, data and code. Raises
    UserError if others are there; the encoder may have moved."""
    labels = labels_of(task, examples["train"])
    pretrained.config = replace(pretrained.config, dropout=tune.dropout)
    kind = KINDS[TASKS[task].kind](pretrained.tokenizer, pretrained.config, tune, labels)
    splits = {split: kind.encode(each) for split, each in examples.items()}
    record = asdict(tune) | {
        "init": flags.init, "task": task, "weights": pretrained.weights_hash(), "examples": hash_of(examples),
        "task_settings": repr(TASKS[task]), "sweep": flags.sweep, "frozen": flags.frozen, "code": code_hash()}
    path = out / "config.json"
    if path.is_file():
        compare(out, read_json(path), record, record.keys() - {"init"})
    write_json(path, record)
    print(f"{out}:", *[f"  {split}: {encoded.remark}" for split, encoded in splits.items()], sep="\n")
    return Setup(task, pretrained, kind, splits.pop("train"), splits, labels.metrics[0], flags.frozen, worker, out)


# ---- 2. A run: section 4.1, Tables 5 and 6 -------------------------------------------------------
def run_once(setup: Setup, tune: TuneConfig, seed: int) -> dict:
    """Fine-tune, without gradient clipping. Returns the value, metrics, prediction files, ranks and
    step of the best checkpoint on the dev split. The first seed's checkpoint is also saved."""
    train = setup.train
    encoder = setup.pretrained.new_encoder(seed)
    torch.manual_seed(seed_of(seed))  # for the new head
    model = Tuned(encoder, setup.kind.head()).to(setup.worker.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=tune.learning_rate, betas=(0.9, 0.98),
                                  eps=1e-6, weight_decay=tune.weight_decay, fused=True)
    steps = math.ceil(tune.epochs * math.ceil(len(train.ids) / tune.batch_size))
    evaluations = min(20, math.ceil(2 * tune.epochs))  # two per epoch, but at most 20
    evaluate_after = {math.ceil(steps * i / evaluations) for i in range(1, evaluations + 1)}
    best = None
    bar = tqdm(range(steps), desc=f"{setup.task} seed {seed}", leave=False, disable=None)
    for step, indices in zip(bar, batches(train, seed, tune.batch_size)):  # without end
        model.train()  # evaluation switched dropout off
        torch.manual_seed(seed_of(seed, step, 1))  # for dropout
        tokens, padding, targets = collate(train, indices, setup.worker.device)
        with setup.worker.autocast():
            logits = model(tokens, padding)
        loss = setup.kind.loss(logits, targets, tokens)
        loss.backward()
        take_step([optimizer], learning_rate_factor(step, round(tune.warmup_share * steps), steps))
        if step + 1 in evaluate_after:
            value = evaluate(model, setup, tune, ["dev"])[0][setup.metric]
            if value == DIVERGED:  # whatever earlier checkpoints scored
                best = None
            if best is None or value > best["value"]:
                best = {"value": value, "step": step + 1}
                best_weights = copy.deepcopy(model.state_dict())

    model.load_state_dict(best_weights)
    metrics, files = evaluate(model, setup, tune, [*setup.splits])
    if seed == FIRST_SEED:
        model.save(setup.out / "encoder.pt", setup.pretrained, task=setup.task,
                   labels=list(setup.kind.labels.names), scale=setup.kind.labels.scale, longest=tune.seq_len)
    return best | {"metrics": metrics, "files": files, "ranks": ranks(model.encoder, setup, tune)}


def evaluate(model: Tuned, setup: Setup, tune: TuneConfig, splits: list[str]) -> tuple[dict, dict[str, str]]:
    """The metrics of a model on these splits, and prediction files by name."""
    model.eval()

    def decoded(tokens, padding):
        return setup.kind.decode(model(tokens, padding), tokens)

    outputs = {split: outputs_of(decoded, setup.splits[split], tune.batch_size, setup.worker.device)
               for split in splits}
    return scores(outputs, setup.kind, setup.splits)


@torch.no_grad()
def ranks(encoder: nn.Module, setup: Setup, tune: TuneConfig) -> dict[str, int] | None:
    """The effective ranks of H^L on the dev split (Table 3); None if there are too few tokens, or the run has
    diverged."""
    encoder.eval()
    moments = Moments()
    for _, tokens, padding, _ in by_length(setup.splits["dev"], tune.batch_size, setup.worker.device):
        moments.add(hidden_states(encoder, tokens, padding)[-1][~padding])
    if moments.count < VECTORS_PER_DIM * setup.pretrained.config.encoder_dim or not moments.gram.isfinite().all():
        return None
    return {name: tau_rank(moments.spectrum(centered), 0.9) for name, centered in CENTERINGS.items()}


def probe_once(setup: Setup, tune: TuneConfig, seed: int) -> dict:
    """Fit a linear model to the vectors of the frozen encoder. Returns its value, metrics, prediction
    files and strength of regularization, but no `ranks`, because they do not change."""
    encoder = setup.pretrained.new_encoder(seed).to(setup.worker.device).eval()
    last = setup.pretrained.config.encoder_layers
    vectors = {split: probe.vectors_of(encoder, encoded, setup.frozen, [last], tune.batch_size)[:, 0]
               for split, encoded in {"train": setup.train, **setup.splits}.items()}
    metrics, files, l2 = probe.probe(vectors, setup.train, setup.splits, setup.kind, tune.l2)
    return {"value": metrics[setup.metric], "metrics": metrics, "files": files, "l2": l2, "ranks": None}


# ---- 3. All runs of a task -----------------------------------------------------------------------
def finish(setup: Setup, jobs: list[tuple[TuneConfig, int]]) -> list[dict]:
    """Do the jobs (settings, seed) that runs.jsonl lacks. Returns the runs of all jobs."""
    path = setup.out / "runs.jsonl"
    do = probe_once if setup.frozen else run_once
    lines = read_lines(path)
    runs = []
    for number, (tune, seed) in enumerate(jobs, start=1):
        done = [line for line in lines if (line["tune"], line["seed"]) == (asdict(tune), seed)]
        if not done:
            began = time.perf_counter()
            run = do(setup, tune, seed) | {"tune": asdict(tune), "seed": seed}
            run["seconds"] = round(time.perf_counter() - began, 2)
            for name, text in run.pop("files").items():
                if seed == FIRST_SEED:
                    write_text(setup.out / name, text)
            lines.append(run)
            write_text(path, json_lines(lines))
            done = [run]
        runs += done
        seconds = runs[-1]["seconds"]
        varied = {"l2": runs[-1]["l2"]} if setup.frozen else {name: runs[-1]["tune"][name] for name in SWEPT}
        setting = "  ".join(f"{name} {x:g}" for name, x in varied.items())
        print(f"{setup.task}  {setting}  seed {seed}  {setup.metric} {shown(runs[-1]['value'])}  {seconds:.0f} s  run "
              f"{number} of {len(jobs)}, {timedelta(seconds=round((len(jobs) - number) * seconds))} left")
    return runs


def run_task(setup: Setup, tune: TuneConfig, flags: argparse.Namespace) -> dict:
    """Do all runs of a task: the grid with --sweep, then seeds 1, 2, ... Writes result.json: the medians
    over seeds, the ranks before and after fine-tuning (Table 3), and the sweep."""
    dim = setup.pretrained.config.encoder_dim
    sweep = []
    if flags.sweep:
        # Seed 0, because the choice must not depend on the seeds of the result.
        sweep = finish(setup, [(point, 0) for point in grid(setup.task, tune, dim, vars(flags))])
        sweep.sort(key=lambda run: run["value"], reverse=True)
        tune = TuneConfig(**sweep[0]["tune"])
    is_random = not setup.frozen or flags.init.startswith("random:")
    seeds = flags.seeds or (5 if is_random else 1)
    runs = finish(setup, [(tune, FIRST_SEED + i) for i in range(seeds)])
    values = [run["value"] for run in runs]
    metrics = {name: statistics.median(run["metrics"][name] for run in runs) for name in runs[0]["metrics"]}
    before = ranks(setup.pretrained.new_encoder(FIRST_SEED).to(setup.worker.device), setup, tune)
    after = [run["ranks"] for run in runs]
    summary = {"task": setup.task, "init": flags.init, "frozen": setup.frozen, "metric": setup.metric,
               "median": statistics.median(values), "values": values, "metrics": metrics,
               "seeds": [run["seed"] for run in runs], "pretraining_step": setup.pretrained.step,
               "steps": [run.get("step") for run in runs], "tune": asdict(tune), "sweep": sweep,
               "effective_rank": {"tau": 0.9, "d": dim, "before": before, "after": after}}
    write_json(setup.out / "result.json", summary)
    print(f"{setup.task}  {'  '.join(f'{name} {shown(x)}' for name, x in metrics.items())}  (medians; seeds: "
          f"{', '.join(map(shown, values))})")
    for name, rank in (before or {}).items():  # None if the dev split has too few tokens
        tuned = [each[name] for each in after if each]  # none of a frozen encoder
        change = f" -> {statistics.median(tuned):.0f}" if tuned else ""
        print(f"effective rank on the dev split, {name}, of {dim}: {rank}{change}")
    print(f"{setup.out}: {', '.join(sorted(path.name for path in setup.out.glob('[!.]*.*')))}")
    return summary


def table1(summaries: list[dict], out: Path):
    """Print and write a row of Table 1: the medians of GLUE's tasks, and their average."""
    medians = {summary["task"]: summary["median"] for summary in summaries}
    average = statistics.mean(medians.values())
    write_json(out / "result.json", {"task": "glue", "average": average, "medians": medians, "results": summaries})
    print("  ".join(f"{task} {shown(value)}" for task, value in (medians | {"average": average}).items()))


# ---- 4. Command line -----------------------------------------------------------------------------
def parse(argv) -> argparse.Namespace:
    """Read and check the command line. The result has only those fields of TuneConfig that were given."""
    first = Parser("finetune.py", __doc__, add_help=False)
    first.add_argument("--task", choices=[*TASKS, "glue"], default="docs", help="glue: all eight tasks [%(default)s]")
    task = first.parse_known_args(argv)[0].task  # whose defaults -h shows
    parser = Parser("finetune.py", __doc__, parents=[first])
    add = parser.add_argument
    add("--init", default="out/toy", help="run folder, checkpoint or random:FOLDER [%(default)s]")
    add("--out", type=path_of, help="folder for all results [out/TASK-INIT, and -mean or -cls with --frozen]")
    add("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="[%(default)s]")
    add("--data", help="folder with the Hub's own files or, for custom, with train [GLUE and SQuAD: the Hub]")
    add("--seeds", type=int, default=0, help="number of runs; the result is their median [5; 1 if nothing is random]")
    add("--sweep", action="store_true", help="first search the grid of Table 5 or 6; flags replace its values")
    add("--frozen", choices=probe.POOLINGS, nargs="?", const="mean", default="", help="freeze the encoder, and fit a "
        "linear model to the mean vector (also without a value), or to the vector at [CLS]")
    parser.add_fields(TuneConfig, {} if task == "glue" else DEFAULTS[TASKS[task].group])
    flags = parser.parse_args(argv)
    given = fields_of(TuneConfig, vars(flags))
    if flags.task == "docs" and flags.data:
        raise UserError("--data: docs reads the documentation on this machine; use --task custom for your own files")
    if flags.task == "custom" and not flags.data:
        raise UserError("--task custom: needs --data, a folder with a file train")
    if flags.frozen and (flags.sweep or not given.keys() <= {*PROBED} or flags.task == "squad2"):
        raise UserError(f"--frozen {flags.frozen}: no --sweep, no squad2, and no settings but {', '.join(PROBED)}")
    return flags


def main(argv=None):
    with clear_errors("finetune.py"):
        flags = parse(argv)
        worker = make_worker("fp32" if flags.frozen else vars(flags).get("precision", "auto"), flags.device)
        parts = filter(None, [flags.task, short_name(flags.init), flags.frozen])
        folder = flags.out or Path("out", "-".join(parts))
        tasks = GLUE if flags.task == "glue" else [flags.task]
        pretrained = Pretrained(flags.init)
        examples = {task: read_task(task, flags.data, pretrained.settings) for task in tasks}  # finds errors early
        summaries = []
        for task in tasks:
            out = folder / task if flags.task == "glue" else folder
            with lock_folder(out):
                tune = tune_of(task, fields_of(TuneConfig, vars(flags)), pretrained.config.encoder_dim)
                setup = make_setup(task, pretrained, tune, examples[task], out, flags, worker)
                summaries.append(run_task(setup, tune, flags))
        if flags.task == "glue":
            table1(summaries, folder)


if __name__ == "__main__":
    main()
