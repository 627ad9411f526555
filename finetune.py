"""Fine-tuning: GLUE, SQuAD 2.0, and a task that needs no download.

    python finetune.py --init out/toy --task docs               # which library does this documentation belong to?
    python finetune.py --init out/base --task rte --sweep       # Table 5's grid, then the median of five seeds
    python finetune.py --init out/base --task glue --data DIR   # all eight tasks and their average, from local files
    python finetune.py --figure3 out/base/step_*.pt --task mnli # Figure 3: metric against pre-training time

The decoder is dropped and the encoder fine-tuned on text without [MASK]: section 4.1, Appendices B and D. --init is
a run folder, a checkpoint, a folder that this program wrote, random:FOLDER (a fresh encoder of that shape), or
hf:NAME. --data is a folder with the files of the original releases; without it they come from the Hugging Face Hub.
--task custom reads train and dev files (.csv, .jsonl, .parquet) with columns text[,text2],label from --data.

Several processes share the work: start the command as often as you like, or with torchrun. Each run appends a line
to sweep.jsonl; the same command again does what is missing.
"""
import argparse
import copy
import csv
import fcntl
import hashlib
import itertools
import json
import math
import re
import string
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from data import (Parser, Tokenizer, UserError, atomic, clear_errors, in_validation, lines, read_docs, rows_of_step,
                  seed_of, write_json)
from maelm import CLS, MAELM, PAD, SEP
from rank import CENTERINGS, Moments, figure, load_encoder, open_hub, tau_rank
from train import Place, TrainConfig, add_flags, learning_rate_factor, set_up


# ---- 1. Tasks: section 4.1, App. B --------------------------------------------------------------------------
@dataclass(frozen=True)
class Task:
    """One row of Table 1, as data: where it is, what its columns are called, how it is measured."""
    group: str  # small | large | squad: whose defaults and grid it has (Tables 5 and 6)
    metric: str = "accuracy"
    labels: tuple[str, ...] = ()  # in the Hub's order; empty: a number, or found in the training part
    folder: str = ""  # of the original release
    hub: str = ""  # NAME:CONFIG
    columns: tuple[str, ...] = ()  # text, text2 if any, label: in the TSV
    hub_columns: tuple[str, ...] = ()  # and on the Hub, if others
    header: tuple[str, ...] = ()  # column names of a TSV without a header
    rows: tuple[int, ...] = ()  # official counts: train, dev, dev_mm
    files: tuple[str, ...] = ("train.tsv", "dev.tsv")
    splits: tuple[str, ...] = ("train", "validation")


PARTS = ("train", "dev", "dev_mm")  # dev_mm: MNLI's mismatched part
PAIR = ("sentence1", "sentence2", "label")
ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    "mnli": Task("large", "accuracy", ("entailment", "neutral", "contradiction"), "MNLI", "nyu-mll/glue:mnli",
                 ("sentence1", "sentence2", "gold_label"), ("premise", "hypothesis", "label"), (),
                 (392_702, 9_815, 9_832), ("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv"),
                 ("train", "validation_matched", "validation_mismatched")),
    "qqp": Task("large", "accuracy", ("0", "1"), "QQP", "nyu-mll/glue:qqp", ("question1", "question2", "is_duplicate"),
                ("question1", "question2", "label"), (), (363_846, 40_430)),
    "qnli": Task("large", "accuracy", ENTAILMENT, "QNLI", "nyu-mll/glue:qnli", ("question", "sentence", "label"),
                 rows=(104_743, 5_463)),
    "sst2": Task("large", "accuracy", ("0", "1"), "SST-2", "nyu-mll/glue:sst2", ("sentence", "label"),
                 rows=(67_349, 872)),
    "cola": Task("small", "matthews", ("0", "1"), "CoLA", "nyu-mll/glue:cola", ("sentence", "label"), (),
                 ("source", "label", "star", "sentence"), (8_551, 1_043)),
    "rte": Task("small", "accuracy", ENTAILMENT, "RTE", "nyu-mll/glue:rte", PAIR, rows=(2_490, 277)),
    "mrpc": Task("small", "accuracy", ("0", "1"), "MRPC", "nyu-mll/glue:mrpc",
                 ("#1 String", "#2 String", "Quality"), PAIR, rows=(3_668, 408)),
    "stsb": Task("small", "spearman", (), "STS-B", "nyu-mll/glue:stsb", ("sentence1", "sentence2", "score"), PAIR,
                 rows=(5_749, 1_500)),
    "squad2": Task("squad", "f1", (), "SQuAD", "rajpurkar/squad_v2", rows=(130_319, 11_873),
                   files=("train*.json", "dev*.json")),
    "docs": Task("docs", "accuracy", ("torch", "sympy", "python", "pandas", "matplotlib", "numpy", "networkx",
                                      "huggingface_hub")),
    "custom": Task("small", "accuracy", columns=("text", "text2", "label"), files=("train.*", "dev.*")),
}
GLUE = ("mnli", "qqp", "qnli", "sst2", "cola", "rte", "mrpc", "stsb")  # Table 1, left to right


@dataclass(frozen=True)
class TuneConfig:
    """How an encoder is fine-tuned; Tables 5 and 6. Raises ValueError naming a bad field."""
    epochs: float = 3.0
    learning_rate: float = 0.0  # peak; 0 = 3e-5 * (768 / d)^2, inside Table 5 for base and large
    batch_size: int = 32  # examples per optimizer step
    warmup_share: float = 0.06  # of all steps: linear warm-up, then linear decay to 0
    seq_len: int = 512  # longest input in tokens, or the encoder's own limit
    dropout: float = 0.1  # in encoder and head
    weight_decay: float = 0.01  # of all parameters
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_epsilon: float = 1e-6
    precision: str = "auto"  # auto | fp32 | bf16: of training; evaluation is in fp32
    max_query: int = 64  # SQuAD: longest question in tokens, at most half of seq_len
    doc_stride: int = 128  # SQuAD: tokens between the starts of windows, at most half a window
    max_answer: int = 30  # SQuAD: longest answer in tokens
    n_best: int = 20  # SQuAD: answers kept for each window and question
    null_threshold: float = 0.0  # SQuAD: no answer if score of null - score of the best answer is above
    max_train: int = 0  # use so many training examples; 0 = all
    max_dev: int = 0  # and so many for evaluation

    def __post_init__(self):
        for name, sound, fix in (
            *((f, getattr(self, f) > 0, "use a positive number") for f in (
                "epochs", "batch_size", "adam_epsilon", "max_query", "doc_stride", "max_answer", "n_best")),
            *((f, getattr(self, f) >= 0, "use 0 or a positive number") for f in (
                "learning_rate", "weight_decay", "max_train", "max_dev")),
            *((f, 0 <= getattr(self, f) < 1, "use 0 <= value < 1") for f in (
                "warmup_share", "dropout", "adam_beta1", "adam_beta2")),
            ("seq_len", self.seq_len >= 8, "use at least 8"),
            ("precision", self.precision in ("auto", "fp32", "bf16"), "use auto, fp32 or bf16"),
        ):
            if not sound:
                raise ValueError(f"{name}={getattr(self, name)!r}: {fix}")


DEFAULTS = {"small": dict(epochs=10.0, batch_size=16), "large": dict(), "squad": dict(batch_size=16),
            "docs": dict(epochs=5.0, batch_size=16, learning_rate=1.5e-3)}
SWEPT = ("epochs", "learning_rate", "batch_size", "warmup_share")
SWEEPS = {  # (group, size of the encoder) -> grid; Tables 5 and 6
    ("small", "base"): ((2.0, 3.0, 5.0, 10.0), (2e-5, 3e-5, 4e-5, 5e-5), (16, 32), (0.06, 0.10)),
    ("small", "large"): ((2.0, 3.0, 5.0, 10.0), (7e-6, 1e-5, 2e-5, 3e-5), (16, 32), (0.06, 0.10)),
    ("large", "base"): ((2.0, 3.0, 5.0), (1e-5, 2e-5, 3e-5, 4e-5), (32,), (0.06,)),
    ("large", "large"): ((2.0, 3.0, 5.0), (5e-6, 7e-6, 1e-5, 2e-5), (32,), (0.06,)),
    ("squad", "base"): ((2.0, 3.0), (2e-5, 3e-5, 4e-5, 5e-5), (16, 32), (0.06, 0.10)),
    ("squad", "large"): ((2.0, 3.0), (7e-6, 1e-5, 2e-5, 3e-5), (16, 32), (0.06, 0.10)),
}


# ---- 2. Reading the parts of a task -------------------------------------------------------------------------
class Example(NamedTuple):
    """One or two texts and a label as it stands in the file."""
    text: str
    text2: str | None
    label: str


class Question(NamedTuple):
    """A SQuAD question; no answers = unanswerable. `answers` are (first character, text)."""
    id: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]


def read_tsv(path: Path, header: tuple[str, ...] = ()) -> Iterator[dict]:
    """Rows of a GLUE file: tab-separated, quotes are plain characters, the first row names the columns. Rows that are
    cut off, as a few of QQP's, are left out."""
    rows = (line.rstrip("\r\n").split("\t") for line in lines(path))
    names = header or next(rows, ())
    return (dict(zip(names, row)) for row in rows if len(row) >= len(names))


def read_csv(path: Path) -> Iterator[dict]:
    """Rows of a .csv file; the first one names the columns."""
    return csv.DictReader(lines(path))


def read_jsonl(path: Path) -> Iterator[dict]:
    """The objects of a .jsonl file, one a line."""
    for number, line in enumerate(lines(path), start=1):
        try:
            record = json.loads(line) if line.strip() else None
        except json.JSONDecodeError as error:
            raise UserError(f"{path}, line {number}: not JSON: {error}") from error
        if record is not None:
            yield record if isinstance(record, dict) else {}


def read_parquet(path: Path) -> list[dict]:
    """Rows of a .parquet file."""
    import pyarrow
    import pyarrow.parquet
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path}: not a Parquet file ({error})") from error


FORMATS = {".csv": read_csv, ".jsonl": read_jsonl, ".parquet": read_parquet, ".tsv": read_tsv}


def examples_of(records: Iterable[dict], columns: tuple[str, ...], where: str) -> list[Example]:
    """Records -> examples. `columns` are text, text2 (if any; of `text2` it is optional) and label. UserError for a
    column that the first record lacks, or a value that a later one lacks."""
    found = []
    for number, record in enumerate(records, start=1):
        used = [c for c in columns if c != "text2" or "text2" in record]
        if missing := [c for c in used if record.get(c) is None]:
            raise UserError(f"{where}, record {number}: no column `{missing[0]}`; found: {', '.join(map(str, record))}")
        text, *text2, label = (str(record[c]).strip() for c in used)
        found.append(Example(text, text2[0] if text2 else None, label))
    return found


def read_squad(path: Path) -> list[Question]:
    """The questions of a SQuAD JSON file, version 1.1 or 2.0."""
    try:
        articles = json.loads("".join(lines(path)))["data"]
        return [Question(q["id"], q["question"].strip(), paragraph["context"], tuple(
            (a["answer_start"], a["text"]) for a in q["answers"]) if not q.get("is_impossible") else ())
            for article in articles for paragraph in article["paragraphs"] for q in paragraph["qas"]]
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: not in the format of SQuAD: no {error}") from error


def read_hub(task: Task, split: str) -> list[dict]:
    """Records of a part of a Hub data set, class labels as they stand in the original files."""
    import datasets
    path, _, config = task.hub.partition(":")
    try:
        records = datasets.load_dataset(path, config or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(f"hf:{task.hub}: cannot be loaded ({(str(error).splitlines() or ['no reason'])[0]}); is the "
                        "network there? --data DIR reads the original files, --task docs needs neither") from error
    if not task.labels:
        return list(records)
    return [{**record, "label": task.labels[record["label"]]} for record in records]


def read_docs_parts(task: Task, val_share: float, train: int = 100, dev: int = 150) -> dict[str, list[Example]]:
    """Documentation strings labelled with their library, at most `train` and `dev` of each library, drawn by hash.

    No text of the pre-training validation part is in either; the next tenth of all documents, by the same hash, is
    `dev`. So pre-training has read the texts of both parts, without labels, and its validation loss stays honest."""
    found = {"train": [], "dev": []}
    size = {"train": train, "dev": dev}
    documents = [(library, text) for library, text in read_docs(progress=sys.stderr.isatty()) if library in task.labels
                 and not in_validation(text, val_share)]
    count = Counter()
    for library, text in sorted(documents, key=lambda item: hashlib.blake2b(item[1].encode(errors="replace")).digest()):
        part = "dev" if in_validation(text, val_share + 0.1) else "train"
        count[part, library] += 1
        if count[part, library] <= size[part]:
            found[part].append(Example(text, None, library))
    return found


def locate(name: str, data: str | None, split: int) -> Path | None:
    """The file of a part of task `name`; None if it comes from the Hub, or is dev_mm and missing. UserError if
    another is missing."""
    task = TASKS[name]
    if data is None and not task.hub and name != "docs":
        raise UserError(f"--task {name} needs --data: a folder with {' and '.join(task.files)}")
    if data is None or name == "docs":
        return None
    root = Path(data).expanduser()
    found = [p for folder in (root / task.folder, root) for p in sorted(folder.glob(task.files[split]))
             if p.suffix in {*FORMATS, ".json"}]
    if not found and PARTS[split] != "dev_mm":
        raise UserError(f"--data {data}: no {task.files[split]} there" + f" or in {task.folder}/" * bool(task.folder))
    return found[0] if found else None


def read_part(name: str, data: str | None, split: int) -> list | None:
    """The examples or questions of a part of task `name`; None if it is missing."""
    task, path = TASKS[name], locate(name, data, split)
    if path is None and data is not None:
        return None
    if path is not None and name == "squad2":
        return read_squad(path)
    if path is not None:
        records = read_tsv(path, task.header) if path.suffix == ".tsv" else FORMATS[path.suffix](path)
        return examples_of(records, task.columns, str(path))
    records = read_hub(task, task.splits[split])
    if name == "squad2":
        return [Question(r["id"], r["question"], r["context"],
                         tuple(zip(r["answers"]["answer_start"], r["answers"]["text"]))) for r in records]
    return examples_of(records, task.hub_columns or task.columns, f"hf:{task.hub}")


@lru_cache(maxsize=1)
def read_task(name: str, data: str | None, val_share: float, max_train: int, max_dev: int) -> tuple[dict, list[str]]:
    """The parts of a task, {"train": [...], "dev": [...]}, and remarks on what differs from the official release.
    `val_share` is what pre-training held out (docs). UserError for an empty part or an answer not in its context."""
    task = TASKS[name]
    parts = read_docs_parts(task, val_share) if name == "docs" else {
        part: read_part(name, data, i) for i, part in enumerate(PARTS[:len(task.files)])}
    remarks = [f"{part} is missing: not evaluated" for part, rows in parts.items() if rows is None]
    parts = {part: rows for part, rows in parts.items() if rows is not None}
    for part, rows in parts.items():
        where = f"{name}, part {part}" + f" in {data}" * (data is not None)
        if not rows:
            raise UserError(f"{where}: empty; use another --data")
        if task.rows and len(rows) != (official := task.rows[PARTS.index(part)]):
            remarks.append(f"{part} has {len(rows):,} rows, the official one {official:,}: not comparable with "
                           "published numbers")
        for q in rows if name == "squad2" else ():
            for start, text in q.answers:
                if not text.strip() or q.context[start:start + len(text)] != text:
                    raise UserError(f"{where}: question {q.id}: answer {text!r} is not in its context, at character "
                                    f"{start}")
        limit = min(max_train if part == "train" else max_dev, len(rows))
        if limit:
            remarks.append(f"{part}: {limit:,} of {len(rows):,} rows are used")
            parts[part] = [rows[i] for i in rows_of_step(0, 0, limit, len(rows))]
    return parts, remarks


# ---- 3. Metrics ---------------------------------------------------------------------------------------------
def accuracy(predicted: np.ndarray, true: np.ndarray) -> float:
    """Share of equal entries of two arrays (N,), in [0, 1]."""
    return float((predicted == true).mean())


def matthews(predicted: np.ndarray, true: np.ndarray) -> float:
    """Correlation of two labellings (N,) (Matthews, 1975; Gorodkin, 2004, for more than two labels), in [-1, 1]; 0
    where one of them is constant."""
    labels, index = np.unique(np.concatenate([true, predicted]), return_inverse=True)
    t, p = np.eye(len(labels))[index.reshape(2, -1)]  # one-hot (N, labels) each
    t, p = t - t.mean(0), p - p.mean(0)
    scale = math.sqrt((t * t).sum() * (p * p).sum())
    return float((t * p).sum() / scale) if np.ptp(true) and np.ptp(predicted) else 0.0


def ranks(x: np.ndarray) -> np.ndarray:
    """Ranks 1 ... N of x (N,), float64; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def spearman(predicted: np.ndarray, true: np.ndarray) -> float:
    """Pearson correlation of the ranks of two arrays (N,), in [-1, 1]; NaN where one of them is constant."""
    a, b = (r - r.mean() for r in (ranks(predicted), ranks(true)))
    scale = math.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / scale) if scale else math.nan


METRICS = {"accuracy": accuracy, "matthews": matthews, "spearman": spearman}


def normalize(answer: str) -> str:
    """SQuAD's normal form of an answer: lower case, without punctuation, articles and superfluous white space."""
    kept = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def exact_match(predicted: str, true: str) -> float:
    """1 if two answers have the same normal form, else 0."""
    return float(normalize(predicted) == normalize(true))


def token_f1(predicted: str, true: str) -> float:
    """Harmonic mean of precision and recall of the words of two answers; if one is empty, whether both are."""
    p, t = normalize(predicted).split(), normalize(true).split()
    if not p or not t:
        return float(p == t)
    common = sum((Counter(p) & Counter(t)).values())
    return 2 * common / (len(p) + len(t))


def best_threshold(scores: np.ndarray, null: np.ndarray, answerable: np.ndarray,
                   empty: np.ndarray) -> tuple[float, float]:
    """The best mean score over all thresholds of `null` (N,), above which no answer is given, and that threshold.
    `scores` (N,) are those of the answers, `empty` tells which of these are empty. In [0, 1]."""
    gain = np.where(answerable, scores, np.where(empty, 0.0, -1.0))
    order = np.argsort(null, kind="stable")
    total = (~answerable).sum() + np.concatenate([[0.0], np.cumsum(gain[order])])
    best = int(total.argmax())
    return float(total[best] / len(scores)), float(null[order[best - 1]]) if best else 0.0


def squad_metrics(questions: list[Question], answers: list[str], null: np.ndarray,
                  threshold: float) -> dict[str, float]:
    """EM and F1 in percent at a fixed threshold of `null` (N,), and at the best one of each; as the official
    evaluation has them. Without an acceptable true answer the empty one is true."""
    found = {}
    true = [[t for _, t in q.answers if normalize(t)] or [""] for q in questions]
    answerable = np.array([bool(q.answers) for q in questions])
    empty = np.array([not a for a in answers])
    for name, score in (("exact", exact_match), ("f1", token_f1)):
        scores = np.array([max(score(a, t) for t in texts) for a, texts in zip(answers, true)])
        found[name] = 100 * float(np.where(null > threshold, ~answerable, scores).mean())
        best, found[f"best_{name}_threshold"] = best_threshold(scores, null, answerable, empty)
        found[f"best_{name}"] = 100 * best
    return found


# ---- 4. Encoders --------------------------------------------------------------------------------------------
class Pretrained(NamedTuple):
    """What fine-tuning starts from."""
    name: str
    dim: int  # d
    seq_len: int  # the longest input
    fresh: Callable[[int], nn.Module]  # seed -> a new copy: (tokens, positions, padding) -> (B, m, d)
    encode: Callable[[str], np.ndarray]  # text -> ids (length,) int64
    spans: Callable[[str], tuple[np.ndarray, np.ndarray, np.ndarray]]  # text -> ids, first and last + 1 character
    joints: tuple[list[int], list[int], list[int]]  # ids before A, between A and B, at the end
    pad: int
    save: Callable[[nn.Module, Path], None]
    model: dict  # its configuration, for print
    val_share: float  # of the documents, held out by pre-training


def character_spans(tokenizer: Tokenizer) -> Callable:
    """A function text -> ids, and for each token its first and last + 1 character in `text`, without the space
    before a word, all (length,) int64. Bytes are followed back through lower-casing, which may change their number
    (U+0130 becomes two letters); a token that holds a part of a character gets all of it."""
    size = np.array([0] * 4 + [len(tokenizer.tiktoken.decode_single_token_bytes(i)) for i in range(4, len(tokenizer))])

    def spans(text: str):
        ids = tokenizer.encode(text).astype(np.int64)
        seen = (c.lower() for c in text) if tokenizer.uncased else text
        owner = np.repeat(np.arange(len(text)), [len(c.encode("utf-8", "surrogatepass")) for c in seen])
        end = np.cumsum(size[ids])
        return ids, *without_space(text, owner[end - size[ids]], owner[end - 1] + 1)

    return spans


def without_space(text: str, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Spans (length,) of characters, of which those that start with a space start one character later."""
    space = np.array([c.isspace() for c in text] + [False])
    return np.minimum(starts + space[starts], ends), ends


def load_ours(name: str, dropout: float) -> Pretrained:
    """An encoder of train.py or of this program; `random:` before the name keeps its shape and tokenizer only, and
    draws the weights by the seed."""
    random, path = name.startswith("random"), Path(name.removeprefix("random").removeprefix(":") or "out/toy")
    encoder, tokenizer, config = load_encoder(path, torch.device("cpu"))
    weights = encoder.state_dict()
    folder = path.parent if path.is_file() else path

    def fresh(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        encoder = MAELM(replace(config, dropout=dropout)).encoder
        if not random:
            encoder.load_state_dict(weights)
        return encoder

    def save(encoder: nn.Module, out: Path) -> None:
        tokenizer.save(out)
        with atomic(out / "encoder.pt") as temporary:
            torch.save({"config": asdict(config), "encoder": encoder.state_dict()}, temporary)

    title = "random-" * random + folder.name + f"-{path.stem}" * (path.is_file() and path.name != "encoder.pt")
    return Pretrained(title, config.encoder_dim, config.seq_len, fresh,
                      lambda text: tokenizer.encode(text).astype(np.int64), character_spans(tokenizer),
                      ([CLS], [SEP], [SEP]), PAD, save, asdict(config), held_out(folder))


def held_out(folder: Path) -> float:
    """The share of documents that the run in `folder` held out: of its prepared corpus, or as its config.json says."""
    path = folder / "config.json"
    known = json.loads(path.read_text()).get("train", {}) if path.is_file() else {}
    meta = Path(known.get("data", "docs")).expanduser() / "meta.json"
    return (json.loads(meta.read_text()) if meta.is_file() else known).get("val_share", TrainConfig.val_share)


class HubEncoder(nn.Module):
    """An encoder of `transformers` behind the interface of maelm.Encoder."""

    def __init__(self, model: nn.Module, separator: int):
        super().__init__()
        self.model, self.separator = model, separator
        self.segments = getattr(model.config, "type_vocab_size", None) or 0

    def forward(self, tokens: Tensor, positions: Tensor, padding: Tensor) -> Tensor:
        """tokens (B, m) int64, padding (B, m) bool -> H^L (B, m, d); text B is in segment 1 where there are two."""
        types = {}
        if self.segments > 1:
            border = tokens == self.separator
            types["token_type_ids"] = (border.cumsum(1) - border.long()).clamp(max=1)
        return self.model(input_ids=tokens, attention_mask=(~padding).long(), **types).last_hidden_state


def load_hub(name: str) -> Pretrained:
    """An encoder of the Hugging Face Hub or of a folder in its format, with its own tokenizer and its own dropout."""
    path = name.removeprefix("hf:")
    model, tokenizer = open_hub(path)
    if not tokenizer.is_fast or tokenizer.pad_token_id is None:
        raise UserError(f"{name}: its tokenizer has no character offsets or no padding token; choose another model")
    pair = tokenizer("a", "b")
    ids, source = pair["input_ids"], pair.sequence_ids()
    a, b = source.index(0), source.index(1)
    joints = ids[:a], ids[a + source.count(0):b], ids[b + source.count(1):]
    # RoBERTa's positions start behind its padding id; the tokenizer's limit, where it states one, says the same
    limit = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 512))
    if tokenizer.model_max_length > 1 << 20 and "roberta" in model.config.model_type:
        limit -= model.config.pad_token_id + 1

    def spans(text: str) -> tuple:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = np.array(found["offset_mapping"], np.int64).reshape(-1, 2)
        return np.array(found["input_ids"], np.int64), *without_space(text, *offsets.T)

    def save(encoder: nn.Module, out: Path) -> None:
        encoder.model.save_pretrained(out)
        tokenizer.save_pretrained(out)

    return Pretrained(Path(path).name, model.config.hidden_size, limit,
                      lambda seed: HubEncoder(copy.deepcopy(model), joints[2][-1]), lambda text: spans(text)[0], spans,
                      joints, tokenizer.pad_token_id, save, {"hub": path}, TrainConfig.val_share)


def load_pretrained(name: str, dropout: float) -> Pretrained:
    """What --init names; UserError if there is no such thing."""
    return load_hub(name) if name.startswith("hf:") else load_ours(name, dropout)


# ---- 5. From examples to inputs, heads, losses and scores ---------------------------------------------------
class Encoded(NamedTuple):
    """A part of a task as tokens."""
    ids: list[np.ndarray]  # of each input, (length,) int64
    targets: Tensor  # (N,) int64 or float32 labels; (N, 3) int64 for spans: first and last token, start of the passage
    examples: list  # Example or Question
    windows: list[tuple[int, int]]  # SQuAD, of each input: number of its question, tokens of the context before it
    remarks: list[str]


class ClassifierHead(nn.Sequential):
    """H^L at [CLS] -> logits (B, C), as RoBERTa: dropout, dense, tanh, dropout, linear. PyTorch's initial weights."""

    def __init__(self, d: int, classes: int, dropout: float):
        super().__init__(nn.Dropout(dropout), nn.Linear(d, d), nn.Tanh(), nn.Dropout(dropout), nn.Linear(d, classes))

    def forward(self, h: Tensor) -> Tensor:
        """h (B, m, d) -> (B, C)."""
        return super().forward(h[:, 0])


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.I)


class Sentences:
    """Tasks with a label, or a number, for one or two texts: `[CLS] A [SEP]`, `[CLS] A [SEP] B [SEP]`."""

    def __init__(self, name: str, examples: list[Example], text: Pretrained, tune: TuneConfig):
        self.text, self.n = text, min(tune.seq_len, text.seq_len)
        self.metric, self.labels, self.dropout = TASKS[name].metric, TASKS[name].labels, tune.dropout
        found, self.scale = {e.label for e in examples}, 1.0
        if name == "custom" and all(map(NUMBER.fullmatch, found)) and any("." in label for label in found):
            self.metric = "spearman"  # numbers that are not whole: regression
        elif name == "custom":
            self.labels = tuple(sorted(found))
        if not self.labels:  # as the official code, which divides STS-B's 0 ... 5 by 5
            self.scale = max(abs(self.target(e)) for e in examples) or 1.0

    def target(self, example: Example) -> int | float:
        """The label as the head sees it; UserError if the task does not have it."""
        if self.labels and example.label in self.labels:
            return self.labels.index(example.label)
        if self.labels or not NUMBER.fullmatch(example.label):
            raise UserError(f"label {example.label!r} of {example.text[:40]!r} is not in the task: "
                            f"{', '.join(self.labels) or 'use numbers'}")
        return float(example.label) / self.scale

    def encode(self, examples: list[Example], training: bool = False) -> Encoded:
        """Tokens of each example, of the longer text as many cut off at the end as are too many; `training` or not."""
        start, middle, end = self.text.joints
        targets, ids, truncated = [self.target(e) for e in examples], [], 0
        for e in tqdm(examples, "tokenizing", leave=False, disable=not sys.stderr.isatty()):
            a, b = self.text.encode(e.text), self.text.encode(e.text2 or "")
            joint = [] if e.text2 is None else middle
            room = self.n - len(start) - len(joint) - len(end)
            truncated += len(a) + len(b) > room
            keep = min(len(b), max(room // 2, room - len(a)))
            ids.append(np.concatenate([start, a[:room - keep], joint, b[:keep], end]).astype(np.int64))
        remarks = [f"{truncated:,} of {len(ids):,} inputs are cut off at {self.n} tokens"] if truncated else []
        return Encoded(ids, torch.tensor(targets), examples, [], remarks)

    def head(self) -> nn.Module:
        """A new head."""
        return ClassifierHead(self.text.dim, max(1, len(self.labels)), self.dropout)

    def loss(self, logits: Tensor, targets: Tensor, padding: Tensor) -> Tensor:
        """Cross-entropy in nats, or the squared error of one number; mean over the batch."""
        return F.cross_entropy(logits, targets) if self.labels else F.mse_loss(logits[:, 0], targets)

    def decode(self, logits: Tensor, targets: Tensor, padding: Tensor) -> Tensor:
        """Logits (B, C) -> what is kept of them, (B, 1): the label or the number."""
        return (logits.argmax(1) if self.labels else logits[:, 0])[:, None].float()

    def score(self, outputs: np.ndarray, encoded: Encoded) -> tuple[dict[str, float], dict]:
        """Predictions (N, 1) -> the metric in percent, and files to write: none."""
        return {self.metric: 100 * METRICS[self.metric](outputs[:, 0], encoded.targets.numpy())}, {}


class SpanHead(nn.Linear):
    """H^L -> logits of the first and the last token of the answer, (B, m, 2); initial weights as BERT."""

    def __init__(self, d: int):
        super().__init__(d, 2)
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class Spans:
    """SQuAD: `[CLS] question [SEP] window of the context [SEP]`; an answer outside the window is at [CLS]."""

    def __init__(self, name: str, examples: list[Question], text: Pretrained, tune: TuneConfig):
        self.metric = TASKS[name].metric
        self.text, self.tune, self.n = text, tune, min(tune.seq_len, text.seq_len)
        self.contexts = {}  # context -> its tokens and their characters

    def encode(self, questions: list[Question], training: bool = False) -> Encoded:
        """All windows of all questions. In training a token that an answer begins or ends in is cut there, so that
        every answer is a span of tokens; elsewhere answers have no influence on the tokens."""
        start, middle, end = self.text.joints
        rows, targets, windows, count = [], [], [], Counter()
        for number, q in enumerate(tqdm(questions, "tokenizing", leave=False, disable=not sys.stderr.isatty())):
            if q.context not in self.contexts:
                self.contexts[q.context] = self.text.spans(q.context)
            context, *characters = self.contexts[q.context]
            first, last, exact = answer_tokens(q, *characters)
            if training and q.answers and not exact:
                context, *characters = cut_at_answer(self.text.spans, q)
                first, last, _ = answer_tokens(q, *characters)
            query = self.text.encode(q.question)
            count["question"] += len(query) > (limit := min(self.tune.max_query, self.n // 2))
            query = np.concatenate([start, query[:limit], middle])
            room = self.n - len(query) - len(end)
            stride = min(self.tune.doc_stride, max(1, room // 2))
            inside = []
            for offset in range(0, max(0, len(context) - room) + stride, stride):
                rows.append(np.concatenate([query, context[offset:offset + room], end]).astype(np.int64))
                inside.append(bool(q.answers) and offset <= first and last < offset + room)
                span = (first - offset + len(query), last - offset + len(query)) if inside[-1] else (0, 0)
                targets.append((*span, len(query)))
                windows.append((number, offset))
            count["window"] += bool(q.answers) and not any(inside)
            count["token"] += bool(q.answers) and any(inside) and not exact
        remarks = {"question": "questions are cut off", "window": "answers are longer than every window",
                   "token": "answers begin or end within a token" + ", which is cut there" * training}
        return Encoded(rows, torch.tensor(targets), questions, windows, [
            f"{len(rows):,} windows of {self.n} tokens",
            *(f"{count[k]:,} {remark}" for k, remark in remarks.items() if count[k])])

    def head(self) -> nn.Module:
        """A new head."""
        return SpanHead(self.text.dim)

    def masked(self, logits: Tensor, targets: Tensor, padding: Tensor) -> Tensor:
        """Logits (B, m, 2), -inf but at [CLS] and in the passage."""
        position = torch.arange(logits.shape[1], device=logits.device)
        length = (~padding).sum(1, keepdim=True) - len(self.text.joints[2])
        allowed = (position >= targets[:, 2:]) & (position < length) | (position == 0)
        return logits.masked_fill(~allowed[:, :, None], -torch.inf)

    def loss(self, logits: Tensor, targets: Tensor, padding: Tensor) -> Tensor:
        """Mean of the cross-entropies of the first and the last token, nats."""
        return F.cross_entropy(self.masked(logits, targets, padding), targets[:, :2])

    def decode(self, logits: Tensor, targets: Tensor, padding: Tensor) -> Tensor:
        """Logits (B, m, 2) -> (B, 1 + 3 n_best): the score of no answer, then scores, first and last tokens of the best
        spans of at most max_answer tokens, -inf where there are fewer."""
        starts, ends = self.masked(logits, targets, padding).unbind(2)
        null, longest = starts[:, :1] + ends[:, :1], self.tune.max_answer
        starts = starts.index_fill(1, torch.tensor(0, device=starts.device), -torch.inf)
        spans = starts[:, :, None] + F.pad(ends, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)
        spans = F.pad(spans.flatten(1), (0, self.tune.n_best), value=-torch.inf)  # (B, m * longest + n_best)
        scores, at = spans.topk(self.tune.n_best)
        first = at // longest
        return torch.cat([null, scores, first, first + at % longest], dim=1)

    def score(self, outputs: np.ndarray, encoded: Encoded) -> tuple[dict[str, float], dict]:
        """Outputs of all windows (N, 1 + 3 n_best) -> EM and F1, and the files that the official evaluation reads."""
        k, questions = self.tune.n_best, encoded.examples
        null = np.full(len(questions), np.inf)
        found = [{} for _ in questions]  # text -> its best score
        for (number, offset), row, (_, _, passage) in zip(encoded.windows, outputs, encoded.targets.tolist()):
            null[number] = min(null[number], row[0])
            _, begin, end = self.contexts[questions[number].context]
            for score, a, b in row[1:].reshape(3, k)[:, np.isfinite(row[1:1 + k])].T:
                shift = offset - passage
                text = questions[number].context[begin[int(a) + shift]:end[int(b) + shift]]
                found[number][text] = max(score, found[number].get(text, -np.inf))
        best = [sorted(texts.items(), key=lambda item: -item[1])[:k] or [("", -np.inf)] for texts in found]
        answers, odds = [texts[0][0] for texts in best], null - [texts[0][1] for texts in best]
        ids = [q.id for q in questions]
        return squad_metrics(questions, answers, odds, self.tune.null_threshold), {
            "predictions.json": {i: "" if o > self.tune.null_threshold else a for i, a, o in zip(ids, answers, odds)},
            "null_odds.json": dict(zip(ids, odds.tolist())),
            "nbest.json": {i: [{"text": t, "score": float(s)} for t, s in texts] for i, texts in zip(ids, best)}}


def borders(q: Question) -> tuple[int, int]:
    """First and last + 1 character of the first answer, without white space around it."""
    start, text = q.answers[0]
    a = start + len(text) - len(text.lstrip())
    return a, a + len(text.strip())


def cut_at_answer(spans: Callable, q: Question) -> tuple[np.ndarray, ...]:
    """The context's tokens and their characters, as `spans` has them, with a token's end before and after the answer;
    the space before a word stays with it."""
    a, b = borders(q)
    cuts = [0, a - q.context[max(0, a - 1):a].isspace(), b, len(q.context)]
    parts = [(ids, starts + at, ends + at) for at, end in itertools.pairwise(cuts)
             for ids, starts, ends in [spans(q.context[at:end])]]
    return tuple(map(np.concatenate, zip(*parts)))


def answer_tokens(q: Question, starts: np.ndarray, ends: np.ndarray) -> tuple[int, int, bool]:
    """First and last token of the first answer, by the tokens' characters (length,), and whether they are exactly it;
    (0, 0, False) without an answer."""
    if not q.answers:
        return 0, 0, False
    a, b = borders(q)
    first, last = int(np.searchsorted(ends, a, side="right")), int(np.searchsorted(starts, b)) - 1
    return first, last, bool(starts[first] == a and ends[last] == b)


# ---- 6. One run: section 4.1, Tables 5 and 6 ----------------------------------------------------------------
class Tuned(nn.Module):
    """An encoder and a head."""

    def __init__(self, encoder: nn.Module, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, tokens: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """tokens (B, m) int64, padding (B, m) bool -> the head's logits in float32, H^L (B, m, d)."""
        h = self.encoder(tokens, torch.arange(tokens.shape[1], device=tokens.device)[None], padding)
        return self.head(h).float(), h


class Job(NamedTuple):
    """All that the runs of a task have in common."""
    task: str
    text: Pretrained
    kind: Sentences | Spans
    parts: dict[str, Encoded]
    tune: TuneConfig
    place: Place
    out: Path
    remarks: list[str]


def collate(encoded: Encoded, chosen: np.ndarray, pad: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (B,) of a part -> tokens (B, m) int64, padding (B, m) bool, targets; m is the longest's length."""
    rows = [torch.from_numpy(encoded.ids[i]) for i in chosen]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    padding = torch.arange(tokens.shape[1]) >= torch.tensor([len(row) for row in rows])[:, None]
    return tokens.to(device), padding.to(device), encoded.targets[torch.from_numpy(chosen)].to(device)


def batches(encoded: Encoded, seed: int, steps: int, batch_size: int, pool: int = 16) -> Iterator[np.ndarray]:
    """Numbers (batch_size,) of the inputs of each step, a function of (seed, step): every epoch is a permutation. Those
    of `pool` steps are sorted by length, so that a batch needs little padding, and their batches shuffled."""
    length = np.array([len(ids) for ids in encoded.ids])
    for first in range(0, steps, pool):
        count = min(pool, steps - first)
        drawn = np.concatenate([rows_of_step(seed, first + i, batch_size, len(length)) for i in range(count)])
        drawn = drawn[np.argsort(length[drawn], kind="stable")].reshape(count, batch_size)
        yield from drawn[np.random.default_rng(seed_of(seed, first)).permutation(count)]


@torch.no_grad()
def evaluate(model: Tuned, encoded: Encoded, job: Job, batch_size: int = 64) -> tuple[np.ndarray, Moments]:
    """What the task keeps of the logits of all inputs, (N, ...) float32, and the moments of H^L over their tokens."""
    model.eval()
    order = np.argsort([len(ids) for ids in encoded.ids], kind="stable")
    moments, outputs = Moments(job.text.dim, job.place.device), []
    for start in range(0, len(order), batch_size):
        tokens, padding, targets = collate(encoded, order[start:start + batch_size], job.text.pad, job.place.device)
        logits, h = model(tokens, padding)
        outputs.append(job.kind.decode(logits, targets, padding).cpu())
        moments.add(h[~padding].float())
    return torch.cat(outputs).numpy()[np.argsort(order)], moments


def effective_ranks(moments: Moments) -> dict[str, int]:
    """0.9-effective ranks of H^L, as Table 3."""
    return {name: tau_rank(moments.spectrum(centered), 0.9) for name, centered in CENTERINGS.items()}


def train(model: Tuned, job: Job, tune: TuneConfig, seed: int) -> float:
    """Fine-tune in place, without clipping; returns the mean loss over all steps, not finite if it diverged."""
    encoded = job.parts["train"]
    steps = math.ceil(tune.epochs * len(encoded.ids) / tune.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(tune.adam_beta1, tune.adam_beta2), eps=tune.adam_epsilon,
                                  weight_decay=tune.weight_decay, fused=True)
    total = torch.zeros((), device=job.place.device)
    model.train()
    bar = tqdm(batches(encoded, seed, steps, tune.batch_size), f"{job.task} seed {seed}", steps, unit="step",
               leave=False, disable=not sys.stderr.isatty())
    for step, numbers in enumerate(bar):
        torch.manual_seed(seed_of(seed, step))  # for dropout
        tokens, padding, targets = collate(encoded, numbers, job.text.pad, job.place.device)
        with job.place.autocast():
            logits, _ = model(tokens, padding)
        loss = job.kind.loss(logits, targets, padding)
        loss.backward()
        factor = learning_rate_factor(step, round(tune.warmup_share * steps), steps)
        for group in optimizer.param_groups:
            group["lr"] = tune.learning_rate * factor
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    return float(total) / steps


def run_once(job: Job, run: dict, keep: bool) -> dict:
    """One run, of a setting and a seed -> its line of sweep.jsonl. With `keep` the encoder and the predictions are
    written too. The value of a run that diverged, or whose metric is not defined, is None."""
    tune, seed, clock = replace(job.tune, **{name: run[name] for name in SWEPT}), run["seed"], time.perf_counter()
    encoder = job.text.fresh(seed)
    torch.manual_seed(seed_of(seed))  # for the head
    model = Tuned(encoder, job.kind.head()).to(job.place.device)
    loss, metrics, ranks, files = train(model, job, tune, seed), {}, None, {}
    for part in job.parts if math.isfinite(loss) else ():
        if part != "train":
            outputs, moments = evaluate(model, job.parts[part], job)
            scores, files[part] = job.kind.score(outputs, job.parts[part])
            metrics |= {name + part.removeprefix("dev"): value for name, value in scores.items()}
            ranks = ranks or effective_ranks(moments)
    if keep and ranks:
        job.text.save(model.encoder, job.out)
        for name, content in files["dev"].items():
            write_json(job.out / name, content)
    value = metrics.get(job.kind.metric, math.nan)
    return {**run, "value": value if math.isfinite(value) else None, "metrics": metrics, "effective_rank": ranks,
            "loss": loss if math.isfinite(loss) else None, "seconds": round(time.perf_counter() - clock, 2)}


# ---- 7. Many runs -------------------------------------------------------------------------------------------
def read_runs(out: Path) -> list[dict]:
    """The lines of sweep.jsonl; one that was cut off by a crash is left out."""
    path = out / "sweep.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def find_run(out: Path, run: dict) -> dict | None:
    """The line of sweep.jsonl of a run {setting and seed}, None if it has not ended."""
    return next((line for line in read_runs(out) if all(line.get(k) == v for k, v in run.items())), None)


@contextmanager
def claim(lock: IO, key: object, wait: bool) -> Iterator[bool]:
    """Whether this process alone has `key` while entered; with `wait`, after the process that has it. Claims are byte
    ranges of a locked file: the system takes them back when a process dies."""
    place = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=7).digest())
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, place)
    except (BlockingIOError, PermissionError):
        yield False
        return
    try:
        yield True
    finally:
        fcntl.lockf(lock, fcntl.LOCK_UN, 1, place)


def complete(job: Job, runs: list[dict], keep: dict | None = None) -> list[dict]:
    """The lines of all `runs`. Those that are missing are done here, or waited for where another process is at them;
    each ends with a line in sweep.jsonl. `keep` is the run whose encoder is written."""
    with open(job.out / ".lock", "a") as lock:
        for wait, run in itertools.product((False, True), runs):
            if find_run(job.out, run):
                continue
            with claim(lock, run, wait) as mine:
                if mine and not find_run(job.out, run):
                    line = run_once(job, run, run == keep)
                    with claim(lock, "sweep.jsonl", wait=True):
                        append(job.out / "sweep.jsonl", line)
                    print(describe(job, line), flush=True)
    return [find_run(job.out, run) for run in runs]


def append(path: Path, line: dict) -> None:
    """Append a line to a .jsonl file; a line that a crash cut off is closed first."""
    with open(path, "a+b") as file:
        file.seek(max(0, file.tell() - 1))
        broken = file.read(1) not in (b"", b"\n")
        file.write(b"\n" * broken + json.dumps(line).encode() + b"\n")


def describe(job: Job, line: dict) -> str:
    """A run in print."""
    setting = "  ".join(f"{name} {line[name]:g}" for name in SWEPT)
    value = "diverged" if line["value"] is None else f"{line['value']:.2f}"
    return f"{job.task}  {setting}  seed {line['seed']}  {job.kind.metric} {value}  {line['seconds']:.0f} s"


def worth(line: dict) -> float:
    """The metric of a run; minus infinity if it diverged."""
    return -math.inf if line["value"] is None else line["value"]


def grid(group: str, dim: int, given: dict) -> list[dict]:
    """The settings of Table 5 or 6; a flag that is given replaces all values of its row."""
    rows = SWEEPS["small" if group == "docs" else group, "large" if dim >= 1024 else "base"]
    rows = [(given[name],) if name in given else row for name, row in zip(SWEPT, rows)]
    return [dict(zip(SWEPT, values)) for values in itertools.product(*rows)]


def prepare(task: str, init: str, tune: TuneConfig, options: argparse.Namespace, place: Place) -> Job:
    """Read encoder and data, check that the folder is new or holds runs of the very same, and encode; UserError if it
    holds others."""
    text = load_pretrained(init, tune.dropout)
    examples, remarks = read_task(task, options.data, text.val_share, tune.max_train, tune.max_dev)
    tune = replace(tune, learning_rate=tune.learning_rate or 3e-5 * (768 / text.dim) ** 2)
    kind = (Spans if task == "squad2" else Sentences)(task, examples["train"], text, tune)
    parts = {part: kind.encode(rows, training=part == "train") for part, rows in examples.items()}
    remarks = remarks + [f"{part}: {remark}" for part, encoded in parts.items() for remark in encoded.remarks]
    name = f"{task}-{text.name}"
    alone = options.task == task and not options.figure3
    out = options.out if options.out and alone else (options.out or Path("out")) / name
    weights = hashlib.blake2b(digest_size=8)
    for tensor in text.fresh(0).state_dict().values():
        weights.update(tensor.numpy().tobytes())
    wanted = {"task": task, "init": init, "model": text.model, "train": {"val_share": text.val_share},
              "weights": weights.hexdigest(),
              "examples": hashlib.blake2b(repr(examples).encode(errors="replace"), digest_size=8).hexdigest(),
              "tune": {k: v for k, v in asdict(tune).items() if k not in SWEPT}}
    path = out / ("config.json" if "hub" not in text.model else "finetune.json")  # transformers has its own config.json
    if path.is_file():
        saved = json.loads(path.read_text())
        differs = [f"{k}={saved.get(k)!r} there, {v!r} here" for k, v in wanted.items()
                   if k != "init" and saved.get(k) != v]
        if differs:
            raise UserError(f"{out} holds other runs: {'; '.join(differs)}. Choose another --out")
    write_json(path, wanted)
    return Job(task, text, kind, parts, tune, place, out, remarks)


def finetune(task: str, init: str, tune: TuneConfig, options: argparse.Namespace, place: Place) -> dict:
    """Fine-tune one encoder on one task: with --sweep the whole grid, then the best setting, with seeds 1, 2, ...
    Writes and returns result.json."""
    job = prepare(task, init, tune, options, place)
    if place.rank == 0:
        print(f"{job.out}: {len(job.parts['train'].ids):,} training inputs", *job.remarks, sep="\n  ", flush=True)
    setting, lines = {name: getattr(job.tune, name) for name in SWEPT}, []
    if options.sweep:
        lines = sorted(complete(job, [{**s, "seed": 0} for s in grid(TASKS[task].group, job.text.dim, options.given)]),
                       key=worth, reverse=True)
        setting = {name: lines[0][name] for name in SWEPT}
        if place.rank == 0:
            print("\n".join(["all runs, best first", *(describe(job, line) for line in lines)]))
    # the grid has seed 0: the seeds of the result played no part in the choice
    runs = [{**setting, "seed": seed} for seed in range(1, options.seeds + 1)]
    finals = complete(job, runs, keep=runs[0])
    result = summary(job, init, setting, finals, lines)
    if place.rank == 0:
        write_json(job.out / "result.json", result)
        print(report(result), f"{job.out}: result.json, sweep.jsonl", sep="\n", flush=True)
    return result


def summary(job: Job, init: str, setting: dict, finals: list[dict], sweep: list[dict]) -> dict:
    """result.json: values of all seeds and their median, the median of each metric, what was run, and Table 3."""
    _, before = evaluate(Tuned(job.text.fresh(1), job.kind.head()).to(job.place.device), job.parts["dev"], job)
    median = float(np.median([worth(line) for line in finals]))
    sound = [line["metrics"] for line in finals if line["value"] is not None]
    return {
        "task": job.task, "init": init, "encoder": job.text.name, "metric": job.kind.metric,
        "median": median if math.isfinite(median) else None,
        "values": [line["value"] for line in finals], "seeds": [line["seed"] for line in finals],
        "metrics": {name: float(np.median([metrics[name] for metrics in sound])) for name in (sound or [{}])[0]},
        "setting": setting, "tune": asdict(job.tune) | setting, "remarks": job.remarks,
        "inputs": {part: len(encoded.ids) for part, encoded in job.parts.items()},
        "effective_rank": {"tau": 0.9, "d": job.text.dim, "before": effective_ranks(before),
                           "after": [line["effective_rank"] for line in finals]},
        "sweep": sweep}


def report(result: dict) -> str:
    """result.json in print: the metrics, their spread over seeds, and Table 3's ranks."""
    ranks, values = result["effective_rank"], [value for value in result["values"] if value is not None]
    after = {name: np.median([found[name] for found in ranks["after"] if found] or [0]) for name in CENTERINGS}
    spread = f"{min(values):.2f} ... {max(values):.2f}" if values else "all diverged"
    metrics = "  ".join(f"{name} {value:.2f}" for name, value in result["metrics"].items())
    change = ", ".join(f"{name} {ranks['before'][name]} -> {after[name]:.0f}" for name in CENTERINGS)
    return (f"{result['task']}  {metrics}  (medians of {len(result['values'])} seeds; {result['metric']} {spread})\n"
            f"effective rank on the dev part, before -> after, of {ranks['d']}: {change}")


def seconds_of(checkpoint: str) -> float:
    """Pre-training time of a checkpoint of train.py; UserError if it is none."""
    try:
        return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)["seconds"]
    except (KeyError, RuntimeError, EOFError) as error:
        raise UserError(f"--figure3 {checkpoint}: not a whole checkpoint of train.py") from error


# ---- 8. Figure 3 and the average of Table 1 -----------------------------------------------------------------
def figure3(checkpoints: list[str], results: list[dict], out: Path) -> None:
    """Write figure3.json and draw figure3.png: the metric against hours of pre-training, one line for each run."""
    points = [{"run": str(Path(path).parent), "checkpoint": path, "hours": seconds_of(path) / 3600,
               "median": result["median"], "values": result["values"]} for path, result in zip(checkpoints, results)]
    points.sort(key=lambda point: (point["run"], point["hours"]))
    write_json(out / "figure3.json", points)
    sound = [point for point in points if point["median"] is not None]
    with figure(out / "figure3.png") as (_, axes):
        for run, group in itertools.groupby(sound, key=lambda point: point["run"]):
            axes.plot(*zip(*((point["hours"], point["median"]) for point in group)), marker="o", label=run)
        axes.set(xlabel="hours of pre-training", title=f"{results[0]['task']}, fine-tuned from checkpoints",
                 ylabel=f"{results[0]['metric']} (%), median of {len(points[0]['values'])} seeds")
        axes.legend()
    print(f"{out}: figure3.json, figure3.png")


def table1(results: list[dict], out: Path) -> None:
    """Print a row of Table 1 and write it to result.json: the eight metrics and their average, with MNLI matched."""
    row = {result["task"]: result["median"] for result in results}
    average = None if None in row.values() else float(np.mean(list(row.values())))
    write_json(out / "result.json", {"task": "glue", "average": average, "medians": row, "results": results})
    shown = {name: "-" if value is None else f"{value:.1f}" for name, value in {**row, "average": average}.items()}
    print("  ".join(f"{name} {value}" for name, value in shown.items()), f"{out}: result.json", sep="\n")


# ---- 9. Command line ----------------------------------------------------------------------------------------
def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, TuneConfig]]:
    """Command line -> options (`given`: the fields of TuneConfig on it), and for each task how it is fine-tuned.
    Default < default of the task < flag."""
    parser = Parser(prog="finetune.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--init", default="out/toy", help="run folder, checkpoint, random:FOLDER, hf:NAME [%(default)s]")
    add("--task", default="docs", choices=[*TASKS, "glue"], help="glue: all eight and their average [%(default)s]")
    add("--data", help="folder with the files of the original releases [the Hugging Face Hub]")
    add("--out", type=Path, help="folder for the runs and result.json [out/TASK-INIT]")
    add("--seeds", type=int, default=5, help="runs whose median is the result [%(default)s]")
    add("--sweep", action="store_true", help="first try the grid of Table 5 or 6; flags replace its rows")
    add("--figure3", nargs="+", metavar="CHECKPOINT", help="fine-tune each of these, draw metric against time")
    add_flags(parser, TuneConfig)
    options = parser.parse_args(argv)
    options.given = {f.name: vars(options)[f.name] for f in fields(TuneConfig) if f.name in options}
    missing = [path for path in options.figure3 or () if not (path.endswith(".pt") and Path(path).is_file())]
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: use a positive number")
    if missing or options.figure3 and options.task == "glue":
        parser.error(f"--figure3 {' '.join(missing)}: needs checkpoints (.pt) of train.py, and one --task")
    try:
        return options, {task: TuneConfig(**DEFAULTS[TASKS[task].group] | options.given)
                         for task in (GLUE if options.task == "glue" else [options.task])}
    except ValueError as error:
        parser.error(str(error))


def main(argv: list[str] | None = None) -> None:
    options, tasks = parse(argv)
    inits = options.figure3 or [options.init]
    with clear_errors("finetune.py"):
        for task in tasks:
            for split in range(len(TASKS[task].files)):
                locate(task, options.data, split)  # a missing file is found before the first run
        for checkpoint in options.figure3 or ():
            seconds_of(checkpoint)
        place = set_up(options.given.get("precision", "auto"))
        torch.set_float32_matmul_precision("highest")  # TF32 is too coarse for effective ranks
        try:
            results = [finetune(task, init, tune, options, place) for task, tune in tasks.items() for init in inits]
        except KeyboardInterrupt:
            sys.exit("finetune.py: interrupted; the same command continues")
        if options.figure3 and place.rank == 0:
            figure3(inits, results, options.out or Path("out") / f"{options.task}-figure3")
        if options.task == "glue" and place.rank == 0:
            table1(results, options.out or Path("out") / f"glue-{results[0]['encoder']}")
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
