"""Fine-tuning: GLUE, SQuAD 2.0, and a task that needs no download.

    python finetune.py --init out/toy --task docs               # name a docstring's library
    python finetune.py --init out/toy --task docs --frozen      # a linear probe
    python finetune.py --init out/base --task rte --sweep       # Table 5's grid, then five seeds
    python finetune.py --init out/base --task glue --data DIR   # all eight tasks, and their average

--task custom reads the files train, dev and test (.csv, .tsv, .jsonl or .parquet, or compressed) in
--data, with the columns text[,text2],label, or sentence1,sentence2,label as in GLUE. Labels are used
as written (01 is not 1), and decimals mean regression. F1 treats the second of two labels as
positive. Without dev, a tenth of train is dev. The best of at most 20 checkpoints is chosen on dev,
so its scores are slightly optimistic. predictions_test.jsonl is for test, which may lack labels.
Repeat a command to complete missing runs; torchrun's processes share the jobs, through files.

main -> parse; for each task: make_setup, run_task -> finish_jobs -> run_once or probe_once.
"""
import argparse
import copy
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from rank import CENTERINGS, VECTORS_PER_DIM, Moments, tau_rank
from support.model.build import seed_of
from support.model.checkpoints import Pretrained, Tuned, last_layer, write_tuned
from support.program.cli import Parser, add_flags, fields_of, path_of, short_name
from support.program.errors import clear_errors, say
from support.program.worker import Worker, make_worker
from support.tasks import results
from support.tasks.classification import DIVERGED, Classification, Encoded, or_lowest, scores
from support.tasks.classification import batches, by_length, collate, outputs_of
from support.tasks.examples import hash_of, read_task
from support.tasks.squad import Spans
from support.tasks.task import DEFAULTS, GLUE, TASKS, TuneConfig, check_flags, grid, labels_of, tune_of

# The kinds of tasks; Classification describes the five methods that the functions below call.
KINDS = {"classification": Classification, "spans": Spans}


# ---- 1. What the jobs of a task share ------------------------------------------------------------
class Setup(NamedTuple):
    """Everything that the jobs of a task share."""
    task: str
    pretrained: Pretrained
    kind: Classification | Spans
    metric: str  # selects checkpoints, and is the value of a run
    train: Encoded
    splits: dict[str, Encoded]  # dev, which chooses checkpoints; dev_mm of MNLI; test of custom
    tune: TuneConfig  # before a sweep
    frozen: str  # "" to fine-tune; mean or cls for a linear probe
    worker: Worker
    out: Path


def make_setup(task: str, pretrained: Pretrained, examples: dict[str, list], out: Path,
               flags: argparse.Namespace, worker: Worker) -> Setup:
    """Encode the examples of a task, and claim the folder `out` for its runs."""
    tune = tune_of(task, fields_of(TuneConfig, vars(flags)), pretrained.config.encoder_dim)
    pretrained = copy.copy(pretrained)
    pretrained.config = replace(pretrained.config, dropout=tune.dropout)
    labels = labels_of(task, examples["train"])
    kind = KINDS[TASKS[task].kind](pretrained.tokenizer, pretrained.config, tune, labels)
    splits = {split: kind.encode(each) for split, each in examples.items()}
    results.claim(out, worker, {
        "init": flags.init, "task": task, "weights": pretrained.weights_hash(),
        "examples": hash_of(examples), "task_settings": repr(TASKS[task]), "sweep": flags.sweep, "frozen": flags.frozen,
        **vars(tune)})
    if worker.is_main:
        say(f"{out}:", *[f"  {split}: {encoded.remark}" for split, encoded in splits.items()])
    train = splits.pop("train")
    return Setup(task, pretrained, kind, labels.metrics[0], train, splits, tune, flags.frozen, worker, out)


# ---- 2. One job: section 4.1, Tables 5 and 6 -----------------------------------------------------
def schedule(step: int, warmup: int, steps: int) -> float:
    """Fraction of the peak learning rate at a step: linear warm-up, then linear decay to 0."""
    if step < warmup:
        return (step + 1) / warmup
    return (steps - step) / (steps - warmup)


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
        factor = schedule(step, round(tune.warmup_share * steps), steps)
        optimizer.param_groups[0]["lr"] = factor * tune.learning_rate
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in evaluate_after:
            metrics, _ = evaluate(model, setup, ["dev"])
            if metrics is None:  # diverged: no value, even if an earlier checkpoint had one
                return DIVERGED
            value = metrics[setup.metric]
            if best is None or or_lowest(value) > or_lowest(best["value"]):
                best = {"value": value, "step": step + 1}
                best_weights = copy.deepcopy(model.state_dict())

    model.load_state_dict(best_weights)
    metrics, files = evaluate(model, setup, [*setup.splits])
    if seed == results.FIRST_SEED:
        write_tuned(setup.out / "encoder.pt", model, setup.pretrained, task=setup.task,
                    labels=list(setup.kind.labels.names), scale=setup.kind.labels.scale, longest=tune.seq_len)
    return best | {"metrics": metrics, "files": files, "ranks": ranks(model.encoder, setup)}


def evaluate(model: Tuned, setup: Setup, splits: list[str]) -> tuple[dict | None, dict[str, str]]:
    """The metrics of a model on these splits, None if it diverged, and prediction files by name."""
    model.eval()

    def decoded(tokens, padding):
        return setup.kind.decode(model(tokens, padding), tokens)

    outputs = {split: outputs_of(decoded, setup.splits[split], setup.tune.batch_size, setup.worker.device)
               for split in splits}
    return scores(outputs, setup)


@torch.no_grad()
def ranks(encoder: nn.Module, setup: Setup) -> dict[str, int] | None:
    """The effective ranks of H^L on the dev split (Table 3); None if there are too few tokens."""
    encoder.eval()
    moments = Moments()
    for tokens, padding, _ in by_length(setup.splits["dev"], setup.tune.batch_size, setup.worker.device):
        moments.add(last_layer(encoder, tokens, padding)[~padding])
    if moments.count < VECTORS_PER_DIM * setup.pretrained.config.encoder_dim:
        return None
    return {name: tau_rank(moments.spectrum(centered), 0.9) for name, centered in CENTERINGS.items()}


# ---- 3. All runs of a task -----------------------------------------------------------------------
def finish_jobs(setup: Setup, jobs: list[tuple[TuneConfig, int]]) -> list[dict]:
    """Do the jobs whose files are missing, shared by torchrun's processes. Returns the runs of all jobs."""
    do = run_once
    if setup.frozen:
        from support.tasks.probe import probe_once  # here, because scikit-learn is slow to import
        do = probe_once
    mine = jobs[setup.worker.rank::setup.worker.world_size]
    missing = [job for job in mine if not results.path_of_run(setup.out, *job).is_file()]
    if len(missing) < len(mine):
        say(f"{setup.out}: {len(mine) - len(missing)} of {len(mine)} runs are done")
    epochs = sum(tune.epochs for tune, _ in missing)  # that remain
    for tune, seed in missing:
        began = time.perf_counter()
        run = do(setup, tune, seed)
        seconds = time.perf_counter() - began
        run = results.write_run(setup.out, tune, seed, run, seconds)
        epochs -= tune.epochs
        say(f"{setup.task}  {results.line_of_run(run, setup.metric, epochs * seconds / tune.epochs)}")
    return [results.wait_for(results.path_of_run(setup.out, *job)) for job in jobs]


def run_task(setup: Setup, flags: argparse.Namespace) -> dict:
    """Do all runs of a task: the grid with --sweep, then seeds 1, 2, ... Writes result.json."""
    tune = setup.tune
    sweep = []
    if flags.sweep:
        points = grid(setup.task, tune, setup.pretrained.config.encoder_dim, vars(flags))
        # Seed 0, because the choice must not depend on the seeds of the result.
        sweep = finish_jobs(setup, [(point, 0) for point in points])
        sweep.sort(key=lambda run: or_lowest(run["value"]), reverse=True)
        tune = replace(tune, **sweep[0]["setting"])
    is_random = not setup.frozen or flags.init.startswith("random:")
    seeds = flags.seeds or (5 if is_random else 1)
    runs = finish_jobs(setup, [(tune, results.FIRST_SEED + i) for i in range(seeds)])
    if not setup.worker.is_main:
        return {}
    encoder = setup.pretrained.new_encoder(results.FIRST_SEED).to(setup.worker.device)  # before fine-tuning
    return results.write_summary(setup, flags.init, tune, sweep, runs, ranks(encoder, setup))


# ---- 4. Command line -----------------------------------------------------------------------------
def parse(argv) -> argparse.Namespace:
    """Read and check the command line. The result has only those fields of TuneConfig that were given."""
    parser = Parser("finetune.py", __doc__)
    add = parser.add_argument
    add("--init", default="out/toy", help="run folder, checkpoint, or random:FOLDER [%(default)s]")
    add("--out", type=path_of, help="folder for all results [out/TASK-INIT, and -mean or -cls with --frozen]")
    add("--device", default="auto", help="auto | cpu | cuda | mps [%(default)s]")
    add("--task", choices=[*TASKS, "glue"], default="docs", help="glue: all eight tasks [%(default)s]")
    add("--data", help="folder with the Hub's own files or, for custom, with train [GLUE and SQuAD: the Hub]")
    add("--seeds", type=int, help="number of runs; the result is their median [5; 1 if nothing is random]")
    add("--sweep", action="store_true", help="first search the grid of Table 5 or 6; flags replace its values")
    add("--frozen", choices=["mean", "cls"], nargs="?", const="mean", default="", help="freeze the encoder, and fit a "
        "linear model to the mean vector (also without a value) or to the vector at [CLS]")
    known = parser.parse_known_args(argv)[0]  # -h shows the defaults of its task
    add_flags(parser, TuneConfig, {} if known.task == "glue" else DEFAULTS[TASKS[known.task].group])
    flags = parser.parse_args(argv)
    check_flags(flags)
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
        table = []
        for task in tasks:
            out = folder / task if flags.task == "glue" else folder
            with worker.lock(out, "config.json"):  # a folder with other files is refused
                setup = make_setup(task, pretrained, examples[task], out, flags, worker)
                table.append(run_task(setup, flags))
        if flags.task == "glue" and worker.is_main:
            results.table1(table, folder)


if __name__ == "__main__":
    main()
