"""Fine-tuning: GLUE, SQuAD 2.0, and a task that needs no download.

    python finetune.py --init out/toy --task docs               # which library does this documentation belong to?
    python finetune.py --init out/base --task rte --sweep       # Table 5's grid, then the median of five seeds
    python finetune.py --init out/base --task glue --data DIR   # all eight tasks and their average, from local files
    python finetune.py --figure3 out/base/step_*.pt --task mnli # Figure 3: metric against pre-training time

The decoder is dropped and the encoder fine-tuned on text without [MASK]: section 4.1, Appendices B and D. --init is
a run folder, a checkpoint, a folder that this program wrote, random:FOLDER (a fresh encoder of that shape), or
hf:NAME. --data is a folder with the files of the original releases; without it they come from the Hugging Face Hub.
--task custom reads train and dev files (.csv, .jsonl, .parquet) with columns text[,text2],label from --data.

The dev part is evaluated each half epoch, in more than ten epochs 20 times in all, and after the last step. Of each
run the best checkpoint counts, as the recipe that the paper refers to has it; it is chosen on the part that it is
reported on, so its value is a little too good. --keep last takes the last one. result.json has the values of both.

Several processes share the work: start the command as often as you like, or with torchrun. Each run appends a line
to sweep.jsonl; the same command again does what is missing. bench/collect.py makes tables of finished folders.
"""
import argparse
import copy
import hashlib
import itertools
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout
from torch import Tensor, nn
from tqdm import tqdm

from data import VAL_SHARE, rows_of_step, seed_of
from files import (Parser, UserError, append_line, atomic, claim_folder, clear_errors, compare_runs, file_hash,
                   read_json, read_lines, refuse_other_kind, write_json)
from maelm import CLS, MAELM, PAD, SEP, check_field
from rank import CENTERINGS, Moments, tau_rank
from run import (Place, add_flags, choose_place, figure, given_flags, load_encoder, open_hub, read_tensors,
                 run_settings, write_tensors)
from tasks import (DEFAULTS, GLUE, METRICS, SWEPT, TASKS, Example, Question, answer_tokens, cut_at_answer, grid, locate,
                   read_task, squad_metrics)
from train import learning_rate_factor


# ---- 1. How an encoder is fine-tuned ------------------------------------------------------------------------
@dataclass(frozen=True)
class TuneConfig:
    """How an encoder is fine-tuned, but for tasks.DEFAULTS. Raises ValueError naming a bad field."""
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
    keep: str = "best"  # best | last: the checkpoint of a run that counts
    max_train: int = 0  # use so many training examples; 0 = all
    max_dev: int = 0  # and so many for evaluation

    def __post_init__(self):
        for name, value in asdict(self).items():
            if isinstance(value, float):
                check_field(self, name, math.isfinite(value), "use a finite number")
        for name in ("epochs", "batch_size", "adam_epsilon", "max_query", "doc_stride", "max_answer", "n_best"):
            check_field(self, name, getattr(self, name) > 0, "use a positive number")
        for name in ("learning_rate", "weight_decay", "max_train", "max_dev"):
            check_field(self, name, getattr(self, name) >= 0, "use 0 or a positive number")
        for name in ("warmup_share", "dropout", "adam_beta1", "adam_beta2"):
            check_field(self, name, 0 <= getattr(self, name) < 1, "use 0 <= value < 1")
        check_field(self, "seq_len", self.seq_len >= 8, "use at least 8")
        check_field(self, "precision", self.precision in ("auto", "fp32", "bf16"), "use auto, fp32 or bf16")
        check_field(self, "keep", self.keep in ("best", "last"), "use best or last")


# ---- 2. Encoders --------------------------------------------------------------------------------------------
class Pretrained:
    """What fine-tuning starts from: an encoder of train.py or of this program; after `random:` its shape and tokenizer.

    `dim` is d, `seq_len` the longest input, `config` what it is, for print, `val_share` the share of the documents that
    pre-training held out, `joints` the ids before text A, between A and B, and at the end."""
    joints = [CLS], [SEP], [SEP]
    pad = PAD

    def __init__(self, name: str, dropout: float):
        self.random = name.startswith("random:")
        path = Path(name.removeprefix("random:"))
        encoder, self.tokenizer, config = load_encoder(path)
        self.weights, self.dropped = encoder.state_dict(), replace(config, dropout=dropout)
        self.dim, self.seq_len, self.config = config.encoder_dim, config.seq_len, asdict(config)
        folder = path.parent if path.is_file() else path
        self.name = f"random-{folder.name}" if self.random else folder.name
        if path.is_file() and path.name != "encoder.pt":
            self.name += f"-{path.stem}"
        settings = run_settings(folder)
        meta = Path(settings.get("data", "docs")).expanduser() / "meta.json"  # of a prepared corpus
        if meta.is_file():
            settings = read_json(meta)
        self.val_share = settings.get("val_share", VAL_SHARE)

    def fresh(self, seed: int) -> nn.Module:
        """A new copy of the encoder: (tokens, positions, padding) -> (B, m, d). The seed draws random weights."""
        torch.manual_seed(seed)
        encoder = MAELM(self.dropped).encoder
        if not self.random:
            encoder.load_state_dict(self.weights)
        return encoder

    def encode(self, text: str) -> np.ndarray:
        """Text -> ids (length,) int64."""
        return self.tokenizer.encode(text).astype(np.int64)

    def spans(self, text: str) -> tuple[np.ndarray, ...]:
        """Text -> ids, and for each token its first and last + 1 character, without the space before a word, all
        (length,) int64. A token that holds a part of a character gets all of it."""
        ids = self.encode(text)
        # Bytes are followed back through lower-casing, which may change their number: U+0130 becomes two letters.
        seen = [c.lower() for c in text] if self.tokenizer.uncased else text
        owner = np.repeat(np.arange(len(text)), [len(c.encode("utf-8", "surrogatepass")) for c in seen])  # of each byte
        tokens = self.tokenizer.tiktoken.decode_tokens_bytes(ids.tolist())
        size = np.array([len(token) for token in tokens], np.int64)
        end = size.cumsum()  # the byte after each token
        return ids, *without_space(text, owner[end - size], owner[end - 1] + 1)

    def save(self, encoder: nn.Module, out: Path) -> None:
        """Write a fine-tuned encoder."""
        write_tensors(out / "encoder.pt", {"config": self.config, "encoder": encoder.state_dict()})

    def save_tokenizer(self, out: Path) -> dict[str, str]:
        """Write the tokenizer, the same for all runs; returns its hash, with which Tokenizer.load compares it."""
        self.tokenizer.save(out)
        return {"tokenizer": file_hash(out / "tokenizer.json")}


def without_space(text: str, starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Spans (length,) of characters, of which those that start with a space start one character later."""
    space = np.array([c.isspace() for c in text] + [False])
    return np.minimum(starts + space[starts], ends), ends


class HubModule(nn.Module):
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


class HubPretrained(Pretrained):
    """The same for an encoder of the Hugging Face Hub or of a folder in its format, with its own tokenizer and its own
    dropout."""

    def __init__(self, name: str):
        path, self.loaded, self.tokenizer, self.dim, self.seq_len = open_hub(name)
        self.name, self.config, self.val_share = Path(path).name, {"hub": path}, VAL_SHARE
        self.pad = self.tokenizer.pad_token_id
        if not self.tokenizer.is_fast or self.pad is None:
            raise UserError(f"{name}: its tokenizer has no character offsets or no padding token; choose another model")
        pair = self.tokenizer("a", "b")
        ids, source = pair["input_ids"], pair.sequence_ids()  # which text each token is of
        a, b = source.index(0), source.index(1)
        self.joints = ids[:a], ids[a + source.count(0):b], ids[b + source.count(1):]

    def fresh(self, seed: int) -> nn.Module:
        return HubModule(copy.deepcopy(self.loaded), separator=self.joints[2][-1])

    def encode(self, text: str) -> np.ndarray:
        return self.spans(text)[0]

    def spans(self, text: str) -> tuple[np.ndarray, ...]:
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts, ends = np.array(found["offset_mapping"], np.int64).reshape(-1, 2).T
        return np.array(found["input_ids"], np.int64), *without_space(text, starts, ends)

    def save(self, encoder: nn.Module, out: Path) -> None:
        encoder.model.save_pretrained(out)
        self.tokenizer.save_pretrained(out)

    def save_tokenizer(self, out: Path) -> dict[str, str]:
        return {}  # it goes with the encoder


def load_pretrained(name: str, dropout: float) -> Pretrained:
    """What --init names; UserError if there is no such thing."""
    return HubPretrained(name) if name.startswith("hf:") else Pretrained(name, dropout)


# ---- 3. From examples to inputs, heads, losses and scores ---------------------------------------------------
class Encoded(NamedTuple):
    """A part of a task as tokens."""
    ids: list[np.ndarray]  # of each input, (length,) int64
    targets: Tensor  # (N,) int64 or float32 labels; (N, 3) int64 for spans: first and last token, start of the passage
    examples: list  # Example or Question
    windows: list[tuple[int, int]]  # SQuAD, of each input: number of its question, tokens of the context before it
    remarks: list[str]


def progress(items: Iterable, title: str, total: int | None = None) -> tqdm:
    """The items, with a progress bar in a terminal."""
    return tqdm(items, title, total, leave=False, disable=not sys.stderr.isatty())


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

    def __init__(self, name: str, examples: list[Example], text: Pretrained, tune: TuneConfig):
        self.text = text
        self.dropout = tune.dropout
        self.n = min(tune.seq_len, text.seq_len)
        self.metric = TASKS[name].metric
        self.labels = TASKS[name].labels
        self.scale = 1.0
        if name == "custom":
            found = sorted({e.label for e in examples})
            if all(map(NUMBER.fullmatch, found)) and "." in "".join(found):
                self.metric = "spearman"  # numbers that are not whole: regression
            else:
                self.labels = tuple(found)
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
        targets = [self.target(e) for e in examples]  # a bad label is found before the long work
        ids, truncated = [], 0
        for e in progress(examples, "tokenizing"):
            a, b = self.text.encode(e.text), self.text.encode(e.text2 or "")
            joint = [] if e.text2 is None else middle
            room = self.n - len(start) - len(joint) - len(end)  # for both texts
            if len(a) + len(b) > room:
                truncated += 1
            keep = min(len(b), max(room // 2, room - len(a)))  # tokens of b; the others are for a
            row = np.concatenate([start, a[:room - keep], joint, b[:keep], end])
            ids.append(row.astype(np.int64))
        remarks = []
        if truncated:
            remarks.append(f"{truncated:,} of {len(ids):,} inputs are cut off at {self.n} tokens")
        return Encoded(ids, torch.tensor(targets), examples, [], remarks)

    def head(self) -> nn.Module:
        """A new head."""
        return ClassifierHead(self.text.dim, max(1, len(self.labels)), self.dropout)

    def loss(self, logits: Tensor, targets: Tensor, padding: Tensor) -> Tensor:
        """Cross-entropy in nats, or the squared error of one number; mean over the batch."""
        if self.labels:
            return F.cross_entropy(logits, targets)
        return F.mse_loss(logits[:, 0], targets)

    def decode(self, logits: Tensor, targets: Tensor, padding: Tensor) -> Tensor:
        """Logits (B, C) -> what is kept of them, (B, 1): the label or the number."""
        if self.labels:
            return logits.argmax(1, keepdim=True).float()
        return logits[:, :1]

    def score(self, outputs: np.ndarray, encoded: Encoded) -> tuple[dict[str, float], dict]:
        """Predictions (N, 1) -> the metric in percent, and files to write: none."""
        value = METRICS[self.metric](outputs[:, 0], encoded.targets.numpy())
        return {self.metric: 100 * value}, {}


class Spans:
    """SQuAD: `[CLS] question [SEP] window of the context [SEP]`; an answer outside the window is at [CLS]."""

    def __init__(self, name: str, examples: list[Question], text: Pretrained, tune: TuneConfig):
        self.metric = TASKS[name].metric
        self.text = text
        self.tune = tune
        self.n = min(tune.seq_len, text.seq_len)
        self.contexts = {}  # context -> its tokens, their first and their last + 1 characters

    def encode(self, questions: list[Question], training: bool = False) -> Encoded:
        """All windows of all questions. In training a token that an answer begins or ends in is cut there, so that
        every answer is a span of tokens; elsewhere answers have no influence on the tokens."""
        start, middle, end = self.text.joints
        longest = min(self.tune.max_query, self.n // 2)
        cut, far = "questions are cut off", "answers are longer than every window"
        inexact = "answers begin or end within a token" + (", which is cut there" if training else "")
        count = {cut: 0, far: 0, inexact: 0}
        rows, targets, windows = [], [], []
        for number, q in enumerate(progress(questions, "tokenizing")):
            if q.context not in self.contexts:
                self.contexts[q.context] = self.text.spans(q.context)
            context, starts, ends = self.contexts[q.context]
            first, last, exact = answer_tokens(q, starts, ends)
            if training and q.answers and not exact:
                context, starts, ends = cut_at_answer(self.text.spans, q)
                first, last, _ = answer_tokens(q, starts, ends)
            query = self.text.encode(q.question)
            if len(query) > longest:
                count[cut] += 1
            query = np.concatenate([start, query[:longest], middle])
            # A window starts each `stride` tokens, as long as the one before does not reach the end of the context.
            room = self.n - len(query) - len(end)  # for a window
            stride = min(self.tune.doc_stride, max(1, room // 2))
            found = False
            for offset in range(0, max(0, len(context) - room) + stride, stride):
                rows.append(np.concatenate([query, context[offset:offset + room], end]).astype(np.int64))
                windows.append((number, offset))
                shift = len(query) - offset  # from a place in the context to that in the input
                if q.answers and offset <= first and last < offset + room:
                    found = True
                    targets.append((first + shift, last + shift, len(query)))
                else:
                    targets.append((0, 0, len(query)))
            if q.answers and not found:
                count[far] += 1
            if found and not exact:
                count[inexact] += 1
        remarks = [f"{n:,} {remark}" for remark, n in count.items() if n]
        return Encoded(rows, torch.tensor(targets), questions, windows,
                       [f"{len(rows):,} windows of {self.n} tokens", *remarks])

    def head(self) -> nn.Module:
        """A new head: H^L -> logits of the first and the last token of the answer, (B, m, 2). Weights as BERT."""
        head = nn.Linear(self.text.dim, 2)
        nn.init.normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
        return head

    def masked(self, logits: Tensor, targets: Tensor, padding: Tensor) -> Tensor:
        """Logits (B, m, 2), -inf but at [CLS] and in the passage."""
        position = torch.arange(logits.shape[1], device=logits.device)
        length = (~padding).sum(1, keepdim=True) - len(self.text.joints[2])
        allowed = (position >= targets[:, 2:]) & (position < length) | (position == 0)  # (B, m)
        return logits.masked_fill(~allowed[:, :, None], -torch.inf)

    def loss(self, logits: Tensor, targets: Tensor, padding: Tensor) -> Tensor:
        """Mean of the cross-entropies of the first and the last token, nats."""
        return F.cross_entropy(self.masked(logits, targets, padding), targets[:, :2])

    def decode(self, logits: Tensor, targets: Tensor, padding: Tensor) -> Tensor:
        """Logits (B, m, 2) -> (B, 1 + 3 n_best): the score of no answer, then scores, first and last tokens of the best
        spans of at most max_answer tokens, -inf where there are fewer."""
        longest, n_best = self.tune.max_answer, self.tune.n_best
        starts, ends = self.masked(logits, targets, padding).unbind(2)  # (B, m) each
        null = starts[:, :1] + ends[:, :1]
        starts = starts.index_fill(1, torch.tensor(0, device=starts.device), -torch.inf)  # [CLS] is no answer
        ends = F.pad(ends, (0, longest - 1), value=-torch.inf).unfold(1, longest, 1)  # (B, m, longest)
        spans = (starts[:, :, None] + ends).flatten(1)  # (B, m * longest)
        scores, at = F.pad(spans, (0, n_best), value=-torch.inf).topk(n_best)
        first = at // longest  # (B, n_best)
        return torch.cat([null, scores, first, first + at % longest], dim=1)

    def score(self, outputs: np.ndarray, encoded: Encoded) -> tuple[dict[str, float], dict]:
        """Outputs of all windows (N, 1 + 3 n_best) -> EM and F1, and the files that the official evaluation reads."""
        questions, threshold = encoded.examples, self.tune.null_threshold
        null = np.full(len(questions), np.inf)
        found = [{} for _ in questions]  # text -> its best score
        for (number, offset), row, (_, _, passage) in zip(encoded.windows, outputs, encoded.targets.tolist()):
            null[number] = min(null[number], row[0])
            context, texts = questions[number].context, found[number]
            _, begin, end = self.contexts[context]  # characters
            for score, first, last in row[1:].reshape(3, -1).T:
                if np.isfinite(score):
                    a, b = int(first) - passage + offset, int(last) - passage + offset  # tokens of the context
                    text = context[begin[a]:end[b]]
                    texts[text] = max(score, texts.get(text, -np.inf))
        answers, odds = [], []
        files = {"predictions.json": {}, "null_odds.json": {}, "nbest.json": {}}
        for q, texts, none in zip(questions, found, null):
            best = sorted(texts.items(), key=lambda item: -item[1])[:self.tune.n_best]
            if not best:
                best = [("", -np.inf)]
            answer, score = best[0]
            answers.append(answer)
            odds.append(none - score)
            files["predictions.json"][q.id] = "" if odds[-1] > threshold else answer
            files["null_odds.json"][q.id] = float(odds[-1])
            files["nbest.json"][q.id] = [{"text": text, "score": float(score)} for text, score in best]
        return squad_metrics(questions, answers, np.array(odds), threshold), files


# ---- 4. One run: section 4.1, Tables 5 and 6 ----------------------------------------------------------------
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
    """All that the runs of a task have in common."""
    task: str
    text: Pretrained
    kind: Sentences | Spans
    parts: dict[str, Encoded]
    tune: TuneConfig
    place: Place
    out: Path
    remarks: list[str]
    identity: dict  # what the folder was made with


def collate(encoded: Encoded, chosen: np.ndarray, pad: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (B,) of a part -> tokens (B, m) int64, padding (B, m) bool, targets; m is the longest's length."""
    rows = [torch.from_numpy(encoded.ids[i]) for i in chosen]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)
    length = torch.tensor([len(row) for row in rows])
    padding = torch.arange(tokens.shape[1]) >= length[:, None]  # (B, m)
    targets = encoded.targets[torch.from_numpy(chosen)]
    return tokens.to(device), padding.to(device), targets.to(device)


def batches(encoded: Encoded, seed: int, steps: int, batch_size: int, pool: int = 16) -> Iterator[np.ndarray]:
    """Numbers (batch_size,) of the inputs of each step, a function of (seed, step): every epoch is a permutation. Those
    of `pool` steps are sorted by length, so that a batch needs little padding, and their batches shuffled."""
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
        numbers = order[start:start + batch_size]
        tokens, padding, targets = collate(encoded, numbers, job.text.pad, job.place.device)
        logits, h = model(tokens, padding)
        outputs.append(job.kind.decode(logits, targets, padding).cpu())
        moments.add(h[~padding].float())  # of real tokens alone
    return torch.cat(outputs).numpy()[np.argsort(order)], moments  # in the order of the examples again


def effective_ranks(moments: Moments) -> dict[str, int]:
    """0.9-effective ranks of H^L, as Table 3."""
    return {name: tau_rank(moments.spectrum(centered), 0.9) for name, centered in CENTERINGS.items()}


EVALUATIONS = 20  # at most: each half epoch of the ten epochs that Tables 5 and 6 have at most


def ends_interval(step: int, interval: float, batch_size: int) -> bool:
    """Whether the last of these `step` steps completes another `interval` of examples."""
    return step * batch_size // interval > (step - 1) * batch_size // interval


def train(model: Tuned, job: Job, tune: TuneConfig, seed: int) -> Iterator[tuple[int, float]]:
    """Fine-tune in place, without clipping. Each half epoch, or EVALUATIONS times if those are fewer, and after the
    last step, when the dev part is to be evaluated: yields the number of steps so far and the mean of their losses, not
    finite if the run has diverged."""
    encoded = job.parts["train"]
    steps = math.ceil(tune.epochs * len(encoded.ids) / tune.batch_size)
    interval = max(0.5, tune.epochs / EVALUATIONS) * len(encoded.ids)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(tune.adam_beta1, tune.adam_beta2), eps=tune.adam_epsilon,
                                  weight_decay=tune.weight_decay, fused=True)
    total = torch.zeros((), device=job.place.device)
    drawn = progress(batches(encoded, seed, steps, tune.batch_size), f"{job.task} seed {seed}", steps)
    for step, numbers in enumerate(drawn):
        model.train()  # an evaluation switches dropout off
        torch.manual_seed(seed_of(seed, step))  # for dropout
        tokens, padding, targets = collate(encoded, numbers, job.text.pad, job.place.device)
        with job.place.autocast():
            logits, _ = model(tokens, padding)
        loss = job.kind.loss(logits, targets, padding)
        loss.backward()
        factor = learning_rate_factor(step, round(tune.warmup_share * steps), steps)
        optimizer.param_groups[0]["lr"] = tune.learning_rate * factor
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step + 1 == steps or ends_interval(step + 1, interval, tune.batch_size):
            yield step + 1, float(total) / (step + 1)


class Validation(NamedTuple):
    """What the dev part says of a model after so many steps."""
    step: int
    value: float  # of the task's metric, percent; minus infinity where it is not defined
    metrics: dict[str, float]
    files: dict
    moments: Moments  # of H^L


def validate(model: Tuned, job: Job, step: int) -> Validation | None:
    """Evaluate on the dev part; None if a hidden state is not finite."""
    outputs, moments = predict(model, job.parts["dev"], job)
    if not moments.gram.isfinite().all():
        return None
    metrics, files = job.kind.score(outputs, job.parts["dev"])
    value = metrics[job.kind.metric]
    return Validation(step, value if math.isfinite(value) else -math.inf, metrics, files, moments)


def finite(value: float) -> float | None:
    """None for NaN and infinity."""
    return value if math.isfinite(value) else None


def run_once(job: Job, run: dict) -> dict:
    """One run, of a setting and a seed -> its line of sweep.jsonl. Of seed 1 the encoder and the predictions are
    kept, too. The value of a run that diverged, or whose metric is not defined, is None."""
    clock, seed = time.perf_counter(), run["seed"]
    encoder = job.text.fresh(seed)
    torch.manual_seed(seed_of(seed))  # for the head
    model = Tuned(encoder, job.kind.head()).to(job.place.device)
    setting = {name: run[name] for name in SWEPT}
    best = last = None
    for step, loss in train(model, job, replace(job.tune, **setting), seed):
        last = validate(model, job, step) if math.isfinite(loss) else None
        if last is None:  # diverged
            break
        if best is None or last.value > best.value:  # of equals the first
            best = last
            weights = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    line = {**run, "value": None, "metrics": {}, "effective_rank": None, "loss": None, "best": None, "last": None}
    files = {}
    if last is not None:
        kept = best if job.tune.keep == "best" else last
        if kept is best:
            model.load_state_dict(weights)  # the model itself has taken all steps
        metrics, files = dict(kept.metrics), kept.files
        if "dev_mm" in job.parts:
            outputs, _ = predict(model, job.parts["dev_mm"], job)
            mismatched, _ = job.kind.score(outputs, job.parts["dev_mm"])
            metrics |= {f"{name}_mm": value for name, value in mismatched.items()}
        line |= {"value": finite(kept.value), "best": finite(best.value), "last": finite(last.value),
                 "metrics": {name: finite(value) for name, value in metrics.items()},
                 "effective_rank": effective_ranks(kept.moments), "loss": loss,
                 "step": kept.step, "steps": last.step}
    if seed == 1:
        keep_files(job, run, None if last is None else model.encoder, files)
    return {**line, "seconds": round(time.perf_counter() - clock, 2)}


# ---- 5. The folder ------------------------------------------------------------------------------------------
def kept_folder(out: Path, run: dict) -> Path:
    """Where the files of a run are kept, apart from those of other settings."""
    return out / ".kept" / digest(repr(run).encode())


def keep_files(job: Job, run: dict, encoder: nn.Module | None, files: dict) -> None:
    """Write the encoder and the predictions of a run (nothing if it diverged) to a folder of their own, and at last
    kept.json, a list of them with their hashes."""
    folder = kept_folder(job.out, run)
    shutil.rmtree(folder, ignore_errors=True)  # what a command that was killed, or damage, has left
    folder.mkdir(parents=True)
    if encoder is not None:
        job.text.save(encoder, folder)
    for name, content in files.items():
        write_json(folder / name, content, checked=False)  # as the official evaluation reads it
    hashes = {path.name: file_hash(path) for path in sorted(folder.iterdir())}
    write_json(folder / "kept.json", {"run": run, "files": hashes})


def are_kept(out: Path, run: dict) -> bool:
    """Whether the files of a run are all there, as they were written."""
    folder = kept_folder(out, run)
    try:
        hashes = read_json(folder / "kept.json", {"files": dict})["files"]
        return all(file_hash(folder / name) == value for name, value in hashes.items())
    except (UserError, OSError):
        return False


def publish(job: Job, run: dict, result: dict) -> None:
    """Put the files of the result's first run and result.json in their places. Settings can take turns in a folder:
    however this ends, result.json never stands beside the encoder of another one."""
    with lock_of(job.out, "result.json"):
        (job.out / "result.json").unlink(missing_ok=True)
        own = read_json(kept_folder(job.out, run) / "kept.json")["files"]
        for other in job.out.glob(".kept/*/*"):
            if other.name not in own:
                (job.out / other.name).unlink(missing_ok=True)
        for name in own:
            with atomic(job.out / name) as temporary:
                link_or_copy(kept_folder(job.out, run) / name, temporary)
        write_json(job.out / "result.json", result)


def link_or_copy(path: Path, new: Path) -> None:
    """A second name for a file, which takes no space; a copy where the file system knows no such names."""
    try:
        os.link(path, new)
    except OSError:
        shutil.copyfile(path, new)


def ranks_before(job: Job) -> dict[str, int]:
    """Effective ranks on the dev part before fine-tuning, measured once for an encoder and a task: before.json.
    UserError if a hidden state is not finite."""
    path, key = job.out / "before.json", {name: job.identity[name] for name in ("weights", "examples")}
    with lock_of(job.out, path.name):  # another process may be measuring them
        found = read_json(path, {"effective_rank": dict}) if path.is_file() else {}
        if not key.items() <= found.items():
            untuned = Tuned(job.text.fresh(1), job.kind.head())
            _, moments = predict(untuned.to(job.place.device), job.parts["dev"], job)
            if not moments.gram.isfinite().all():
                raise UserError(f"{job.text.name}: hidden states with NaN or infinity; use another --init")
            found = {**key, "effective_rank": effective_ranks(moments)}
            write_json(path, found)
    return found["effective_rank"]


# ---- 6. Many runs -------------------------------------------------------------------------------------------
def read_runs(out: Path) -> list[dict]:
    """The lines of sweep.jsonl."""
    lines = read_lines(out / "sweep.jsonl")
    for line in lines:
        line.setdefault("last", line.get("value"))  # earlier versions knew no other
    return lines


def find_run(out: Path, run: dict) -> dict | None:
    """The line of sweep.jsonl of a run {setting and seed}, None if it has not ended."""
    return next((line for line in read_runs(out) if run.items() <= line.items()), None)


def is_done(out: Path, run: dict) -> bool:
    """Whether a run has ended and, of seed 1, its files are there."""
    return find_run(out, run) is not None and (run["seed"] != 1 or are_kept(out, run))


def digest(content: bytes) -> str:
    """A hash of 16 letters."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def lock_of(out: Path, key: object) -> FileLock:
    """The lock of a run, or of the file sweep.jsonl. The system frees it when its process dies; the empty file that it
    leaves in the hidden folder does no harm."""
    return FileLock(out / ".locks" / digest(repr(key).encode()))


def complete(job: Job, runs: list[dict]) -> list[dict]:
    """The lines of all `runs`. Those that are missing are done here, or waited for where another process is at them;
    each ends with a line in sweep.jsonl."""
    for wait, run in itertools.product((False, True), runs):  # first what is free, then what others are at
        if is_done(job.out, run):
            continue
        try:
            held = lock_of(job.out, run).acquire(blocking=wait)
        except Timeout:  # another process is at it
            continue
        with held:
            if not is_done(job.out, run):  # it may have ended while we waited
                line = run_once(job, run)
                if not find_run(job.out, run):  # else its files had been lost
                    with lock_of(job.out, "sweep.jsonl"):
                        append_line(job.out / "sweep.jsonl", line)
                print(line_of(job, line), flush=True)
    return [find_run(job.out, run) for run in runs]


def line_of(job: Job, line: dict) -> str:
    """A run in print."""
    setting = "  ".join(f"{name} {line[name]:g}" for name in SWEPT)
    value = "diverged" if line["value"] is None else f"{line['value']:.2f}"
    return f"{job.task}  {setting}  seed {line['seed']}  {job.kind.metric} {value}  {line['seconds']:.0f} s"


def worth(line: dict) -> float:
    """The metric of a run; minus infinity if it diverged."""
    return -math.inf if line["value"] is None else line["value"]


def make_job(task: str, init: str, tune: TuneConfig, options: argparse.Namespace, place: Place) -> Job:
    """Read encoder and data, encode, and check that the folder is new or holds runs of the very same; UserError if it
    holds others."""
    text = load_pretrained(init, tune.dropout)
    examples, remarks = read_task(task, options.data, text.val_share, tune.max_train, tune.max_dev)
    tune = replace(tune, learning_rate=tune.learning_rate or 3e-5 * (768 / text.dim) ** 2)
    make_kind = Spans if task == "squad2" else Sentences
    kind, parts = make_kind(task, examples["train"], text, tune), {}
    for part, rows in examples.items():
        parts[part] = kind.encode(rows, training=part == "train")
        remarks = remarks + [f"{part}: {remark}" for remark in parts[part].remarks]
    if options.out and options.task == task and not options.figure3:
        out = options.out
    else:  # one of several
        out = (options.out or Path("out")) / f"{task}-{text.name}"
    weights = [tensor.numpy().tobytes() for tensor in text.fresh(0).state_dict().values()]
    identity = {
        "task": task,
        "model": text.config,
        "train": {"val_share": text.val_share},
        "weights": digest(b"".join(weights)),
        "examples": digest(repr(examples).encode(errors="replace")),
        "tune": {name: value for name, value in asdict(tune).items() if name not in SWEPT},
    }
    with claim_folder(out, "fine-tuning", wait=True):
        own = "finetune.json" if "hub" in text.config else "config.json"  # transformers has its own config.json
        found = [read_json(out / name) for name in ("finetune.json", "config.json") if (out / name).is_file()]
        found = [there for there in found if "task" in there]
        if not found and (out / "sweep.jsonl").is_file():
            raise UserError(f"{out}: has runs in sweep.jsonl, but no {own} that says of what; choose another --out")
        for there in found:
            there.get("tune", {}).setdefault("keep", "last")  # earlier versions had no choice
            compare_runs(out, there, identity)
        write_json(out / own, {"init": init, **text.save_tokenizer(out), **identity})
    return Job(task, text, kind, parts, tune, place, out, remarks, identity)


def finetune(task: str, init: str, tune: TuneConfig, options: argparse.Namespace, place: Place) -> dict:
    """Fine-tune one encoder on one task: with --sweep the whole grid, then the best setting, with seeds 1, 2, ...
    Writes and returns result.json."""
    job = make_job(task, init, tune, options, place)
    if place.first:
        paths = [locate(task, options.data, split) for split in range(len(TASKS[task].files))]
        read = [f"from {path}, {path.stat().st_size:,} bytes" for path in paths if path]
        first = f"{job.out}: {len(job.parts['train'].ids):,} training inputs"
        print(first, *read, *job.remarks, sep="\n  ", flush=True)
    before = ranks_before(job)
    setting, sweep = {name: getattr(job.tune, name) for name in SWEPT}, []
    if options.sweep:
        tried = [point | {"seed": 0} for point in grid(TASKS[task].group, job.text.dim, options.given)]
        sweep = sorted(complete(job, tried), key=worth, reverse=True)
        setting = {name: sweep[0][name] for name in SWEPT}
        if place.first:
            print("all runs, best first", *(line_of(job, line) for line in sweep), sep="\n")
    # The grid has seed 0: the seeds of the result played no part in the choice.
    runs = [setting | {"seed": seed} for seed in range(1, options.seeds + 1)]
    finals = complete(job, runs)
    result = make_result(job, init, setting, before, finals, sweep)
    if place.first:
        publish(job, runs[0], result)
        print(report(result), f"{job.out}: result.json, sweep.jsonl", sep="\n", flush=True)
    return result


def median(values: list[float | None]) -> float | None:
    """The median of the seeds that did not diverge, whose value is None."""
    sound = [value for value in values if value is not None]
    return float(np.median(sound)) if sound else None


def rank_after(ranks: dict, centering: str) -> float | None:
    """The median over seeds of a rank after fine-tuning, of what result.json has as `effective_rank`."""
    return median([found[centering] if found else None for found in ranks["after"]])


def seeds_of(values: list[float | None]) -> str:
    """What a median is of, in words."""
    diverged = values.count(None)
    if not diverged:
        return f"{len(values)} seeds"
    return f"{len(values) - diverged} of {len(values)} seeds; {diverged} diverged"


def shown(value: float | None, digits: int = 2) -> str:
    """A median in print."""
    return "-" if value is None else f"{value:.{digits}f}"


def make_result(job: Job, init: str, setting: dict, before: dict, finals: list[dict], sweep: list[dict]) -> dict:
    """result.json: values of all seeds and their median, of the checkpoints kept and of both that there are, the median
    of each metric, what was run, and Table 3."""
    values = [line["value"] for line in finals]
    both = {}
    for name in ("best", "last"):
        found = [line.get(name) for line in finals]
        both[name] = {"median": median(found), "values": found}
    sound = [line["metrics"] for line in finals if line["metrics"]]  # of runs that did not diverge
    metrics = {}
    for name in sound[0] if sound else ():
        metrics[name] = median([found[name] for found in sound])
    return {
        "task": job.task, "init": init, "encoder": job.text.name,
        "metric": job.kind.metric, "median": median(values), "values": values,
        "keep": job.tune.keep, **both,
        "seeds": [line["seed"] for line in finals],
        "metrics": metrics,
        "setting": setting,
        "tune": asdict(job.tune) | setting,
        "model": job.text.config,
        "remarks": job.remarks,
        "inputs": {part: len(encoded.ids) for part, encoded in job.parts.items()},
        "effective_rank": {
            "tau": 0.9, "d": job.text.dim,
            "before": before,
            "after": [line["effective_rank"] for line in finals],
        },
        "sweep": sweep,
    }


def report(result: dict) -> str:
    """result.json in print: the metrics, their spread over seeds, and Table 3's ranks."""
    ranks = result["effective_rank"]
    values = [value for value in result["values"] if value is not None]
    spread = f"{min(values):.2f} ... {max(values):.2f}" if values else "all diverged"
    metrics = "  ".join(f"{name} {shown(value)}" for name, value in result["metrics"].items())
    both = ", ".join(f"{name} {shown(result[name]['median'])}" for name in ("best", "last"))
    changes = []
    for name in CENTERINGS:
        changes.append(f"{name} {ranks['before'][name]} -> {shown(rank_after(ranks, name), digits=0)}")
    return (f"{result['task']}  {metrics}  (median of {seeds_of(result['values'])}; {result['metric']} {spread})\n"
            f"kept: the {result['keep']} checkpoint of each run; {result['metric']} of both: {both}\n"
            f"effective rank on the dev part, before -> after, of {ranks['d']}: {', '.join(changes)}")


# ---- 7. Figure 3 and the average of Table 1 -----------------------------------------------------------------
def figure3(hours: dict[str, float], results: list[dict], out: Path) -> None:
    """Write figure3.json, with the rank of H^L after fine-tuning, and draw figure3.png: the metric against hours of
    pre-training, a line for each run."""
    points = []
    for path, result in zip(hours, results):
        points.append({"run": str(Path(path).parent), "checkpoint": path, "hours": hours[path],
                       "median": result["median"], "values": result["values"],
                       "rank": {name: rank_after(result["effective_rank"], name) for name in CENTERINGS}})
    points.sort(key=lambda point: (point["run"], point["hours"]))
    sound = [point for point in points if point["median"] is not None]
    runs = {}
    for point in sound:
        runs.setdefault(point["run"], []).append(point)
    shares = time_shares(runs)
    with claim_folder(out, "fine-tuning", wait=True):
        write_json(out / "figure3.json", {"points": points, "time_shares": shares})
        with figure(out / "figure3.png") as (_, axes):
            for run, line in runs.items():
                axes.plot([p["hours"] for p in line], [p["median"] for p in line], marker="o", label=run)
            every = [value for point in points for value in point["values"]]
            axes.set(xlabel="hours of pre-training", title=f"{results[0]['task']}, fine-tuned from checkpoints",
                     ylabel=f"{results[0]['metric']} (%), {len(points)} medians of {seeds_of(every)}")
            axes.legend()
    for share in shares:
        text = f"{share['run']} reaches the final score of {share['of']} ({share['score']:.2f})"
        print(f"{text} after {share['share']:.0%} of its time" if share["share"] is not None else f"{text}: never")
    print(f"{out}: figure3.json, figure3.png")


def share_of_time(run: list[dict], of: list[dict]) -> float | None:
    """At its first checkpoint that is as good as another run's last one, which share of the other's time has a run
    taken? Both by hours. None if it never is, or the other's last one diverged. Section 4.2: 40 % of RoBERTa's."""
    end = of[-1]
    if end["median"] is None:
        return None
    for point in run:
        if point["median"] is not None and point["median"] >= end["median"]:
            return point["hours"] / end["hours"]
    return None


def time_shares(runs: dict[str, list[dict]]) -> list[dict]:
    """The share of time of each two runs {name: points by hours}."""
    found = []
    for run, of in itertools.permutations(runs, 2):
        share = share_of_time(runs[run], runs[of])
        found.append({"run": run, "of": of, "score": runs[of][-1]["median"], "share": share})
    return found


def table1(results: list[dict]) -> dict[str, float | None]:
    """The columns of Table 1 that the results of an encoder have; the average, with MNLI matched, if all of GLUE is
    there. None where all seeds diverged."""
    row, glue = {}, {}
    for result in results:
        task, metrics = result["task"], result["metrics"]
        if task in GLUE:
            glue[task] = result["median"]
        if task == "mnli":
            row |= {"mnli-m": metrics.get("accuracy"), "mnli-mm": metrics.get("accuracy_mm")}
        elif task == "squad2":
            row |= {"squad2 em": metrics.get("exact"), "squad2 f1": metrics.get("f1")}
        else:
            row[task] = result["median"]
    if len(glue) == len(GLUE):
        row["average"] = None if None in glue.values() else float(np.mean(list(glue.values())))
    return row


def print_table1(results: list[dict], out: Path) -> None:
    """Print a row of Table 1 and write it to result.json."""
    row = table1(results)
    medians = {result["task"]: result["median"] for result in results}
    with claim_folder(out, "fine-tuning", wait=True):
        write_json(out / "result.json", {"task": "glue", "average": row["average"], "medians": medians, "row": row,
                                         "results": results})
    columns = [f"{name} {shown(value, digits=1)}" for name, value in row.items()]
    diverged = [f"{result['task']}: {seeds_of(result['values'])}" for result in results if None in result["values"]]
    print("  ".join(columns), *diverged, f"{out}: result.json", sep="\n")


# ---- 8. Command line ----------------------------------------------------------------------------------------
def read_command(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, TuneConfig]]:
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
    add("--figure3", nargs="+", metavar="CHECKPOINT", default=[], help="fine-tune each, draw metric against time")
    add_flags(parser, TuneConfig)
    options = parser.parse_args(argv)
    options.given = given_flags(options, TuneConfig)
    if options.seeds < 1:
        parser.error(f"--seeds {options.seeds}: use a positive number")
    if options.figure3 and options.task == "glue":
        parser.error("--figure3: needs one --task")
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
        if options.out:
            refuse_other_kind(options.out, "fine-tuning")
        # What is missing is found before the first run.
        for task in tasks:
            for split in range(len(TASKS[task].files)):
                locate(task, options.data, split)
        hours = {}
        for checkpoint in options.figure3:
            state = read_tensors(Path(checkpoint))
            if not isinstance(state.get("seconds"), float):
                raise UserError(f"--figure3 {checkpoint}: not a checkpoint of train.py")
            hours[checkpoint] = state["seconds"] / 3600
        place = choose_place(options.given.get("precision", "auto"))  # torchrun's processes share by files, as all do
        torch.set_float32_matmul_precision("highest")  # TF32 is too coarse for effective ranks
        results = []
        for task, init in itertools.product(tasks, options.figure3 or [options.init]):
            results.append(finetune(task, init, tasks[task], options, place))
        if options.figure3 and place.first:
            figure3(hours, results, options.out or Path("out") / f"{options.task}-figure3")
        if options.task == "glue" and place.first:
            print_table1(results, options.out or Path("out") / f"glue-{results[0]['encoder']}")


if __name__ == "__main__":
    main()
