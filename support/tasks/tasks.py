"""The fine-tuning tasks of Table 1: their settings (Tables 5 and 6), examples and labels. `docs` classifies
documentation strings by library and needs no download; `custom` reads your own files."""
import csv
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import fsspec
import pandas

from support.program import UserError, path_of, require, short_hash
from support.text.corpus import Text, docs_by_hash, hub_records, in_validation, ngrams, records_of, scored_docs
from support.text.corpus import split_name
from support.text.docs import LIBRARIES


# ---- 1. Tasks -----------------------------------------------------------------------------------------------
class Task(NamedTuple):
    """One column of Table 1, as the Hub has it."""
    group: str  # small | large | squad | docs: determines the defaults and the grid
    metrics: tuple[str, ...] = ("accuracy",)  # the first selects checkpoints; F1 is computed for the second label
    labels: tuple[str, ...] = ()  # in the Hub's order; if empty, see labels_of
    columns: tuple[str, ...] = ("sentence1", "sentence2")  # of one or two texts
    dev: tuple[str, ...] = ("validation",)  # the dev split and, for MNLI, the mismatched one
    kind: str = "classification"  # or spans; see KINDS in finetune.py
    hub: str = ""  # data set on the Hub, NAME[:CONFIG]; default: nyu-mll/glue:TASK


YES_NO = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
TASKS = {
    "mnli": Task("large", labels=("entailment", "neutral", "contradiction"), columns=("premise", "hypothesis"),
                 dev=("validation_matched", "validation_mismatched")),
    "qqp": Task("large", ("accuracy", "f1"), YES_NO, ("question1", "question2")),
    "qnli": Task("large", labels=ENTAILMENT, columns=("question", "sentence")),
    "sst2": Task("large", labels=YES_NO, columns=("sentence",)),
    "cola": Task("small", ("matthews",), YES_NO, ("sentence",)),
    "rte": Task("small", labels=ENTAILMENT),
    "mrpc": Task("small", ("accuracy", "f1"), YES_NO),
    "stsb": Task("small", ("spearman",)),
    "squad2": Task("squad", ("f1",), kind="spans", hub="rajpurkar/squad_v2"),
    "docs": Task("docs", columns=("text",), labels=LIBRARIES),
    "custom": Task("small", ("accuracy", "f1"), columns=("text", "text2")),
}
GLUE = ("mnli", "qqp", "qnli", "sst2", "cola", "rte", "mrpc", "stsb")  # Table 1, left to right


# ---- 2. Settings --------------------------------------------------------------------------------------------
# The comment after a field is also its text in -h.
@dataclass(frozen=True)
class TuneConfig:
    """Settings of a job; each group of tasks has its own defaults."""
    epochs: float = 3.0  # number of passes over the training split
    learning_rate: float = 0.0  # peak learning rate; 0 means 3e-5 * (768 / d)^2, and for docs 2.2e-5 * (768 / d)^2
    batch_size: int = 32  # examples per optimizer step and per evaluation batch
    warmup_share: float = 0.06  # fraction of the steps with linear warm-up; then linear decay to 0
    seq_len: int = 512  # longest input in tokens; the encoder's own limit also applies
    dropout: float = 0.1  # dropout in encoder and head
    weight_decay: float = 0.01  # weight decay of all parameters
    precision: str = "auto"  # auto | fp32 | bf16: for training; evaluation always uses fp32
    max_query: int = 64  # SQuAD: longest question in tokens, at most half of seq_len
    doc_stride: int = 128  # SQuAD: tokens between the starts of windows, at most half a window
    max_answer: int = 30  # SQuAD: longest answer in tokens
    l2: float = 0.0  # --frozen: strength of L2 regularization; 0 chooses it on the training split
    layer: str = "last"  # --frozen: the layer to probe: a number from 0 (embeddings), last, or all

    def __post_init__(self):
        require(
            self,
            ("epochs", 0 < self.epochs <= 10_000, "a number above 0, at most 10,000"),
            ("batch_size", self.batch_size >= 1, "1 or more"),
            ("warmup_share", self.warmup_share < 1, "0 or more, below 1"),
            ("seq_len", self.seq_len >= 8, "8 or more"),
            *[(name, getattr(self, name) >= 1, "1 or more") for name in ("max_query", "doc_stride", "max_answer")],
            ("dropout", self.dropout < 1, "0 or more, below 1"),
            ("layer", self.layer in ("last", "all") or self.layer.isdecimal(), "a number from 0, last or all"),
            ("precision", self.precision in ("auto", "fp32", "bf16"), "auto, fp32 or bf16"))


DEFAULTS = {  # by group
    "small": dict(epochs=10.0, batch_size=16),
    "large": dict(),
    "squad": dict(batch_size=16),
    "docs": dict(epochs=5.0, batch_size=16),
}
PROBED = ("seq_len", "batch_size", "l2", "layer")  # the settings that a linear probe uses
SWEEPS = {  # group -> values to try; Tables 5 and 6
    "small": dict(epochs=(2.0, 3.0, 5.0, 10.0), batch_size=(16, 32), warmup_share=(0.06, 0.10)),
    "large": dict(epochs=(2.0, 3.0, 5.0), batch_size=(32,), warmup_share=(0.06,)),
    "squad": dict(epochs=(2.0, 3.0), batch_size=(16, 32), warmup_share=(0.06, 0.10)),
}
RATES = {  # group -> learning rates to try for base's width and, from 1,024 dimensions, for large++'s
    "small": ((2e-5, 3e-5, 4e-5, 5e-5), (7e-6, 1e-5, 2e-5, 3e-5)),
    "large": ((1e-5, 2e-5, 3e-5, 4e-5), (5e-6, 7e-6, 1e-5, 2e-5)),
    "squad": ((2e-5, 3e-5, 4e-5, 5e-5), (7e-6, 1e-5, 2e-5, 3e-5)),
}
SWEPT = ("learning_rate", *dict.fromkeys(name for sweep in SWEEPS.values() for name in sweep))


def tune_of(task: str, given: dict, dim: int) -> TuneConfig:
    """The settings of a task for an encoder of width `dim`: given values, else those of its group, else the fields'."""
    tune = TuneConfig(**(DEFAULTS[TASKS[task].group] | given))
    rate = 8e-4 / 36 if task == "docs" else 3e-5  # for base; a narrower encoder needs a higher one
    return replace(tune, learning_rate=tune.learning_rate or rate * (768 / dim) ** 2)


def grid(task: str, tune: TuneConfig, dim: int, given: dict) -> list[TuneConfig]:
    """The settings that Table 5 or 6 tries for an encoder of width `dim`. Fields in `given` keep their values."""
    group = TASKS[task].group if TASKS[task].group in SWEEPS else "small"
    smaller = max(1, 768 / dim) ** 2  # a smaller encoder than base needs higher rates
    narrow, wide = RATES[group]
    rates = wide if dim >= 1024 else narrow
    tried = SWEEPS[group] | {"learning_rate": [rate * smaller for rate in rates]}
    tried |= {name: (getattr(tune, name),) for name in SWEPT if name in given}
    return [replace(tune, **dict(zip(tried, values))) for values in itertools.product(*tried.values())]


# ---- 3. Examples and labels ---------------------------------------------------------------------------------
class Example(NamedTuple):
    """One or two texts and a label, as in the file."""
    text: str
    text2: str | None
    label: str | None  # None if a test file has none
    place: str = ""  # such as dev.csv, row 7


class Question(NamedTuple):
    """A SQuAD question. Each answer is (first character, text); a question without answers is unanswerable."""
    id: str
    question: str
    context: str
    answers: tuple[tuple[int, str], ...]


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d\d?)?", re.IGNORECASE)


class Labels(NamedTuple):
    """The possible outputs of a task: one of several names or, if there are no names, a number."""
    metrics: tuple[str, ...]  # as in Task
    names: tuple[str, ...] = ()
    scale: float = 1.0  # the model predicts the number divided by this

    def target(self, example: Example) -> int | float:
        """The label in the form of the model's output: the index of its name, or a number; 0 if there is none."""
        label = example.label
        if label is None:
            return 0
        if label in self.names:
            return self.names.index(label)
        if self.names or not NUMBER.fullmatch(label):
            known = ", ".join(self.names[:20]) or "numbers"
            raise UserError(f"{example.place}: label {label!r} is not one of the training labels ({known}); correct it")
        return float(label) / self.scale


def labels_of(name: str, train: list) -> Labels:
    """The labels of task `name`: those of the release, if any. Otherwise, they are numbers if a training label is not
    whole (1.0 is) or the task's metric is spearman, or else the distinct training labels in alphabetical order."""
    task = TASKS[name]
    if task.labels or task.kind != "classification":
        return Labels(task.metrics, task.labels)
    names = sorted({example.label for example in train})
    numbers = [float(label) for label in names if NUMBER.fullmatch(label)]
    if task.metrics[0] != "spearman" and all(number.is_integer() for number in numbers):
        metrics = [metric for metric in task.metrics if metric != "f1" or len(names) == 2]
        return Labels(tuple(metrics), tuple(names))
    largest = max(map(abs, numbers), default=0.0)  # for STS-B, this is 5, by which the official code divides
    return Labels(("spearman",), scale=largest or 1.0)


# ---- 4. Reading examples ------------------------------------------------------------------------------------
Record = tuple[str, dict]  # the place of a record, such as "dev.csv, row 7", and its values by column


def numbered(source: Path | str, records: Iterable[dict]) -> list[Record]:
    """Records with their places in a source."""
    return [(f"{source}, row {number}", record) for number, record in enumerate(records, start=1)]


def read_task(name: str, data: str | None, settings: dict) -> dict[str, list]:
    """The examples or questions of each split: train, dev, dev_mm of MNLI, and test of custom. `data` is a folder with
    the Hub's own files or those of custom_splits; None means the Hub. For docs, `settings` of the pre-training run has
    the fraction that it held out and its cache."""
    if name == "docs":
        splits = read_docs_task(settings.get("val_share", Text.val_share), settings.get("cache", Text.cache))
    elif name == "custom":
        splits = custom_splits(data)
    else:
        read = questions_of if TASKS[name].kind == "spans" else examples_of
        parts = dict(zip(("train", "dev", "dev_mm"), ("train", *TASKS[name].dev)))
        splits = {split: read(name, records_of_hub(name, data, part)) for split, part in parts.items()}
        if not splits.get("dev_mm", True):
            del splits["dev_mm"]  # one may do without it
        if TASKS[name].kind == "spans":
            splits["train"] = with_answers(name, splits["train"])
    for split, examples in splits.items():
        if not examples:
            raise UserError(f"--task {name}: its {split} split has no examples")
    return splits


def hash_of(splits: dict[str, list]) -> str:
    """A hash of the examples or questions of all splits, wherever they were read from."""
    without_places = [[each[:3] if isinstance(each, Example) else each for each in examples]
                      for examples in splits.values()]
    return short_hash(repr(without_places))


def read_docs_task(val_share: float, cache: str) -> dict[str, list[Example]]:
    """Documentation strings with their libraries: dev, on which no model was trained (see split_documents), and at most
    100 per library for training, none of which shares 13 words in a row with a dev text."""
    scored = scored_docs(val_share, cache)
    known = set().union(*[ngrams(text) for _, text in scored])
    count = Counter()
    train = []
    for library, text in docs_by_hash(cache):
        if count[library] < 100 and not in_validation(text, val_share + 0.1) and known.isdisjoint(ngrams(text)):
            count[library] += 1
            train.append((library, text))
    return {split: [Example(text, None, library) for library, text in chosen]
            for split, chosen in {"train": train, "dev": scored}.items()}


def records_of_hub(name: str, data: str | None, part: str) -> list[Record]:
    """The records of a split on the Hub, or in its Parquet files, in a folder `data` or the task's folder inside."""
    hub = TASKS[name].hub or f"nyu-mll/glue:{name}"
    if data is None:
        return numbered(f"hf:{hub}", hub_records(f"hf:{hub}", part))
    own = re.split("[/:]", hub)[-1]
    inside = path_of(data) / own
    files = sorted((inside if inside.is_dir() else path_of(data)).glob(f"{part}*.parquet"))
    if not files and part != "validation_mismatched":
        raise UserError(f"--data {data}: {name} needs the Hub's files {part}*.parquet, in a folder {own}")
    return [record for file in files for record in numbered(file, records_of(file))]


def examples_of(name: str, records: Iterable[Record], labeled: bool = True) -> list[Example]:
    """Records of a task that classifies texts -> examples. Raises UserError if a text (or label) is missing."""
    columns, examples = TASKS[name].columns, []
    for place, record in records:
        texts = [record.get(column) for column in columns]
        if name == "custom" and texts[1] is None:
            texts = texts[:1]  # the second text is optional
        if (labeled and "label" not in record) or not all(isinstance(text, str) for text in texts):
            raise UserError(f"{place}: needs text in {' and '.join(columns)}, and a label, but has {record!r:.200}")
        text2 = texts[1] if len(texts) == 2 else None
        label = label_of(name, record.get("label"), place)
        if labeled and label is None:
            raise UserError(f"{place}: its label is missing; add one, or remove the row")
        examples.append(Example(texts[0], text2, label, place))
    return examples


def label_of(name: str, label, place: str) -> str | None:
    """A label as text: as written for custom, so that 1 and 1.0 stay different. The Hub's are numbers, and STS-B's 3.2
    is 3.200000047683716 there. None if the label is missing."""
    names = TASKS[name].labels
    label = label.strip() if isinstance(label, str) else label
    if label in (None, "") or label != label or (label == -1 and names):  # NaN differs from itself
        return None
    if isinstance(label, str):
        return label
    if name == "custom":
        return json.dumps(label)
    if not names:
        return str(label if isinstance(label, int) else float(f"{label:.6g}"))
    if label not in range(len(names)):
        raise UserError(f"{place}: label {label!r}: use a whole number from 0 to {len(names) - 1}")
    return names[int(label)]


def questions_of(name: str, records: Iterable[Record]) -> list[Question]:
    """Records of SQuAD -> questions."""
    questions = []
    for place, record in records:
        if not {"id", "question", "context", "answers"} <= record.keys():  # columns of another data set
            raise UserError(f"{place}: needs id, question, context and answers, but has {', '.join(record)}")
        answers = tuple(zip(record["answers"]["answer_start"], record["answers"]["text"]))
        questions.append(Question(record["id"], record["question"], record["context"], answers))
    return questions


def with_answers(name: str, questions: list[Question]) -> list[Question]:
    """The training questions whose answer stands where the file says. Raises UserError if fewer than half do."""
    kept = [q for q in questions if all(q.context[start:start + len(text)] == text for start, text in q.answers[:1])]
    wrong = len(questions) - len(kept)
    if wrong > len(kept):
        raise UserError(f"--task {name}: {wrong:,} of {len(questions):,} training answers are not in their context at "
                        "answer_start, which counts characters from 0; correct it")
    if wrong:
        print(f"--task {name}: {wrong:,} training questions are left out: their answer is not at answer_start")
    return kept


def table_rows(path: Path) -> list[dict]:
    """The rows of a .csv or .tsv file, with all cells as text. Raises ValueError if a row is unlike the header."""
    # A .tsv has no quotes, as in GLUE's own files.
    how = dict(sep="\t", quoting=csv.QUOTE_NONE) if split_name(path)[1] == ".tsv" else {}
    table = pandas.read_csv(path, dtype=str, keep_default_na=False, **how)
    if not isinstance(table.index, pandas.RangeIndex):  # where pandas has taken the first cells for names of the rows
        raise ValueError("its rows have more cells than the header")
    return table.to_dict("records")


def json_rows(path: Path) -> list[dict]:
    """The objects in a file that has one JSON object per line, as they are written: 1 is not 1.0."""
    with fsspec.open(str(path), "rt", compression="infer", encoding="utf-8-sig") as file:
        return [dict(**json.loads(line)) for line in file]  # refuses other values


TABLES = {".csv": table_rows, ".tsv": table_rows, ".jsonl": json_rows, ".json": json_rows, ".parquet": records_of}


def custom_examples(path: Path, labeled: bool = True) -> list[Example]:
    """The examples of a table with the columns text[,text2],label or sentence1,sentence2,label. Raises UserError if it
    cannot be read, or if two columns have the same meaning."""
    try:
        rows = [*TABLES[split_name(path)[1]](path)]
    except Exception as error:  # each format and each compression has its own errors
        raise UserError(f"{path}: cannot be read ({error})") from error
    names = {"sentence1": "text", "sentence2": "text2"}
    records = []
    for place, row in numbered(path, rows):
        lower = [column.strip().lower() for column in row]
        record = dict(zip([names.get(column, column) for column in lower], row.values()))
        if len(record) < len(row):
            raise UserError(f"{place}: two of its columns mean the same ({', '.join(row)}); remove one")
        records.append((place, record))
    return examples_of("custom", records, labeled)


def custom_splits(data: str) -> dict[str, list[Example]]:
    """The examples of files such as train.csv, dev.TSV.gz and, with or without labels, test.jsonl. Without dev, it is a
    tenth of train, chosen by a hash of the texts. Raises UserError if there is no train, or more than one file."""
    splits = {}
    for split, names in {"train": ["train"], "dev": ["dev", "validation", "valid", "val"], "test": ["test"]}.items():
        files = [path for path in sorted(path_of(data).glob("*"))
                 if split_name(path)[0].lower() in names and split_name(path)[1] in TABLES]
        if len(files) > 1 or (split == "train" and not files):
            listed = " and ".join(path.name for path in files) or "none"
            raise UserError(f"--data {data}: must have one file {split} ({', '.join(TABLES)}), but has {listed}")
        if files:
            splits[split] = custom_examples(files[0], labeled=split != "test")
        elif split == "dev":
            examples = sorted(splits["train"], key=lambda example: short_hash(repr(example[:2])))
            left = Counter(example.label for example in examples)
            names = labels_of("custom", examples).names
            splits = {"train": [], "dev": []}
            for example in examples:
                left[example.label] -= 1
                is_last = left[example.label] == 0 and example.label in names  # train needs each of the names
                full = len(splits["dev"]) >= len(examples) / 10
                splits["train" if full or is_last else "dev"].append(example)
            count = len(splits["dev"])
            print(f"--data {data}: has no file dev; {count:,} examples of train, chosen by a hash, are dev")
    return splits
