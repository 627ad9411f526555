"""Fine-tuning: GLUE, SQuAD 2.0, and a task that needs no download.

    python finetune.py --init out/toy --task docs               # which library does this documentation belong to?
    python finetune.py --init out/base --task rte --sweep       # Table 5's grid, then the median of five seeds
    python finetune.py --init out/base --task glue --data DIR   # all eight tasks and their average, from local files
    python finetune.py --figure3 out/base/step_*.pt --task mnli # Figure 3: metric against pre-training time
    python finetune.py --init out/rte-base --predict test.tsv   # what a fine-tuned model predicts for new texts

--init is a run folder, a checkpoint, or a folder that this program wrote. --task custom reads train and dev files
(.csv, .jsonl, .parquet) with columns text[,text2],label from --data. The dev part is evaluated each half epoch, at most
20 times, and the best checkpoint of a run counts, as in the recipe that the paper refers to. It is chosen on the part
that it is reported on, so its value is a little too good; result.json has the last one's, too. The same command again
does the runs that are missing; torchrun's processes share those of a sweep. The model of seed 1 is kept for --predict.
"""
import argparse
import itertools
import json
import math
import re
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from maelm import CLS, MAELM, PAD, SEP, require, require_positive
from rank import CENTERINGS, Moments, tau_rank
from support.data import VAL_SHARE, rows_of_step, seed_of
from support.files import (Parser, UserError, alone_in, atomic, clear_errors, read_json, refuse_other_files,
                           same_settings, short_hash, write_json)
from support.run import (Place, add_flags, choose_place, figure, given_flags, learning_rate_factor, load_encoder,
                         read_tensors, run_settings, value_in, write_tensors)
from support.squad import Spans
from support.tasks import (DEFAULTS, GLUE, METRICS, SWEPT, TASKS, Encoded, Example, grid, locate, read_inputs,
                           read_task)


# ---- 1. How an encoder is fine-tuned ------------------------------------------------------------------------
@dataclass(frozen=True)
class TuneConfig:
    """How an encoder is fine-tuned; a task has defaults of its own. ValueError names a field that is wrong."""
    epochs: float = 3.0
    learning_rate: float = 0.0  # peak; 0 = 3e-5 * (768 / d)^2, inside Table 5 for base and large
    batch_size: int = 32  # examples per optimizer step
    warmup_share: float = 0.06  # of all steps, below 1: linear warm-up, then linear decay to 0
    seq_len: int = 512  # longest input in tokens, or the encoder's own limit
    dropout: float = 0.1  # in encoder and head, below 1
    weight_decay: float = 0.01  # of all parameters
    precision: str = "auto"  # auto | fp32 | bf16: of training; evaluation is in fp32
    max_query: int = 64  # SQuAD: longest question in tokens, at most half of seq_len
    doc_stride: int = 128  # SQuAD: tokens between the starts of windows, at most half a window
    max_answer: int = 30  # SQuAD: longest answer in tokens
    null_threshold: float = 0.0  # SQuAD: no answer if score of null - score of the best answer is above

    def __post_init__(self):
        require_positive(self, "epochs", "batch_size", "max_query", "doc_stride", "max_answer")
        require(
            self,
            dropout=0 <= self.dropout < 1,
            precision=self.precision in ("auto", "fp32", "bf16"),
        )


def name_of(init: str) -> str:
    """A name for what --init names, such as toy, toy-step_0000500 or random-toy."""
    path = Path(init.removeprefix("random:")).resolve()
    name = f"{path.parent.name}-{path.stem}" if path.suffix == ".pt" else path.name
    return f"random-{name}" if init.startswith("random:") else name


class Pretrained:
    """What fine-tuning starts from: an encoder; after `random:` only its shape and tokenizer. UserError without one."""

    def __init__(self, name: str, dropout: float):
        self.name, self.random = name_of(name), name.startswith("random:")
        path = Path(name.removeprefix("random:"))
        encoder, self.tokenizer, self.config = load_encoder(path)
        self.weights, self.dropped = encoder.state_dict(), replace(self.config, dropout=dropout)
        self.dim = self.config.encoder_dim
        self.val_share = run_settings(path.parent if path.is_file() else path).get("val_share", VAL_SHARE)

    def new_encoder(self, seed: int) -> nn.Module:
        """A copy of the encoder, with dropout. The seed draws random weights."""
        torch.manual_seed(seed)
        encoder = MAELM(self.dropped).encoder
        if not self.random:
            encoder.load_state_dict(self.weights)
        return encoder


# ---- 2. From examples to inputs, heads, losses and scores (SQuAD's: support/squad.py) -----------------------
class ClassifierHead(nn.Sequential):
    """H^L at [CLS] -> logits (B, C), as RoBERTa: dropout, dense, tanh, dropout, linear. PyTorch's initial weights."""

    def __init__(self, d: int, classes: int, dropout: float):
        super().__init__(
            nn.Dropout(dropout), nn.Linear(d, d), nn.Tanh(),
            nn.Dropout(dropout), nn.Linear(d, classes))

    def forward(self, h: Tensor) -> Tensor:
        """h (B, m, d) -> (B, C)."""
        return super().forward(h[:, 0])


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)


class Sentences:
    """Tasks with a label, or a number, for one or two texts: `[CLS] A [SEP]`, `[CLS] A [SEP] B [SEP]`."""

    def __init__(self, name: str, examples: list[Example], text: Pretrained, n: int):
        self.text, self.n = text, n
        self.metric = TASKS[name].metric
        self.labels = TASKS[name].labels
        self.scale = 1.0
        if name == "custom":
            found = sorted({e.label for e in examples})
            if len(found) == 1:
                raise UserError(f"all training records have the label {found[0]!r}: use two labels or more")
            numbers = [float(label) for label in found if NUMBER.fullmatch(label)]
            if len(numbers) == len(found) and not all(number.is_integer() for number in numbers):
                self.metric = "spearman"  # labels such as 3.5: to be predicted as numbers
            else:
                self.labels = tuple(found)
        if not self.labels:  # as the official code, which divides STS-B's 0 ... 5 by 5
            self.scale = max([abs(self.target(e)) for e in examples], default=0.0) or 1.0

    def target(self, example: Example) -> int | float:
        """The label as the head sees it, 0 if it is to be predicted. UserError if the task does not have it."""
        if example.label is None:
            return 0
        if self.labels and example.label in self.labels:
            return self.labels.index(example.label)
        if self.labels or not NUMBER.fullmatch(example.label):
            raise UserError(f"label {example.label!r} of {example.text[:40]!r} is not in the task: "
                            f"{', '.join(self.labels) or 'use numbers'}")
        return float(example.label) / self.scale

    def encode(self, examples: list[Example]) -> Encoded:
        """Tokens of each example. Of inputs that are too long, the longer text is cut off at the end."""
        targets = [self.target(e) for e in examples]  # a bad label is found before the long work
        ids, truncated = [], 0
        for e in tqdm(examples, "tokenizing", leave=False, disable=None):
            a = self.text.tokenizer.encode(e.text).tolist()
            b = self.text.tokenizer.encode(e.text2 or "").tolist()
            room = self.n - (2 if e.text2 is None else 3)  # for both texts
            truncated += len(a) + len(b) > room
            keep = min(len(b), max(room // 2, room - len(a)))  # tokens of b; the others are for a
            row = [CLS, *a[:room - keep], SEP]
            if e.text2 is not None:
                row += [*b[:keep], SEP]
            ids.append(np.array(row, np.int64))
        remarks = [f"{truncated:,} of {len(ids):,} inputs are cut off at {self.n} tokens"] if truncated else []
        return Encoded(ids, torch.tensor(targets), examples, [], remarks)

    def head(self) -> nn.Module:
        """A new head."""
        return ClassifierHead(self.text.dim, max(1, len(self.labels)), self.text.dropped.dropout)

    def loss(self, logits: Tensor, targets: Tensor, padding: Tensor) -> Tensor:
        """Cross-entropy in nats, or the squared error of one number; mean over the batch."""
        if self.labels:
            return F.cross_entropy(logits, targets)
        return F.mse_loss(logits[:, 0], targets)

    def decode(self, logits: Tensor, targets: Tensor, padding: Tensor) -> Tensor:
        """The logits (B, C) as they are."""
        return logits

    def score(self, outputs: np.ndarray, encoded: Encoded) -> tuple[dict[str, float], dict]:
        """Logits (N, C) -> the metric in percent, and the file of all predictions."""
        predicted = outputs.argmax(1) if self.labels else outputs[:, 0]
        value = METRICS[self.metric](predicted, encoded.targets.numpy())
        return {self.metric: 100 * value}, {"predictions.jsonl": self.rows(outputs, encoded.examples)}

    def rows(self, outputs: np.ndarray, examples: list[Example]) -> list[dict]:
        """Logits (N, C) -> of each example id, label, prediction and the probability of every label."""
        scores = torch.from_numpy(outputs).softmax(1).tolist()
        rows = []
        for i, (example, logits) in enumerate(zip(examples, outputs)):
            row = {"id": i}
            if example.label is not None:
                row["label"] = example.label if self.labels else float(example.label)
            if self.labels:
                row["prediction"] = self.labels[logits.argmax()]
                row["scores"] = dict(zip(self.labels, scores[i]))
            else:
                row["prediction"] = self.scale * float(logits[0])
            rows.append(row)
        return rows


# ---- 3. One run: section 4.1, Tables 5 and 6 ----------------------------------------------------------------
class Tuned(nn.Module):
    """An encoder and a head."""

    def __init__(self, encoder: nn.Module, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, tokens: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """tokens (B, m) int64, padding (B, m) bool -> the head's logits in float32, H^L (B, m, d)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        h = self.encoder(tokens, positions, padding)
        return self.head(h).float(), h


class Job(NamedTuple):
    """What all runs of a task have in common."""
    task: str
    text: Pretrained
    kind: Sentences | Spans
    parts: dict[str, Encoded]
    tune: TuneConfig
    place: Place
    out: Path
    remarks: list[str]


def collate(encoded: Encoded, chosen: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (B,) of a part -> tokens (B, m) int64, padding (B, m) bool, targets; m is the longest's length."""
    rows = [torch.from_numpy(encoded.ids[i]) for i in chosen]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    length = torch.tensor([len(row) for row in rows])
    padding = torch.arange(tokens.shape[1]) >= length[:, None]  # (B, m)
    targets = encoded.targets[torch.from_numpy(chosen)]
    return tokens.to(device), padding.to(device), targets.to(device)


def batches(encoded: Encoded, seed: int, steps: int, batch_size: int, pool: int = 16) -> Iterator[np.ndarray]:
    """Numbers (batch_size,) of the inputs of each step: every epoch is a permutation. Those of `pool` steps are sorted
    by length, so that a batch needs little padding, and their batches shuffled."""
    length = np.array([len(ids) for ids in encoded.ids])
    for first in range(0, steps, pool):
        group = range(first, min(first + pool, steps))  # steps
        drawn = np.concatenate([rows_of_step(seed, step, batch_size, len(length)) for step in group])
        drawn = drawn[np.argsort(length[drawn], kind="stable")]  # neighbours have like lengths
        order = np.random.default_rng(seed_of(seed, first)).permutation(len(group))  # short ones not first
        yield from drawn.reshape(len(group), batch_size)[order]


@torch.no_grad()
def predict(model: Tuned, encoded: Encoded, job: Job, batch_size: int = 64) -> tuple[np.ndarray, Moments]:
    """What the task keeps of the logits of all inputs, (N, ...) float32, and the moments of H^L over their tokens."""
    model.eval()
    order = np.argsort([len(ids) for ids in encoded.ids], kind="stable")
    moments, outputs = Moments(job.text.dim, job.place.device), []
    for start in range(0, len(order), batch_size):
        tokens, padding, targets = collate(encoded, order[start:start + batch_size], job.place.device)
        logits, h = model(tokens, padding)
        outputs.append(job.kind.decode(logits, targets, padding).cpu())
        moments.add(h[~padding])  # of real tokens only
    return torch.cat(outputs).numpy()[np.argsort(order)], moments  # in the order of the examples again


def effective_ranks(moments: Moments) -> dict[str, int]:
    """0.9-effective ranks of H^L, as Table 3."""
    return {name: tau_rank(moments.spectrum(centered), 0.9) for name, centered in CENTERINGS.items()}


def train(model: Tuned, job: Job, tune: TuneConfig, seed: int) -> Iterator[tuple[int, float]]:
    """Fine-tune in place, without clipping. Whenever the dev part is to be evaluated, yields the number of steps so far
    and the mean of their losses, which is not finite if the run has diverged."""
    encoded = job.parts["train"]
    steps = math.ceil(tune.epochs * len(encoded.ids) / tune.batch_size)
    count = min(20, math.ceil(2 * tune.epochs))  # each half epoch
    ends = {math.ceil(steps * i / count) for i in range(1, count + 1)}
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), eps=1e-6, weight_decay=tune.weight_decay,
                                  fused=True)
    total = torch.zeros((), device=job.place.device)
    drawn = tqdm(batches(encoded, seed, steps, tune.batch_size), f"{job.task} seed {seed}", steps, leave=False,
                 disable=None)
    for step, numbers in enumerate(drawn):
        model.train()  # an evaluation switches dropout off
        torch.manual_seed(seed_of(seed, step, 1))  # for dropout
        tokens, padding, targets = collate(encoded, numbers, job.place.device)
        with job.place.autocast():
            logits, _ = model(tokens, padding)
        loss = job.kind.loss(logits, targets, padding)
        loss.backward()
        factor = learning_rate_factor(step, round(tune.warmup_share * steps), steps)
        optimizer.param_groups[0]["lr"] = tune.learning_rate * factor
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step + 1 in ends:
            yield step + 1, float(total) / (step + 1)


def validate(model: Tuned, job: Job, step: int) -> tuple[dict, dict] | None:
    """Evaluate on the dev part -> value, metrics, ranks and step; files to write. None if a state is not finite."""
    outputs, moments = predict(model, job.parts["dev"], job)
    if not moments.gram.isfinite().all():
        return None
    metrics, files = job.kind.score(outputs, job.parts["dev"])
    metrics = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    ranks = effective_ranks(moments)
    return {"value": metrics[job.kind.metric], "metrics": metrics, "effective_rank": ranks, "step": step}, files


def worth(line: dict) -> float:
    """The value of a run; minus infinity for None."""
    return -math.inf if line["value"] is None else line["value"]


def write_files(folder: Path, files: dict) -> None:
    """Write files by their names and contents: what becomes JSON, or a list of rows (.jsonl) or lines."""
    for name, content in files.items():
        if name.endswith(".json"):
            write_json(folder / name, content)
            continue
        lines = [json.dumps(row) for row in content] if name.endswith(".jsonl") else content
        with atomic(folder / name) as temporary:
            temporary.write_text("\n".join(lines) + "\n")


DIVERGED = {"value": None, "last": None, "metrics": {}, "effective_rank": None}


def run_once(job: Job, run: dict) -> dict:
    """One run, of a setting and a seed -> its line in runs/. Of seed 1 model and predictions are kept in --out."""
    start, seed = time.perf_counter(), run["seed"]
    encoder = job.text.new_encoder(seed)
    torch.manual_seed(seed_of(seed))  # for the head
    model = Tuned(encoder, job.kind.head()).to(job.place.device)
    setting = {name: run[name] for name in SWEPT}
    best = None
    for step, loss in train(model, job, replace(job.tune, **setting), seed):
        found = validate(model, job, step) if math.isfinite(loss) else None
        if found is None:
            return {**run, **DIVERGED, "seconds": round(time.perf_counter() - start, 2)}
        last = found[0]
        if best is None or worth(last) > worth(best):  # of equals the first
            best, files = found
            weights = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights)  # the model itself has taken all steps
    if "dev_mm" in job.parts:
        outputs, _ = predict(model, job.parts["dev_mm"], job)
        mismatched, _ = job.kind.score(outputs, job.parts["dev_mm"])
        best["metrics"] |= {f"{name}_mm": value for name, value in mismatched.items()}
    if seed == 1:
        write_tensors(job.out / "encoder.pt", {
            "config": asdict(job.text.config), "encoder": model.encoder.state_dict(), "head": model.head.state_dict(),
            "task": job.task, "labels": list(job.kind.labels), "scale": job.kind.scale})
        write_files(job.out, files)
    seconds = round(time.perf_counter() - start, 2)
    return {**run, **best, "last": last["value"], "seconds": seconds}


# ---- 4. Many runs -------------------------------------------------------------------------------------------
def path_of_run(job: Job, run: dict) -> Path:
    """The file of a run's line."""
    name = "-".join(f"{run[field]:g}" for field in (*SWEPT, "seed"))
    return job.out / "runs" / f"{name}.json"


def complete(job: Job, runs: list[dict], options: argparse.Namespace) -> list[dict]:
    """The lines of all `runs`. torchrun's processes share those that are missing by rank."""
    for run in runs[job.place.rank::job.place.world]:
        if not path_of_run(job, run).is_file():
            line = run_once(job, run)
            write_json(path_of_run(job, run), line)
            seconds = [read_json(path)["seconds"] for path in options.out.rglob("runs/*.json")]
            left = (options.runs - len(seconds)) * np.mean(seconds) / job.place.world
            setting = "  ".join(f"{name} {line[name]:g}" for name in SWEPT)
            print(f"{job.task}  {setting}  seed {line['seed']}  {job.kind.metric} {shown(line['value'])}  "
                  f"{line['seconds']:.0f} s  {left / 3600:.1f} h left", flush=True)
    for run in runs:
        wait_for(path_of_run(job, run))
    return [read_json(path_of_run(job, run)) for run in runs]


def wait_for(path: Path) -> None:
    """Wait for a file that another of torchrun's processes writes; torchrun ends all of them if one fails."""
    while not path.is_file():
        time.sleep(0.2)


def make_job(task: str, tune: TuneConfig, options: argparse.Namespace, init: str, place: Place) -> Job:
    """Read encoder and data, and encode. UserError if the folder holds runs of another job."""
    text = Pretrained(init, tune.dropout)
    examples, remarks = read_task(task, options.data, text.val_share)
    tune = replace(tune, learning_rate=tune.learning_rate or 3e-5 * (768 / text.dim) ** 2)
    n = min(tune.seq_len, text.config.seq_len)
    if task == "squad2":
        kind = Spans(text.tokenizer, text.dim, n, tune)
    else:
        kind = Sentences(task, examples["train"], text, n)
    parts = {part: kind.encode(rows) for part, rows in examples.items()}
    remarks = remarks + [f"{part}: {remark}" for part, encoded in parts.items() for remark in encoded.remarks]
    out = options.out
    if options.figure3 or options.task == "glue":  # one of several
        out = out / f"{task}-{text.name}"
    if not place.first:
        wait_for(out / "config.json")
    else:
        weights = [tensor.numpy().tobytes() for tensor in text.new_encoder(0).state_dict().values()]
        settings = {"task": task, "weights": short_hash(b"".join(weights)), "examples": short_hash(repr(examples)),
                    "sweep": options.sweep, **asdict(tune)}
        if (out / "config.json").is_file():
            same_settings(out, read_json(out / "config.json"), settings)
        else:
            refuse_other_files(out)
        write_json(out / "config.json", {"init": init, **settings})
        text.tokenizer.save(out)
    return Job(task, text, kind, parts, tune, place, out, remarks)


def finetune(task: str, tune: TuneConfig, options: argparse.Namespace, init: str, place: Place) -> dict:
    """Fine-tune one encoder on one task: the grid with --sweep, then seeds 1, 2, ... Writes and returns result.json."""
    job = make_job(task, tune, options, init, place)
    if place.first:
        title = f"{job.out}: {len(job.parts['train'].ids):,} training inputs; runs in all: {options.runs}"
        print(title, *job.remarks, sep="\n  ", flush=True)
    setting, sweep = {name: getattr(job.tune, name) for name in SWEPT}, []
    if options.sweep:
        tried = [point | {"seed": 0} for point in grid(TASKS[task].group, job.text.dim, options.given)]
        sweep = sorted(complete(job, tried, options), key=worth, reverse=True)
        setting = {name: sweep[0][name] for name in SWEPT}
    # The grid has seed 0: the seeds of the result played no part in the choice.
    finals = complete(job, [setting | {"seed": seed} for seed in range(1, options.seeds + 1)], options)
    if not place.first:
        return {}
    result = make_result(job, init, setting, finals, sweep)
    write_json(job.out / "result.json", result)
    files = sorted(path.name for path in job.out.glob("[!.]*"))
    print(report(result), f"{job.out}: {', '.join(files)}", sep="\n", flush=True)
    return result


def median(values: list[float | None]) -> float | None:
    """The median of the seeds that did not diverge, whose value is None."""
    sound = [value for value in values if value is not None]
    return float(np.median(sound)) if sound else None


def rank_after(ranks: dict, centering: str) -> float | None:
    """The median over seeds of a rank after fine-tuning, from `effective_rank` of result.json."""
    return median([found[centering] if found else None for found in ranks["after"]])


def make_result(job: Job, init: str, setting: dict, finals: list[dict], sweep: list[dict]) -> dict:
    """result.json: values of all seeds and their medians, the settings, and the ranks of Table 3."""
    untuned = Tuned(job.text.new_encoder(1), job.kind.head())
    _, before = predict(untuned.to(job.place.device), job.parts["dev"], job)
    values = [line["value"] for line in finals]
    sound = [line["metrics"] for line in finals if line["metrics"]]  # of runs that did not diverge
    metrics = {name: median([found[name] for found in sound]) for name in (sound[0] if sound else {})}
    return {
        "task": job.task, "init": init,
        "metric": job.kind.metric, "median": median(values), "values": values, "metrics": metrics,
        "last": median([line["last"] for line in finals]),
        "setting": setting, "tune": asdict(job.tune) | setting, "remarks": job.remarks,
        "effective_rank": {"tau": 0.9, "d": job.text.dim, "before": effective_ranks(before),
                           "after": [line["effective_rank"] for line in finals]},
        "sweep": sweep,
    }


def shown(value: float | None, digits: int = 2) -> str:
    """A number, or - for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def report(result: dict) -> str:
    """result.json in three lines: the metrics, the value of the last checkpoints, and Table 3's ranks."""
    ranks = result["effective_rank"]
    metrics = "  ".join(f"{name} {shown(value)}" for name, value in result["metrics"].items())
    changes = []
    for name in CENTERINGS:
        changes.append(f"{name} {ranks['before'][name]} -> {shown(rank_after(ranks, name), digits=0)}")
    values = ", ".join(shown(value) for value in result["values"])
    return (f"{result['task']}  {metrics}  (medians; seeds: {values})\n"
            f"the best checkpoint of each run counts; the last ones have {shown(result['last'])}\n"
            f"effective rank on the dev part, before -> after, of {ranks['d']}: {', '.join(changes)}")


# ---- 5. Figure 3, the average of Table 1, and predictions for new texts -------------------------------------
def figure3(hours: dict[str, float], results: list[dict], out: Path) -> None:
    """Write figure3.json and draw figure3.png: the metric against hours of pre-training, a line for each run."""
    points = []
    for path, result in zip(hours, results):
        points.append({"run": str(Path(path).parent), "checkpoint": path, "hours": hours[path],
                       "median": result["median"], "values": result["values"],
                       "rank": {name: rank_after(result["effective_rank"], name) for name in CENTERINGS}})
    points.sort(key=lambda point: (point["run"], point["hours"]))
    write_json(out / "figure3.json", {"points": points})
    with figure(out / "figure3.png") as (_, axes):
        for run, line in itertools.groupby(points, key=lambda point: point["run"]):
            hours, medians = zip(*[(point["hours"], point["median"]) for point in line])
            axes.plot(hours, [math.nan if median is None else median for median in medians], marker="o", label=run)
        axes.set(xlabel="hours of pre-training", ylabel=f"{results[0]['metric']} (%), median of the seeds",
                 title=f"{results[0]['task']}, fine-tuned from checkpoints")
        axes.legend()
    print(f"{out}: figure3.json, figure3.png")


def table1(results: list[dict], out: Path) -> None:
    """Print the medians of GLUE's tasks and their average, a row of Table 1, and write them to result.json."""
    medians = {result["task"]: result["median"] for result in results}
    average = None if None in medians.values() else float(np.mean(list(medians.values())))
    write_json(out / "result.json", {"task": "glue", "average": average, "medians": medians, "results": results})
    print("  ".join(f"{task} {shown(value, 1)}" for task, value in (medians | {"average": average}).items()))
    print(f"{out}: result.json")


def predict_file(options: argparse.Namespace, place: Place) -> None:
    """Write predictions for the texts of a file by the fine-tuned model in --init. UserError if there is none."""
    folder, path = Path(options.init), options.predict
    if not (folder / "encoder.pt").is_file():
        raise UserError(f"--init {folder}: no encoder.pt there; --predict needs a folder that finetune.py wrote")
    state = read_tensors(folder / "encoder.pt", "head", "task", "labels", "scale")
    task = state["task"]
    if task == "squad2":
        raise UserError(f"--init {folder}: fine-tuned on squad2, which --predict does not do; choose another task")
    text = Pretrained(options.init, 0.0)
    n = min(read_json(folder / "config.json")["seq_len"], text.config.seq_len)
    kind = Sentences(task, [], text, n)
    kind.labels, kind.scale = tuple(state["labels"]), state["scale"]
    model = Tuned(text.new_encoder(0), kind.head()).to(place.device)
    model.head.load_state_dict(state["head"])
    encoded = kind.encode(read_inputs(task, path))
    out = options.out or folder / f"predict-{path.stem}"
    outputs, _ = predict(model, encoded, Job(task, text, kind, {}, TuneConfig(), place, out, []))
    rows = kind.rows(outputs, encoded.examples)
    files = {"predictions.jsonl": rows}
    if path.suffix == ".tsv" and task in GLUE:
        part = {"test_matched": "-m", "test_mismatched": "-mm"}.get(path.stem, "")  # of MNLI
        lines = [f"{row['id']}\t{row['prediction']}" for row in rows]
        files[f"{TASKS[task].folder}{part}.tsv"] = ["index\tprediction", *lines]
    write_files(out, files)
    print(f"{out}: {', '.join(files)}", *encoded.remarks, *map(json.dumps, rows[:3]), sep="\n  ")


# ---- 6. Command line ----------------------------------------------------------------------------------------
def read_command(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, TuneConfig]]:
    """Command line -> options, and for each task its TuneConfig: default < default of the task < flag."""
    parser = Parser("finetune.py", __doc__)
    add = parser.add_argument
    add("--init", default="out/toy", help="run folder, checkpoint, or random:FOLDER [%(default)s]")
    add("--task", default="docs", choices=[*TASKS, "glue"], help="glue: all eight and their average [%(default)s]")
    add("--data", help="folder with the files of the original releases [GLUE and SQuAD: the Hub]")
    add("--out", type=Path, help="folder for the runs and result.json [out/TASK-INIT]")
    add("--seeds", type=int, default=5, help="runs whose median is the result [%(default)s]")
    add("--sweep", action="store_true", help="first try the grid of Table 5 or 6; flags replace its rows")
    add("--figure3", nargs="+", metavar="CHECKPOINT", default=[], help="fine-tune each, draw metric against time")
    add("--predict", type=Path, metavar="FILE", help="predict, with the fine-tuned model in --init: "
        "lines (.txt), columns text[,text2] (.csv, .jsonl, .parquet), or a test file of GLUE (.tsv)")
    task = value_in(argv, "--task", "docs")
    add_flags(parser, TuneConfig, DEFAULTS[TASKS[task].group] if task in TASKS else {})
    options = parser.parse_args(argv)
    options.given = given_flags(options, TuneConfig)
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: use a positive number")
    if options.figure3 and options.task == "glue":
        parser.error("--figure3: needs one --task")
    if len({Path(path).resolve() for path in options.figure3}) < len(options.figure3):
        parser.error("--figure3: name each checkpoint once")
    if options.init.startswith("hf:"):
        parser.error(f"--init {options.init}: first python -m support.convert import {options.init} FOLDER")
    tasks = {}
    for task in GLUE if options.task == "glue" else [options.task]:
        try:
            tasks[task] = TuneConfig(**DEFAULTS[TASKS[task].group] | options.given)
        except ValueError as error:
            parser.error(str(error))
    return options, tasks


def main(argv: list[str] | None = None) -> None:
    options, tasks = read_command(argv)
    with clear_errors("finetune.py"):
        place = choose_place(options.given.get("precision", "auto"))
        torch.set_float32_matmul_precision("highest")  # TF32 is too coarse for effective ranks
        if options.predict:
            return predict_file(options, place)
        # What is missing is found before the first run.
        for task in tasks:
            for split in range(len(TASKS[task].files)):
                locate(task, options.data, split)
        hours = {path: read_tensors(Path(path), "seconds")["seconds"] / 3600 for path in options.figure3}
        name = "figure3" if options.figure3 else name_of(options.init)
        options.out = options.out or Path("out") / f"{options.task}-{name}"
        jobs = list(itertools.product(tasks, options.figure3 or [options.init]))
        options.runs = len(jobs) * options.seeds
        if options.sweep:  # the grid is as large for every encoder
            options.runs += sum(len(grid(TASKS[task].group, 768, options.given)) for task, _ in jobs)
        with alone_in(options.out) if place.first else nullcontext():
            results = []
            for task, init in jobs:
                results.append(finetune(task, tasks[task], options, init, place))
            if options.figure3 and place.first:
                figure3(hours, results, options.out)
            if options.task == "glue" and place.first:
                table1(results, options.out)


if __name__ == "__main__":
    main()
