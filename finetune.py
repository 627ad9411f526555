"""Fine-tuning: GLUE, SQuAD 2.0, and a task that needs no download.

    python finetune.py --init out/toy --task docs               # classify documentation by its library
    python finetune.py --init out/base --task rte --sweep       # Table 5's grid, then the median of five seeds
    python finetune.py --init out/base --task glue --data DIR   # all eight tasks from local files, and their average
    python finetune.py --init out/rte-base --predict test.tsv   # predict labels of new texts

--task custom reads the files train and dev (.csv, .tsv, .jsonl or .parquet, or compressed) in --data, with the columns
text[,text2],label, or sentence1,sentence2,label as in GLUE. Labels are used as written (01 is not 1); labels with
decimals are numbers. F1 treats the second of two labels as positive. The best of at most 20 checkpoints is chosen on
dev, so scores are slightly optimistic. Repeat a command to do the missing runs; torchrun's processes share the runs.
"""
import argparse
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from rank import CENTERINGS, Moments, tau_rank
from support import results
from support.checkpoints import Pretrained, load_weights, read_tensors, write_tensors
from support.cli import (Parser, UserError, add_flags, clear_errors, explain_out_of_memory, fields_of,
                         require, require_positive)
from support.corpus import VAL_SHARE, seed_of
from support.examples import find_files, hash_of, read_file, read_task, submission
from support.files import lock_folder, open_folder, read_json, short_hash, write_json, write_texts
from support.heads import Classification, Tuned, batches, collate
from support.squad import Spans
from support.tables import split_name
from support.tasks import DEFAULTS, GLUE, SWEPT, TASKS, Encoded, Labels, grid, labels_of
from support.worker import Worker, make_worker
from train import learning_rate_factor


# ---- 1. How an encoder is fine-tuned ------------------------------------------------------------------------
# The comment after a field is also its text in -h and in error messages.
@dataclass(frozen=True)
class TuneConfig:
    """Settings of fine-tuning; each task has its own defaults. Raises ValueError if a field is invalid."""
    epochs: float = 3.0  # number of passes over the training split
    learning_rate: float = 0.0  # peak learning rate, 0 or more; 0 means 3e-5 * (768 / d)^2
    batch_size: int = 32  # examples per optimizer step and per evaluation batch, 1 to 10,000
    warmup_share: float = 0.06  # fraction of the steps with linear warm-up, 0 or more, below 1; then linear decay to 0
    seq_len: int = 512  # longest input in tokens, 8 or more; the encoder's own limit also applies
    dropout: float = 0.1  # dropout in encoder and head, 0 or more, below 1
    weight_decay: float = 0.01  # weight decay of all parameters, 0 or more
    precision: str = "auto"  # auto | fp32 | bf16: for training; evaluation always uses fp32
    max_query: int = 64  # SQuAD: longest question in tokens, at most half of seq_len
    doc_stride: int = 128  # SQuAD: tokens between the starts of windows, at most half a window
    max_answer: int = 30  # SQuAD: longest answer in tokens

    def __post_init__(self):
        require_positive(self, "epochs", "batch_size", "max_query", "doc_stride", "max_answer")
        require(self, batch_size=self.batch_size <= 10_000, learning_rate=self.learning_rate >= 0,
                weight_decay=self.weight_decay >= 0, warmup_share=0 <= self.warmup_share < 1,
                seq_len=self.seq_len >= 8, dropout=0 <= self.dropout < 1,
                precision=self.precision in ("auto", "fp32", "bf16"))


# ---- 2. One run: section 4.1, Tables 5 and 6 ----------------------------------------------------------------
class Setup(NamedTuple):
    """The things that all runs of a task share. A run is a TuneConfig and a seed."""
    task: str
    pretrained: Pretrained
    kind: Classification | Spans
    splits: dict[str, Encoded]
    tune: TuneConfig  # a sweep replaces some of its fields
    worker: Worker
    out: Path


def make_kind(task: str, pretrained: Pretrained, tune: TuneConfig, labels: Labels) -> Classification | Spans:
    """The object that knows the inputs, head, loss and metrics of a task; see support/heads.py and support/squad.py."""
    kind_class = Spans if task == "squad2" else Classification
    return kind_class(pretrained.tokenizer, pretrained.config, tune, labels)


def fine_tune(model: Tuned, setup: Setup, tune: TuneConfig, seed: int) -> Iterator[int]:
    """Fine-tune a model in place, without gradient clipping. This is a generator: it yields the step whenever an
    evaluation is due, and continues once the caller has evaluated the model."""
    encoded = setup.splits["train"]
    steps = math.ceil(tune.epochs * len(encoded.ids) / tune.batch_size)
    count = min(20, math.ceil(2 * tune.epochs))  # evaluations: one per half epoch, but at most 20
    ends = {math.ceil(steps * i / count) for i in range(1, count + 1)}
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), eps=1e-6, weight_decay=tune.weight_decay,
                                  fused=True)
    drawn = batches(encoded, seed, steps, tune.batch_size)  # for each step, the indices of its inputs
    bar = tqdm(drawn, desc=f"{setup.task} seed {seed}", total=steps, leave=False, disable=None)
    for step, indices in enumerate(bar):
        model.train()  # evaluation switched dropout off
        torch.manual_seed(seed_of(seed, step, 1))  # for dropout; `batches` uses (seed, step)
        tokens, padding, targets = collate(encoded, indices, setup.worker.device)
        with setup.worker.autocast():
            logits, _ = model(tokens, padding)
        loss = setup.kind.loss(logits, targets, padding)
        loss.backward()
        factor = learning_rate_factor(step, round(tune.warmup_share * steps), steps)
        optimizer.param_groups[0]["lr"] = tune.learning_rate * factor
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 in ends:
            yield step + 1


@torch.no_grad()
def evaluate(model: Tuned, kind: Classification | Spans, encoded: Encoded, batch_size: int, device: torch.device):
    """Evaluate on a split -> {"value": the main metric, "metrics": all of them, "ranks": of H^L, for Table 3}, and the
    texts of prediction files by name. If the model has diverged (a hidden state is not finite, or an output is NaN),
    value and ranks are None, and there are no metrics or files."""
    model.eval()
    order = np.argsort([len(ids) for ids in encoded.ids], kind="stable")
    moments, outputs = Moments(), []
    for start in range(0, len(order), batch_size):
        tokens, padding, targets = collate(encoded, order[start:start + batch_size], device)
        logits, h = model(tokens, padding)
        # decode takes the targets only because they hold the start of SQuAD's passage.
        outputs.append(kind.decode(logits, targets, padding).cpu())
        moments.add(h[~padding])  # H^L of the real tokens; see rank.py
    outputs = torch.cat(outputs)[np.argsort(order)]  # back in the order of the examples
    if outputs.isnan().any() or not moments.gram.isfinite().all():
        return {"value": None, "metrics": {}, "ranks": None}, {}
    metrics, files = kind.score(outputs.numpy(), encoded)
    ranks = {name: tau_rank(moments.spectrum(centered), 0.9) for name, centered in CENTERINGS.items()}
    return {"value": metrics[kind.labels.metrics[0]], "metrics": metrics, "ranks": ranks}, files


def run_once(setup: Setup, tune: TuneConfig, seed: int) -> dict:
    """Fine-tune, and return the value, metrics, ranks and step of the best checkpoint on the dev split. If the seed is
    1, that checkpoint is also saved."""
    kind, splits, device = setup.kind, setup.splits, setup.worker.device
    encoder = setup.pretrained.new_encoder(seed)
    torch.manual_seed(seed_of(seed))  # for the head
    model = Tuned(encoder, kind.head()).to(device)
    best = None
    for step in fine_tune(model, setup, tune, seed):
        found, files = evaluate(model, kind, splits["dev"], tune.batch_size, device)
        if found["ranks"] is None:  # diverged (a correlation of constant predictions makes only the value None)
            return found  # without a value, even if an earlier checkpoint had one
        if "dev_mm" in splits:
            mismatched, _ = evaluate(model, kind, splits["dev_mm"], tune.batch_size, device)
            found["metrics"]["accuracy_mm"] = mismatched["value"]
        if best is None or results.height(found["value"]) > results.height(best["value"]):  # a tie goes to the first
            best = found | {"step": step}
            if seed == 1:  # the first seed of the result; a sweep uses seed 0
                keep(setup, model, files)
    return best


def keep(setup: Setup, model: Tuned, predictions: dict[str, str]):
    """Write encoder.pt, with everything that --predict needs, and the predictions for dev. These files stay if the run
    diverges later."""
    labels = setup.kind.labels
    write_tensors(setup.out / "encoder.pt", {
        "config": asdict(setup.pretrained.config), "model": model.state_dict(), "task": setup.task,
        "labels": list(labels.names), "scale": labels.scale, "pairs": labels.pairs})
    write_texts(setup.out, predictions)


# ---- 3. All runs of a task ----------------------------------------------------------------------------------
def finish_runs(setup: Setup, runs: list[tuple[TuneConfig, int]]) -> list[dict]:
    """Do the `runs` whose files are missing, and return the results of all. The processes of torchrun share the work by
    rank, and wait for each other's files."""
    mine = runs[setup.worker.rank::setup.worker.world_size]
    missing = [run for run in mine if not results.path_of_run(setup.out, *run).is_file()]
    for number, (tune, seed) in enumerate(missing, start=1):
        start = time.perf_counter()
        found = run_once(setup, tune, seed)
        seconds = round(time.perf_counter() - start, 2)
        setting = {name: getattr(tune, name) for name in SWEPT}
        write_json(results.path_of_run(setup.out, tune, seed),
                   found | {"setting": setting, "seed": seed, "seconds": seconds})
        listed = "  ".join(f"{name} {value:g}" for name, value in setting.items())
        left = timedelta(seconds=round((len(missing) - number) * seconds))
        print(f"{setup.task}  {listed}  seed {seed}  {setup.kind.labels.metrics[0]} "
              f"{results.format_number(found['value'])}  {seconds:.0f} s  {left} left")
    return [results.read_run(setup.out, *run) for run in runs]  # waits for the other processes


def make_setup(task: str, options: argparse.Namespace, worker: Worker) -> Setup:
    """Read the encoder and the data, encode the data, and claim the folder. Raises UserError if the folder belongs to
    other settings or data."""
    # A flag overrides the default of the task, which overrides the default of the field.
    defaults, flags = DEFAULTS[TASKS[task].group], fields_of(TuneConfig, vars(options))
    tune = TuneConfig(**defaults | flags)
    pretrained = Pretrained(options.init, tune.dropout)
    tune = replace(tune, learning_rate=tune.learning_rate or 3e-5 * (768 / pretrained.config.encoder_dim) ** 2)
    examples = read_task(task, options.data, pretrained.settings.get("val_share", VAL_SHARE))
    labels = labels_of(task, examples["train"])
    kind = make_kind(task, pretrained, tune, labels)
    splits = {split: kind.encode(found) for split, found in examples.items()}
    out = options.out / task if options.task == "glue" else options.out
    if not worker.is_main:  # the processes wait for each other's files, without a process group
        results.wait_for(out / "config.json")  # the first process writes it in open_folder
    # All processes compare these with config.json. The number of seeds may grow, and the encoder's path may change.
    settings = {"init": options.init, "task": task, "weights": pretrained.weights_hash(),
                "examples": hash_of(examples), "sweep": options.sweep, **asdict(tune)}
    inherited = pretrained.inherited()
    open_folder(out, settings | inherited, may_change=["init", *inherited])
    if worker.is_main:
        pretrained.tokenizer.save(out)
        print(f"{out}: {len(splits['train'].ids):,} training inputs")
        for split, encoded in splits.items():
            print(f"  {split}: {encoded.remark}")
    return Setup(task, pretrained, kind, splits, tune, worker, out)


def run_task(task: str, options: argparse.Namespace, worker: Worker) -> dict:
    """Fine-tune one encoder on one task: the grid with --sweep, then seeds 1, 2, ... Writes and returns result.json:
    the values of all seeds, their medians, the settings, and the ranks of Table 3."""
    setup = make_setup(task, options, worker)
    tune, kind, dim = setup.tune, setup.kind, setup.pretrained.config.encoder_dim
    sweep = []
    if options.sweep:
        flags = fields_of(TuneConfig, vars(options))
        # Explicit flags replace the grid's values. In tune, the actual learning rate has already replaced a 0.
        given = {name: getattr(tune, name) for name in flags}
        points = grid(TASKS[task].group, dim, given)
        # Seed 0, because the choice must not depend on the seeds of the result.
        sweep = finish_runs(setup, [(replace(tune, **point), 0) for point in points])
        sweep.sort(key=lambda run: results.height(run["value"]), reverse=True)
        tune = replace(tune, **sweep[0]["setting"])
    runs = finish_runs(setup, [(tune, seed) for seed in range(1, options.seeds + 1)])
    if not worker.is_main:
        return {}
    # The ranks before fine-tuning, which do not depend on the new head.
    untuned = Tuned(setup.pretrained.new_encoder(1), kind.head()).to(worker.device)
    before, _ = evaluate(untuned, kind, setup.splits["dev"], tune.batch_size, worker.device)
    summary = results.summarize(runs, before["ranks"], dim)
    result = {"task": task, "init": options.init, "metric": kind.labels.metrics[0], **summary, "tune": asdict(tune),
              "sweep": sweep}
    write_json(setup.out / "result.json", result)
    print(results.report(result), f"{setup.out}: result.json", sep="\n")
    return result


# ---- 4. Predictions for new texts ---------------------------------------------------------------------------
def predict_file(options: argparse.Namespace, device: torch.device):
    """Write the predictions of the model in --init for a file. Raises UserError if --out holds other files."""
    source = options.predict.expanduser().resolve()
    folder = Path(options.init)
    if not (folder / "encoder.pt").is_file():
        raise UserError(f"{folder}: no encoder.pt from the run of seed 1; to repeat that run, delete its file in runs/")
    state = read_tensors(folder / "encoder.pt", "model", "task", "labels", "scale", "pairs")
    task = state["task"]
    labels = Labels(TASKS[task].metrics, names=tuple(state["labels"]), scale=state["scale"], pairs=state["pairs"])
    values = read_json(folder / "config.json") | vars(options)  # --batch-size overrides the run's batch size
    tune = TuneConfig(**fields_of(TuneConfig, values))
    pretrained = Pretrained(options.init, dropout=0.0)  # for the Config and the tokenizer
    kind = make_kind(task, pretrained, tune, labels)
    model = Tuned(pretrained.new_encoder(0), kind.head()).to(device)
    load_weights(model, state["model"], folder / "encoder.pt")  # the weights of encoder and head
    encoded = kind.encode(read_file(task, source, labelled=False))
    with lock_folder(options.out):
        open_folder(options.out, {"predict": str(source), "model": short_hash((folder / "encoder.pt").read_bytes())})
        _, files = evaluate(model, kind, encoded, tune.batch_size, device)
        if task in GLUE:  # whose server expects another name
            files[submission(task, source)] = files.pop("predictions.tsv")
        write_texts(options.out, files)
    print(f"{options.out}: {', '.join(files)}\n  {encoded.remark}")


# ---- 5. Command line ----------------------------------------------------------------------------------------
def parse(argv) -> argparse.Namespace:
    """Read the command line. Flags of TuneConfig that are not given are absent from the result."""
    parser = Parser("finetune.py", __doc__)
    add = parser.add_argument
    add("--init", default="out/toy", help="run folder, checkpoint, or random:FOLDER [%(default)s]")
    add("--out", type=Path, help="folder for all results [out/TASK-INIT, or INIT/predict-FILE]")
    add("--device", default="auto", help="auto | cpu | cuda | mps [%(default)s]")
    add("--predict", type=Path, metavar="FILE", help="write predictions for this file with the fine-tuned model in "
        "--init: lines (.txt), a table with text[,text2] (.csv, .tsv, .jsonl, .parquet), or a GLUE or SQuAD test file")
    # The other flags depend on --predict, so it is read first. (Parser ignores -h until parse_args.)
    predicting = parser.parse_known_args(argv)[0].predict
    options = parse_prediction(parser, argv) if predicting else parse_tuning(parser, argv)
    try:
        TuneConfig(**fields_of(TuneConfig, vars(options)))  # checks the values
    except ValueError as error:
        parser.error(str(error))
    return options


def parse_prediction(parser: Parser, argv) -> argparse.Namespace:
    """Read the flags of --predict, which are few because the fine-tuned model has its own settings."""
    parser.prog += " --predict"
    parser.add_argument("--batch-size", type=int, default=argparse.SUPPRESS, help="inputs per batch")
    options = parser.parse_args(argv)
    options.init = str(Path(options.init.removesuffix("encoder.pt")))  # the folder, even if the file is named
    options.out = options.out or Path(options.init, f"predict-{split_name(options.predict)[0]}")
    return options


def parse_tuning(parser: Parser, argv) -> argparse.Namespace:
    """Read the flags of fine-tuning."""
    add = parser.add_argument
    add("--task", choices=[*TASKS, "glue"], default="docs", help="glue: all eight tasks and the average [%(default)s]")
    add("--data", help="folder with the files of the original releases [GLUE and SQuAD: the Hub]")
    add("--seeds", type=int, default=5, help="number of runs; the result is their median [%(default)s]")
    add("--sweep", action="store_true", help="first search the grid of Table 5 or 6; flags replace its values")
    task = parser.parse_known_args(argv)[0].task
    add_flags(parser, TuneConfig, DEFAULTS[TASKS[task].group] if task in TASKS else {})
    options = parser.parse_args(argv)
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: use a positive number")
    if task == "docs" and options.data:
        parser.error(f"--data {options.data}: --task docs reads no files; --task custom does")
    if task == "custom" and not options.data:
        parser.error("--task custom: needs --data, a folder with train and dev")
    # out/toy gives toy; out/toy/step_0001900.pt gives toy-step_0001900
    path = Path(options.init.removeprefix("random:")).resolve()
    name = f"{path.parent.name}-{path.stem}" if path.suffix == ".pt" else path.name
    prefix = "random-" if options.init.startswith("random:") else ""
    options.out = options.out or Path("out", f"{task}-{prefix}{name}")
    return options


def main(argv=None):
    options = parse(argv)
    with clear_errors("finetune.py"), explain_out_of_memory("--batch-size"):
        worker = make_worker(getattr(options, "precision", "auto"), options.device)  # the flag may be absent
        torch.set_float32_matmul_precision("highest")  # TF32 is too coarse for effective ranks
        if options.predict:
            if worker.is_main:
                predict_file(options, worker.device)
            return
        tasks = GLUE if options.task == "glue" else [options.task]
        if options.data:
            for task in tasks:  # find missing files before the first run
                find_files(task, options.data)
        locked = lock_folder(options.out) if worker.is_main else nullcontext()
        with locked:
            found = [run_task(task, options, worker) for task in tasks]
            if options.task == "glue" and worker.is_main:
                results.table1(found, options.out)


if __name__ == "__main__":
    main()
