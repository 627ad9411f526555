"""Fine-tuning: GLUE, SQuAD 2.0, and a task that needs no download.

    python finetune.py --init out/toy --task docs               # classify documentation by its library
    python finetune.py --init out/base --task rte --sweep       # Table 5's grid, then the median of five seeds
    python finetune.py --init out/base --task glue --data DIR   # all eight tasks from local files, and their average

--task custom reads the files train and dev (.csv, .tsv, .jsonl or .parquet, or compressed) in --data, with the columns
text[,text2],label, or sentence1,sentence2,label as in GLUE. Labels are used as written (01 is not 1); decimals mean
regression. F1 treats the second of two labels as positive. The best of at most 20 checkpoints is chosen on dev, so
scores are slightly optimistic. Repeat a command to complete missing runs; torchrun's processes share the runs.
"""
import argparse
import copy
import math
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from rank import CENTERINGS, ENOUGH, Moments, tau_rank
from support.model.optim import set_rates
from support.program.cli import Parser, add_flags, clear_errors, fields_of, path_of, require, say, short_name
from support.program.files import code_hash, compare, lock_folder, write_json, write_text
from support.program.worker import Worker, make_worker
from support.tasks import results
from support.tasks.encoder import Pretrained, Probe, Tuned, predict, with_vectors, write_tuned
from support.tasks.examples import hash_of, read_task
from support.tasks.heads import Classification, batches, by_length, collate
from support.tasks.squad import Spans
from support.tasks.table1 import DEFAULTS, GLUE, SWEPT, TASKS, Encoded, Kind, grid, group_of, labels_of
from support.text.corpus import VAL_SHARE, seed_of
from train import learning_rate_factor


KINDS = {"classification": Classification, "spans": Spans}  # what finetune.py can do with a task
# The code that makes a run. A result never mixes runs of different code.
CODE = ("maelm.py", "train.py", "rank.py", "finetune.py", "support/model/*.py", "support/tasks/*.py",
        "support/text/*.py")


# ---- 1. Settings --------------------------------------------------------------------------------------------
# The comment after a field is also its text in -h.
@dataclass(frozen=True)
class TuneConfig:
    """Settings of fine-tuning; each task has its own defaults. Raises ValueError if a value is not allowed."""
    epochs: float = 3.0  # number of passes over the training split
    learning_rate: float = 0.0  # peak learning rate; 0 means 3e-5 * (768 / d)^2
    batch_size: int = 32  # examples per optimizer step and per evaluation batch
    warmup_share: float = 0.06  # fraction of the steps with linear warm-up; then linear decay to 0
    seq_len: int = 512  # longest input in tokens; the encoder's own limit also applies
    dropout: float = 0.1  # dropout in encoder and head
    weight_decay: float = 0.01  # weight decay of all parameters
    precision: str = "auto"  # auto | fp32 | bf16: for training; evaluation always uses fp32
    max_query: int = 64  # SQuAD: longest question in tokens, at most half of seq_len
    doc_stride: int = 128  # SQuAD: tokens between the starts of windows, at most half a window
    max_answer: int = 30  # SQuAD: longest answer in tokens

    def __post_init__(self):
        require(
            self,
            ("epochs", 0 < self.epochs <= 10_000, "a number above 0, at most 10,000"),
            ("batch_size", 1 <= self.batch_size <= 10_000, "1 to 10,000"),
            ("seq_len", self.seq_len >= 8, "8 or more"),
            ("precision", self.precision in ("auto", "fp32", "bf16"), "auto, fp32 or bf16"),
            *[(name, 0 <= getattr(self, name) < inf, "0 or more") for name in ("learning_rate", "weight_decay")],
            *[(name, 0 <= getattr(self, name) < 1, "0 or more, below 1") for name in ("warmup_share", "dropout")],
            *[(name, getattr(self, name) >= 1, "1 or more") for name in ("max_query", "doc_stride", "max_answer")])


class Setup(NamedTuple):
    """Everything that the runs of a task share. A run is a TuneConfig and a seed."""
    task: str
    pretrained: Pretrained
    kind: Kind
    splits: dict[str, Encoded]
    tune: TuneConfig  # a sweep replaces some of its fields
    worker: Worker
    out: Path


# ---- 2. One run: section 4.1, Tables 5 and 6 ----------------------------------------------------------------
def run_once(setup: Setup, tune: TuneConfig, seed: int) -> dict:
    """Fine-tune, without gradient clipping, and return the value, metrics, ranks and step of the best checkpoint on the
    dev split. If the seed is 1, that checkpoint is also saved."""
    kind, train, device = setup.kind, setup.splits["train"], setup.worker.device
    encoder = setup.pretrained.new_encoder(seed) if train.vectors is None else None
    torch.manual_seed(seed_of(seed))  # for the head
    model = Tuned(encoder, kind.head()) if encoder else Probe(train.vectors, len(kind.labels.names) or 1)
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=tune.learning_rate, betas=(0.9, 0.98), eps=1e-6,
                                  weight_decay=tune.weight_decay, fused=True)
    steps = math.ceil(tune.epochs * math.ceil(len(train.ids) / tune.batch_size))
    count = min(20, math.ceil(2 * tune.epochs))  # evaluations: one per half epoch, but at most 20
    ends = {math.ceil(steps * i / count) for i in range(1, count + 1)}
    best, weights, predictions = None, None, {}

    drawn = batches(train, seed, tune.batch_size)  # for each step, the indices of its inputs
    bar = tqdm(range(steps), desc=f"{setup.task} seed {seed}", leave=False, disable=None)
    for step, indices in zip(bar, drawn):
        model.train()  # evaluation switched dropout off
        torch.manual_seed(seed_of(seed, step, 1))  # for dropout
        with setup.worker.autocast():
            logits, targets, padding = predict(model, train, indices, device)
        loss = kind.loss(logits, targets, padding)
        loss.backward()
        factor = learning_rate_factor(step, round(tune.warmup_share * steps), steps)
        set_rates(optimizer, factor)
        optimizer.step()
        optimizer.zero_grad()

        if step + 1 in ends:
            metrics, files = evaluate(model, setup, "dev")
            if metrics is None:  # diverged: this run has no value, even if an earlier checkpoint had one
                return {"value": None, "metrics": {}, "ranks": None}
            if "dev_mm" in setup.splits:
                mismatched, _ = evaluate(model, setup, "dev_mm")
                metrics["accuracy_mm"] = mismatched["accuracy"] if mismatched else None
            value = metrics[kind.labels.metrics[0]]
            if best is None or results.height(value) > results.height(best["value"]):  # a tie goes to the first
                best, predictions = {"value": value, "metrics": metrics, "step": step + 1}, files
                weights = copy.deepcopy(model.state_dict())

    model.load_state_dict(weights)
    if seed == 1:  # the first seed of the result; a sweep uses seed 0
        for name, text in predictions.items():
            write_text(setup.out / name, text)
        if encoder:
            write_tuned(setup.out / "encoder.pt", model, setup.pretrained, setup.task, kind.labels, tune.seq_len)
    return best | {"ranks": ranks(model, setup) if encoder else None}  # a frozen encoder keeps its ranks


@torch.no_grad()
def evaluate(model: Tuned | Probe, setup: Setup, split: str) -> tuple[dict | None, dict[str, str]]:
    """The metrics of a split, None if the model has diverged, and the texts of prediction files by name."""
    model.eval()
    encoded, outputs = setup.splits[split], []
    chunks = by_length(encoded, setup.tune.batch_size)
    for chosen in chunks:
        logits, targets, padding = predict(model, encoded, chosen, setup.worker.device)
        # decode takes the targets only because they hold the start of SQuAD's passage.
        outputs.append(setup.kind.decode(logits, targets, padding).cpu())
    outputs = torch.cat(outputs)[np.argsort(np.concatenate(chunks))]  # back in the order of the examples
    if outputs.isnan().any():
        return None, {}
    return setup.kind.score(outputs.numpy(), encoded)


@torch.no_grad()
def ranks(model: Tuned, setup: Setup) -> dict[str, int] | None:
    """The effective ranks of H^L at the real tokens of the dev split (Table 3); None if there are too few tokens."""
    model.eval()
    moments, encoded = Moments(), setup.splits["dev"]
    for chosen in by_length(encoded, setup.tune.batch_size):
        tokens, padding, _ = collate(encoded, chosen, setup.worker.device)
        _, h = model(tokens, padding)
        moments.add(h[~padding])
    if moments.count < ENOUGH * len(moments.total):
        return None
    return {name: tau_rank(moments.spectrum(centered), 0.9) for name, centered in CENTERINGS.items()}


# ---- 3. All runs of a task ----------------------------------------------------------------------------------
def finish_runs(setup: Setup, runs: list[tuple[TuneConfig, int]]) -> list[dict]:
    """Do the `runs` whose files are missing, shared by the processes of torchrun, and return the results of all."""
    mine = runs[setup.worker.rank::setup.worker.world_size]
    missing = [run for run in mine if not results.path_of_run(setup.out, *run).is_file()]
    if len(missing) < len(mine):
        say(f"{setup.out}: {len(mine) - len(missing)} of {len(mine)} runs are there")
    for number, (tune, seed) in enumerate(missing, start=1):
        start = time.perf_counter()
        result = run_once(setup, tune, seed)
        seconds = round(time.perf_counter() - start, 2)
        setting = {name: getattr(tune, name) for name in SWEPT}
        write_json(results.path_of_run(setup.out, tune, seed),
                   result | {"setting": setting, "seed": seed, "seconds": seconds})
        listed = "  ".join(f"{name} {value:g}" for name, value in setting.items())
        left = timedelta(seconds=round((len(missing) - number) * seconds))
        say(f"{setup.task}  {listed}  seed {seed}  {setup.kind.labels.metrics[0]} "
            f"{results.format_number(result['value'])}  {seconds:.0f} s  {left} left")
    return [results.wait_for(results.path_of_run(setup.out, *run)) for run in runs]


def run_task(setup: Setup, options: argparse.Namespace) -> dict:
    """Fine-tune one encoder on one task: the grid with --sweep, then seeds 1, 2, ... Writes and returns result.json."""
    task, tune, dim, sweep = setup.task, setup.tune, setup.pretrained.config.encoder_dim, []
    if options.sweep:
        # Explicit flags replace the grid's values. In tune, the actual learning rate has already replaced a 0.
        given = {name: getattr(tune, name) for name in fields_of(TuneConfig, vars(options))}
        points = grid(group_of(task, options.frozen), dim, given)
        # Seed 0, because the choice must not depend on the seeds of the result.
        sweep = finish_runs(setup, [(replace(tune, **point), 0) for point in points])
        sweep.sort(key=lambda run: results.height(run["value"]), reverse=True)
        tune = replace(tune, **sweep[0]["setting"])
    runs = finish_runs(setup, [(tune, seed) for seed in range(1, options.seeds + 1)])
    if not setup.worker.is_main:
        return {}
    untuned = Tuned(setup.pretrained.new_encoder(1), setup.kind.head()).to(setup.worker.device)
    summary = results.summarize(runs, ranks(untuned, setup), dim)
    result = {"task": task, "init": options.init, "frozen": options.frozen, "metric": setup.kind.labels.metrics[0],
              **summary, "tune": asdict(tune), "sweep": sweep}
    write_json(setup.out / "result.json", result)
    say(results.report(result), f"{setup.out}: result.json")
    return result


# ---- 4. How a task begins -----------------------------------------------------------------------------------
def make_setup(task: str, pretrained: Pretrained, examples: dict[str, list], out: Path, options: argparse.Namespace,
               worker: Worker) -> Setup:
    """Encode the examples, and claim the folder `out`. Raises UserError if it belongs to other settings or data."""
    # A flag overrides the default of the task, which overrides the default of the field.
    tune = TuneConfig(**DEFAULTS[group_of(task, options.frozen)] | fields_of(TuneConfig, vars(options)))
    tune = replace(tune, learning_rate=tune.learning_rate or 3e-5 * (768 / pretrained.config.encoder_dim) ** 2)
    pretrained = pretrained.with_dropout(tune.dropout)
    labels = labels_of(task, examples["train"])
    kind = KINDS[TASKS[task].kind](pretrained.tokenizer, pretrained.config, tune, labels)
    splits = {split: kind.encode(each) for split, each in examples.items()}
    if options.frozen:
        encoder = pretrained.new_encoder(1).to(worker.device)
        splits = {split: with_vectors(encoded, encoder, options.frozen, tune.batch_size)
                  for split, encoded in splits.items()}
    settings = {"init": options.init, "task": task, "weights": pretrained.weights_hash(), "code": code_hash(*CODE),
                "examples": hash_of(examples), "sweep": options.sweep, "frozen": options.frozen, **asdict(tune)}
    path = out / "config.json"
    if path.is_file() or not worker.is_main:  # the number of seeds may grow, and the encoder may have moved
        compare(out, results.wait_for(path), settings, may_change=["init"])
    if worker.is_main:
        write_json(path, settings)
        write_text(out / "tokenizer.json", pretrained.tokenizer.to_json())
        say(f"{out}: {len(splits['train'].ids):,} training inputs",
            *[f"  {split}: {encoded.remark}" for split, encoded in splits.items()])
    return Setup(task, pretrained, kind, splits, tune, worker, out)


def parse(argv) -> argparse.Namespace:
    """Read the command line. Flags of TuneConfig that are not given are absent from the result."""
    parser = Parser("finetune.py", __doc__)
    add = parser.add_argument
    add("--init", default="out/toy", help="run folder, checkpoint, or random:FOLDER [%(default)s]")
    add("--out", type=path_of, help="folder for all results [out/TASK-INIT, and -mean or -cls with --frozen]")
    add("--device", default="auto", help="auto | cpu | cuda | mps [%(default)s]")
    add("--task", choices=[*TASKS, "glue"], default="docs", help="glue: all eight tasks and the average [%(default)s]")
    add("--data", help="folder with the Hub's own files or, for custom, with train and dev [GLUE and SQuAD: the Hub]")
    add("--seeds", type=int, default=5, help="number of runs; the result is their median [%(default)s]")
    add("--sweep", action="store_true", help="first search the grid of Table 5 or 6; flags replace its values")
    add("--frozen", choices=["mean", "cls"], nargs="?", const="mean", default="", help="freeze the encoder, and train "
        "only a linear classifier of the mean vector [mean], or of the vector at [CLS]; seconds")
    known = parser.parse_known_args(argv)[0]  # -h shows the defaults of its task
    add_flags(parser, TuneConfig, {} if known.task == "glue" else DEFAULTS[group_of(known.task, known.frozen)])
    options = parser.parse_args(argv)
    try:
        TuneConfig(**fields_of(TuneConfig, vars(options)))  # checks the values
        require(options, ("seeds", options.seeds >= 1, "1 or more"))
    except ValueError as error:
        parser.error(str(error))
    if options.frozen and options.task != "glue" and KINDS[TASKS[options.task].kind] is not Classification:
        parser.error(f"--frozen: {options.task} needs an encoder that is fine-tuned")
    if options.task == "docs" and options.data:
        parser.error("--data: docs reads the documentation on this machine; use --task custom for your own files")
    if options.task == "custom" and not options.data:
        parser.error("--task custom: needs --data, a folder with train and dev")
    parts = filter(None, [options.task, short_name(options.init), options.frozen])
    options.out = options.out or Path("out", "-".join(parts))
    return options


def main(argv=None):
    with clear_errors("finetune.py"):
        options = parse(argv)
        precision = "fp32" if options.frozen else getattr(options, "precision", "auto")  # the flag may be absent
        worker = make_worker(precision, options.device)
        tasks = GLUE if options.task == "glue" else [options.task]
        pretrained = Pretrained(options.init)
        held_out = pretrained.settings.get("val_share", VAL_SHARE)
        examples = {task: read_task(task, options.data, held_out) for task in tasks}  # finds missing files early
        table = []
        for task in tasks:
            out = options.out / task if options.task == "glue" else options.out
            with lock_folder(out, sign="config.json") if worker.is_main else nullcontext():
                table.append(run_task(make_setup(task, pretrained, examples[task], out, options, worker), options))
        if options.task == "glue" and worker.is_main:
            results.table1(table, options.out)


if __name__ == "__main__":
    main()
