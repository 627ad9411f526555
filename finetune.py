"""Fine-tuning: GLUE, SQuAD 2.0, and a task that needs no download.

    python finetune.py --init out/toy --task docs               # which library does this documentation belong to?
    python finetune.py --init out/base --task rte --sweep       # Table 5's grid, then the median of five seeds
    python finetune.py --init out/base --task glue --data DIR   # all eight tasks and their average, from local files
    python finetune.py --init out/rte-base --predict test.tsv   # what a fine-tuned model predicts for new texts

--task custom reads train and dev files (.csv, .jsonl, .parquet) with columns text[,text2],label from --data. We
evaluate on dev each half epoch, at most 20 times, and choose the best checkpoint on the split that we report, so scores
are slightly optimistic. The same command again does the runs that are missing; torchrun's processes share them.
"""
import argparse
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from maelm import PAD
from rank import CENTERINGS, Moments, tau_rank
from support.cli import (Parser, UserError, add_flags, clear_errors, explain_out_of_memory, fields_of,
                         require, require_positive)
from support.corpus import rows_of_step, seed_of
from support.documents import VAL_SHARE
from support.files import lock_folder, open_folder, read_json, short_hash, write_json, write_texts
from support.heads import Classification, Encoded, Spans, labels_and_scale
from support.models import load_encoder, load_weights, make_model, read_tensors, write_tensors
from support.tasks import DEFAULTS, GLUE, SWEPT, TASKS, find_files, grid, read_inputs, read_task
from support.worker import Worker, make_worker
from train import learning_rate_factor


# ---- 1. How an encoder is fine-tuned ------------------------------------------------------------------------
@dataclass(frozen=True)
class TuneConfig:
    """How an encoder is fine-tuned; a task has defaults of its own. ValueError names a field that is wrong."""
    epochs: float = 3.0
    learning_rate: float = 0.0  # peak, 0 or more; 0 = 3e-5 * (768 / d)^2, inside Table 5 for base and large
    batch_size: int = 32  # examples per optimizer step
    warmup_share: float = 0.06  # of all steps, 0 or more, below 1: linear warm-up, then linear decay to 0
    seq_len: int = 512  # longest input in tokens, 8 or more, or the encoder's own limit
    dropout: float = 0.1  # in encoder and head, 0 or more, below 1
    weight_decay: float = 0.01  # of all parameters, 0 or more
    precision: str = "auto"  # auto | fp32 | bf16: of training; evaluation is in fp32
    max_query: int = 64  # SQuAD: longest question in tokens, at most half of seq_len
    doc_stride: int = 128  # SQuAD: tokens between the starts of windows, at most half a window
    max_answer: int = 30  # SQuAD: longest answer in tokens

    def __post_init__(self):
        require_positive(self, "epochs", "batch_size", "max_query", "doc_stride", "max_answer")
        require(
            self,
            learning_rate=self.learning_rate >= 0, weight_decay=self.weight_decay >= 0,
            warmup_share=0 <= self.warmup_share < 1, seq_len=self.seq_len >= 8,
            dropout=0 <= self.dropout < 1, precision=self.precision in ("auto", "fp32", "bf16"),
        )


def name_of(init: str) -> str:
    """A name for what --init names, such as toy, toy-step_0000500 or random-toy."""
    path = Path(init.removeprefix("random:")).resolve()
    name = f"{path.parent.name}-{path.stem}" if path.suffix == ".pt" else path.name
    return f"random-{name}" if init.startswith("random:") else name


class Pretrained:
    """What fine-tuning starts from: an encoder; after `random:` only its shape and tokenizer. UserError without one."""
    def __init__(self, name: str, dropout: float):
        encoder, self.tokenizer, config, self.settings = load_encoder(Path(name.removeprefix("random:")))
        self.config = replace(config, dropout=dropout)
        self.weights = None if name.startswith("random:") else encoder.state_dict()

    def new_encoder(self, seed: int) -> nn.Module:
        """A copy of the encoder, with dropout. The seed draws random weights."""
        torch.manual_seed(seed)
        encoder = make_model(self.config, self.settings.get("position_init", "normal")).encoder
        if self.weights is not None:
            encoder.load_state_dict(self.weights)
        return encoder


# ---- 2. One run: section 4.1, Tables 5 and 6 ----------------------------------------------------------------
class Tuned(nn.Module):
    def __init__(self, encoder: nn.Module, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, tokens, padding):
        """tokens (B, m) int64, padding (B, m) bool -> the head's logits in float32, H^L (B, m, d)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        h = self.encoder(tokens, positions, padding)
        return self.head(h).float(), h


class Setup(NamedTuple):
    """What all runs of a task have in common."""
    task: str
    pretrained: Pretrained
    kind: Classification | Spans
    splits: dict[str, Encoded]
    tune: TuneConfig
    worker: Worker
    out: Path
    remarks: list[str]


def collate(encoded: Encoded, chosen, device: torch.device):
    """Inputs (B,) of a split -> tokens (B, m) int64, padding (B, m) bool, targets; m is the longest's length."""
    ids = [torch.from_numpy(encoded.ids[i]) for i in chosen]
    tokens = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD).to(device)
    return tokens, tokens == PAD, encoded.targets[chosen].to(device)


def batches(encoded: Encoded, seed: int, steps: int, batch_size: int):
    """Numbers (batch_size,) of the inputs of each step, in every epoch a permutation; a batch has like lengths."""
    length = np.array([len(ids) for ids in encoded.ids])
    for group in range(math.ceil(steps / 16)):  # of sixteen steps; the last one may have fewer
        drawn = rows_of_step(seed, group, 16 * batch_size, len(length))[:(steps - 16 * group) * batch_size]
        drawn = drawn[np.argsort(length[drawn], kind="stable")]  # neighbours have like lengths
        random = np.random.default_rng(seed_of(seed, 16 * group))
        yield from random.permutation(drawn.reshape(-1, batch_size))  # short ones not first


@torch.no_grad()
def outputs_of(model: Tuned, kind: Classification | Spans, encoded: Encoded, device: torch.device):
    """What `kind` decodes of all inputs, (N, ...) float32, and Table 3's ranks of H^L. UserError for NaN in H^L."""
    model.eval()
    order = np.argsort([len(ids) for ids in encoded.ids], kind="stable")
    moments, outputs = Moments(), []
    for start in range(0, len(order), 64):
        tokens, padding, targets = collate(encoded, order[start:start + 64], device)
        logits, h = model(tokens, padding)
        outputs.append(kind.decode(logits, targets, padding).cpu())
        moments.add(h[~padding])  # of real tokens only
    ranks = {name: tau_rank(moments.spectrum(centered), 0.9) for name, centered in CENTERINGS.items()}
    return torch.cat(outputs).numpy()[np.argsort(order)], ranks  # in the order of the examples again


def fine_tune(model: Tuned, setup: Setup, tune: TuneConfig, seed: int) -> Iterator[int]:
    """Fine-tune in place, without clipping. Yields the number of steps so far whenever it is time for an evaluation."""
    encoded = setup.splits["train"]
    steps = math.ceil(tune.epochs * len(encoded.ids) / tune.batch_size)
    count = min(20, math.ceil(2 * tune.epochs))  # each half epoch
    ends = {math.ceil(steps * i / count) for i in range(1, count + 1)}
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), eps=1e-6, weight_decay=tune.weight_decay,
                                  fused=True)
    drawn = tqdm(batches(encoded, seed, steps, tune.batch_size), f"{setup.task} seed {seed}", steps, leave=False,
                 disable=None)
    for step, numbers in enumerate(drawn):
        model.train()  # an evaluation switches dropout off
        torch.manual_seed(seed_of(seed, step, 1))  # for dropout
        tokens, padding, targets = collate(encoded, numbers, setup.worker.device)
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


DIVERGED = {"value": None, "metrics": {}, "effective_rank": None, "step": None}


def evaluate(model: Tuned, setup: Setup, step: int) -> tuple[dict, dict[str, str]]:
    """Evaluate on dev and, of MNLI, on dev_mm -> the fields of DIVERGED, and files with the predictions by name. A
    value or metric is None for NaN. UserError if a hidden state is not finite."""
    kind, splits, device = setup.kind, setup.splits, setup.worker.device
    outputs, ranks = outputs_of(model, kind, splits["dev"], device)
    metrics, files = kind.score(outputs, splits["dev"])
    if "dev_mm" in splits:
        outputs, _ = outputs_of(model, kind, splits["dev_mm"], device)
        metrics["accuracy_mm"] = kind.score(outputs, splits["dev_mm"])[0]["accuracy"]
    metrics = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return {"value": metrics[kind.metric], "metrics": metrics, "effective_rank": ranks, "step": step}, files


def sort_value(line: dict) -> float:
    """The value of a run or evaluation to sort by: None is the lowest."""
    return -math.inf if line["value"] is None else line["value"]


def run_once(setup: Setup, run: dict[str, float]) -> dict:
    """One run, of a setting and a seed -> its line in runs/. Of seed 1 model and predictions are kept in --out."""
    start, seed = time.perf_counter(), run["seed"]
    encoder = setup.pretrained.new_encoder(seed)
    torch.manual_seed(seed_of(seed))  # for the head
    model = Tuned(encoder, setup.kind.head()).to(setup.worker.device)
    tune = replace(setup.tune, **fields_of(TuneConfig, run))
    best = None
    try:
        for step in fine_tune(model, setup, tune, seed):
            last, files = evaluate(model, setup, step)
            if best is None or sort_value(last) > sort_value(best):  # of equals the first
                best, kept = last, files
                weights = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    except UserError:  # hidden states with NaN or infinity
        best = last = DIVERGED
    if seed == 1 and best is not DIVERGED:
        write_tensors(setup.out / "encoder.pt", {
            "config": asdict(setup.pretrained.config), "model": weights, "task": setup.task,
            "labels": list(setup.kind.labels), "scale": setup.kind.scale})
        write_texts(setup.out, kept)
    return run | best | {"last": last["value"], "last_rank": last["effective_rank"], "last_step": last["step"],
                         "seconds": round(time.perf_counter() - start, 2)}


# ---- 3. Many runs -------------------------------------------------------------------------------------------
def path_of_run(setup: Setup, run: dict) -> Path:
    """The file of a run's line."""
    name = "-".join(f"{run[field]:g}" for field in (*SWEPT, "seed"))
    return setup.out / "runs" / f"{name}.json"


def read_run(setup: Setup, run: dict) -> dict | None:
    """The line of a run; None if it is missing, or seed 1's model is. UserError if it is damaged."""
    path = path_of_run(setup, run)
    if not path.is_file():
        return None
    line = read_json(path, "seed", "step", advice="delete it: that run is done again")
    lost = run["seed"] == 1 and line["step"] and not (setup.out / "encoder.pt").is_file()
    return None if lost else line


def finish_runs(setup: Setup, runs: list[dict]) -> list[dict]:
    """The lines of all `runs`. torchrun's processes share those that are missing by rank."""
    mine = runs[setup.worker.rank::setup.worker.world_size]
    missing = [run for run in mine if read_run(setup, run) is None]
    for number, run in enumerate(missing, start=1):
        line = run_once(setup, run)
        write_json(path_of_run(setup, run), line)
        setting = "  ".join(f"{name} {line[name]:g}" for name in SWEPT)
        left = (len(missing) - number) * line["seconds"] / 3600
        print(f"{setup.task}  {setting}  seed {line['seed']}  {setup.kind.metric} {format_number(line['value'])}  "
              f"{line['seconds']:.0f} s  {left:.1f} h left")
    for run in runs:
        wait_for(path_of_run(setup, run))
    return [read_run(setup, run) for run in runs]


def wait_for(path: Path):
    """Wait for a file that another of torchrun's processes writes; torchrun ends all of them if one fails."""
    while not path.is_file():
        time.sleep(0.2)


def make_kind(task: str, pretrained: Pretrained, tune: TuneConfig, *labels) -> Classification | Spans:
    """The kind of a task; `labels` are metric, names and scale."""
    config = pretrained.config
    shape = pretrained.tokenizer, config.encoder_dim, min(tune.seq_len, config.seq_len)
    return Spans(*shape, tune) if task == "squad2" else Classification(*shape, tune.dropout, *labels)


def make_setup(task: str, options: argparse.Namespace, worker: Worker) -> Setup:
    """Read encoder and data, encode, and make the folder. UserError if it holds runs of another setup."""
    tune = options.tasks[task]
    pretrained = Pretrained(options.init, tune.dropout)
    rate = tune.learning_rate or 3e-5 * (768 / pretrained.config.encoder_dim) ** 2
    tune = replace(tune, learning_rate=rate)
    examples, remarks = read_task(task, options.data, pretrained.settings.get("val_share", VAL_SHARE))
    kind = make_kind(task, pretrained, tune, *labels_and_scale(task, examples["train"]))
    splits = {split: kind.encode(found) for split, found in examples.items()}
    for split, encoded in splits.items():
        remarks += [f"{split}: {remark}" for remark in encoded.remarks]
    out = options.out
    if options.task == "glue":
        out = out / f"{task}-{name_of(options.init)}"
    if worker.is_main:
        weights = [tensor.numpy().tobytes() for tensor in pretrained.new_encoder(0).state_dict().values()]
        settings = {"init": options.init, "task": task, "weights": short_hash(b"".join(weights)),
                    "examples": short_hash(repr(examples)), "sweep": options.sweep, **asdict(tune)}
        open_folder(out, settings, may_change=["init"])
        pretrained.tokenizer.save(out)
        print(f"{out}: {len(splits['train'].ids):,} training inputs", *remarks, sep="\n  ")
    wait_for(out / "config.json")
    return Setup(task, pretrained, kind, splits, tune, worker, out, remarks)


def run_task(task: str, options: argparse.Namespace, worker: Worker) -> dict:
    """Fine-tune one encoder on one task: the grid with --sweep, then seeds 1, 2, ... Writes and returns result.json:
    values of all seeds and their medians, the settings, and the ranks of Table 3."""
    setup = make_setup(task, options, worker)
    kind = setup.kind
    setting, sweep = {name: getattr(setup.tune, name) for name in SWEPT}, []
    if options.sweep:
        tried = [point | {"seed": 0} for point in grid(TASKS[task].group, kind.dim, vars(options))]
        sweep = sorted(finish_runs(setup, tried), key=sort_value, reverse=True)
        setting = {name: sweep[0][name] for name in SWEPT}
    # The grid has seed 0: the seeds of the result played no part in the choice.
    finals = finish_runs(setup, [setting | {"seed": seed} for seed in range(1, options.seeds + 1)])
    if not worker.is_main:
        return {}
    untuned = Tuned(setup.pretrained.new_encoder(1), kind.head()).to(worker.device)
    _, ranks = outputs_of(untuned, kind, setup.splits["dev"], worker.device)
    values = [line["value"] for line in finals]
    names = dict.fromkeys(name for line in finals for name in line["metrics"])  # a run that diverged has none
    result = {
        "task": task, "init": options.init, "metric": kind.metric, "median": median(values), "values": values,
        "metrics": {name: median([line["metrics"].get(name) for line in finals]) for name in names},
        "last": median([line["last"] for line in finals]),
        "setting": setting, "tune": asdict(setup.tune) | setting, "remarks": setup.remarks,
        "effective_rank": {
            "tau": 0.9, "d": kind.dim, "before": ranks,
            "after": [line["effective_rank"] for line in finals],
            "at_the_end": [line["last_rank"] for line in finals],
            "steps": [[line["step"], line["last_step"]] for line in finals]},
        "sweep": sweep}
    write_json(setup.out / "result.json", result)
    print(report(result), f"{setup.out}: result.json", sep="\n")
    return result


def median(values: list[float | None]) -> float | None:
    """The median of the seeds that did not diverge, whose value is None."""
    sound = [value for value in values if value is not None]
    return float(np.median(sound)) if sound else None


def rank_after(ranks: dict, centering: str, when: str = "after") -> float | None:
    """The median over seeds of a rank after fine-tuning, from `effective_rank` of result.json."""
    return median([found[centering] if found else None for found in ranks[when]])


def format_number(value: float | None, digits: int = 2) -> str:
    """A number, or - for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def report(result: dict) -> str:
    """result.json in three lines: the metrics, the value of the last checkpoints, and Table 3's ranks."""
    ranks = result["effective_rank"]
    metrics = "  ".join(f"{name} {format_number(value)}" for name, value in result["metrics"].items())
    values = ", ".join(format_number(value) for value in result["values"])
    changes = []
    for name in CENTERINGS:
        changes.append(f"{name} {ranks['before'][name]} -> {format_number(rank_after(ranks, name), digits=0)}")
    return (f"{result['task']}  {metrics}  (medians; seeds: {values})\n"
            f"the best checkpoint of each run counts; the last ones have {format_number(result['last'])}\n"
            f"effective rank on the dev split, before -> after, of {ranks['d']}: {', '.join(changes)}")


# ---- 4. The average of Table 1, and predictions for new texts -----------------------------------------------
def table1(results: list[dict], out: Path):
    """Print the medians of GLUE's tasks and their average, a row of Table 1, and write them to result.json."""
    medians = {result["task"]: result["median"] for result in results}
    average = None if None in medians.values() else float(np.mean(list(medians.values())))
    write_json(out / "result.json", {"task": "glue", "average": average, "medians": medians, "results": results})
    print("  ".join(f"{task} {format_number(value, 1)}" for task, value in (medians | {"average": average}).items()))
    print(f"{out}: result.json")


def predict_file(folder: Path, source: str, out: Path, device: torch.device):
    """Write predictions for the texts of a file by the model that this program left in a folder. UserError if none."""
    state = read_tensors(folder / "encoder.pt", "model", "task", "labels", "scale")
    settings, task = read_json(folder / "config.json", *asdict(TuneConfig())), state["task"]
    tune = TuneConfig(**fields_of(TuneConfig, settings))
    pretrained = Pretrained(str(folder), 0.0)
    kind = make_kind(task, pretrained, tune, TASKS[task].metric, state["labels"], state["scale"])
    model = Tuned(pretrained.new_encoder(0), kind.head()).to(device)
    load_weights(model, state["model"], folder / "encoder.pt")
    encoded = kind.encode(read_inputs(task, source))
    outputs, _ = outputs_of(model, kind, encoded, device)
    _, files = kind.score(outputs, encoded)  # a score needs labels
    if task in GLUE and not source.endswith(".txt"):  # as GLUE's server takes it
        suffix = "-mm" if "mismatched" in source else "-m" if task == "mnli" else ""
        lines = [f"{line['id']}\t{line['prediction']}\n" for line in kind.predictions(outputs, encoded)]
        files[f"{TASKS[task].folder}{suffix}.tsv"] = "".join(["index\tprediction\n", *lines])
    write_texts(out, files)
    print(f"{out}: {', '.join(files)}", *encoded.remarks, sep="\n  ")


# ---- 5. Command line ----------------------------------------------------------------------------------------
def parse(argv) -> argparse.Namespace:
    """Read the command line; `tasks` holds the TuneConfig of each task, default < default of the task < flag."""
    parser = Parser("finetune.py", __doc__)
    add = parser.add_argument
    add("--init", default="out/toy", help="run folder, checkpoint, or random:FOLDER [%(default)s]")
    add("--task", default="docs", choices=[*TASKS, "glue"], help="glue: all eight and their average [%(default)s]")
    add("--data", help="folder with the files of the original releases [GLUE and SQuAD: the Hub]")
    add("--out", type=Path, help="folder for the runs and result.json [out/TASK-INIT]")
    add("--seeds", type=int, default=5, help="runs whose median is the result [%(default)s]")
    add("--device", default="auto", help="auto | cpu | cuda | mps [%(default)s]")
    add("--sweep", action="store_true", help="first try the grid of Table 5 or 6; flags replace its values")
    add("--predict", metavar="FILE", default="", help="predict, with the fine-tuned model in --init: lines (.txt), "
        "columns text[,text2] (.csv, .jsonl, .parquet), a test file of GLUE, the Hub or SQuAD, or hf:[SPLIT]")
    task = parser.parse_known_args(argv)[0].task
    add_flags(parser, TuneConfig, DEFAULTS[TASKS[task].group] if task in TASKS else {})
    options = parser.parse_args(argv)
    given = fields_of(TuneConfig, vars(options))
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: use a positive number")
    if options.task == "docs" and options.data:
        parser.error(f"--data {options.data}: --task docs reads only this machine's documentation; leave --data out")
    if options.task == "custom" and not options.data and not options.predict:
        parser.error("--task custom needs --data: a folder with train and dev files")
    names = GLUE if options.task == "glue" else [options.task]
    try:
        options.tasks = {task: TuneConfig(**DEFAULTS[TASKS[task].group] | given) for task in names}
    except ValueError as error:
        parser.error(str(error))
    out = Path("out") / f"{options.task}-{name_of(options.init)}"
    if options.predict:
        out = Path(options.init) / f"predict-{Path(options.predict.removeprefix('hf:') or 'test').stem}"
    options.out = options.out or out
    return options


def main(argv=None):
    options = parse(argv)
    with clear_errors("finetune.py"), explain_out_of_memory("--batch-size"):
        worker = make_worker(getattr(options, "precision", "auto"), options.device)
        torch.set_float32_matmul_precision("highest")  # TF32 is too coarse for effective ranks
        if options.predict:
            return predict_file(Path(options.init), options.predict, options.out, worker.device)
        for task in options.tasks if options.data else ():  # what is missing is found before the first run
            find_files(task, options.data)
        with lock_folder(options.out) if worker.is_main else nullcontext():
            results = [run_task(task, options, worker) for task in options.tasks]
            if options.task == "glue" and worker.is_main:
                table1(results, options.out)


if __name__ == "__main__":
    main()
