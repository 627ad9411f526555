"""Heads on top of an encoder: a classifier for one or two texts, and spans for SQuAD 2.0."""
import functools
import json
import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from maelm import CLS, PAD, SEP, Config
from support.files import json_lines
from support.metrics import METRICS, squad_metrics
from support.tasks import Example, Labels, Question
from support.tokenizer import Tokenizer


# ---- 1. A label or a number for one or two texts -----------------------------------------------------------
class Encoded(NamedTuple):
    """A split of a task as tokens."""
    ids: list[np.ndarray]  # per input, (length,) int64
    targets: Tensor  # labels (N,) int64 or float32; spans (N, 3) int64: first and last token, start of the passage
    examples: list  # Example or Question
    windows: list[tuple[int, int]]  # SQuAD: index of each input's question, and shift from context to input
    remark: str


def collate(encoded: Encoded, chosen, device: torch.device):
    """Inputs of a split, by index (B,) -> tokens (B, m) int64, padding (B, m) bool, and targets. The longest has m."""
    ids = [torch.from_numpy(encoded.ids[i]) for i in chosen]
    tokens = nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=PAD).to(device)
    return tokens, tokens == PAD, encoded.targets[chosen].to(device)


class ClassifierHead(nn.Sequential):
    """H^L at [CLS] -> logits (B, C), as in RoBERTa: dropout, dense, tanh, dropout, linear. PyTorch's
    own initialization."""
    def __init__(self, d: int, classes: int, dropout: float):
        super().__init__(
            nn.Dropout(dropout), nn.Linear(d, d), nn.Tanh(),
            nn.Dropout(dropout), nn.Linear(d, classes))

    def forward(self, h):
        """h (B, m, d) -> (B, C)."""
        return super().forward(h[:, 0])


class Classification:
    """Inputs `[CLS] A [SEP]` or `[CLS] A [SEP] B [SEP]`, with targets as in Encoded. Spans has the same methods."""
    def __init__(self, tokenizer: Tokenizer, config: Config, tune, labels: Labels):
        self.config, self.labels = config, labels
        self.n = min(tune.seq_len, config.seq_len)
        self.model = tokenizer.framed()
        self.model.enable_truncation(self.n)  # cut the longer text first

    def encode(self, examples: list[Example]) -> Encoded:
        """Tokenize examples, each to at most n tokens. Raises UserError as Labels.target does."""
        targets = [self.labels.target(example) for example in examples]  # before the long part
        ids, truncated = [], 0
        for example in tqdm(examples, "tokenizing", leave=False, disable=None):
            found = self.model.encode(example.text, example.text2)
            ids.append(np.array(found.ids, np.int64))
            truncated += bool(found.overflowing)
        return Encoded(ids, torch.tensor(targets), examples, [],
                       f"{truncated:,} of {len(ids):,} inputs are cut off at {self.n} tokens")

    def head(self) -> nn.Module:
        return ClassifierHead(self.config.encoder_dim, max(1, len(self.labels.names)), self.config.dropout)

    def loss(self, logits, targets, padding):
        """Cross-entropy in nats, or the squared error of one number; mean over the batch."""
        if self.labels.names:
            return F.cross_entropy(logits, targets)
        return F.mse_loss(logits[:, 0], targets)

    def decode(self, logits, targets, padding):
        """The logits (B, C), unchanged."""
        return logits

    def score(self, outputs, encoded: Encoded) -> tuple[dict[str, float | None], dict[str, str]]:
        """Logits (N, C) -> metrics in percent (None for the rank correlation of equal predictions), and files of
        predictions by name: a .jsonl with the probability of every label, and a .tsv in the format of GLUE's server."""
        names = self.labels.names
        lines = []
        for example, output in zip(encoded.examples, torch.from_numpy(outputs)):
            line = {"id": example.id}
            if example.label is not None:
                line["label"] = example.label if names else float(example.label)
            if names:
                line["prediction"] = names[output.argmax()]
                line["scores"] = dict(zip(names, output.softmax(0).tolist()))
            else:
                line["prediction"] = float(f"{self.labels.scale * output.item():.4g}")
            lines.append(line)
        table = [f"{line['id']}\t{line['prediction']}\n" for line in lines]
        predicted = outputs.argmax(1) if names else outputs[:, 0]
        metrics = {}
        for name in self.labels.metrics:
            value = METRICS[name](predicted, encoded.targets.numpy())
            metrics[name] = None if math.isnan(value) else 100 * value
        return metrics, {
            "predictions.jsonl": json_lines(lines),
            "predictions.tsv": "".join(["index\tprediction\n", *table])}


# ---- 2. SQuAD 2.0 -------------------------------------------------------------------------------------------
def spans_of(tokenizer: Tokenizer, text: str):
    """Text -> ids, and for each token its first character and the one after its last, without the space before a word;
    (length,) each."""
    found = tokenizer.model.encode(text, add_special_tokens=False)  # tiktoken has the same ids, but no characters
    starts, ends = np.array(found.offsets, np.int64).reshape(-1, 2).T
    space = np.array([*map(str.isspace, text), False])
    starts = np.minimum(starts + space[starts], ends)
    return np.array(found.ids, np.int64), starts, ends


def answer_tokens(q: Question, starts, ends) -> tuple[int, int]:
    """The first and last token of the first answer, given the tokens' characters (length,); (0, 0) if there is no
    answer."""
    if not q.answers:
        return 0, 0
    start, text = q.answers[0]
    first = start + len(text) - len(text.lstrip())  # without white space around the answer
    last = first + len(text.strip())
    a = int(np.searchsorted(ends, first, side="right"))  # the first token that ends after character `first`
    b = int(np.searchsorted(starts, last)) - 1  # the last token that starts before character `last`
    return a, b


class Spans:
    """Inputs `[CLS] question [SEP] window of the context [SEP]`; an answer outside the window is at [CLS]."""
    def __init__(self, tokenizer: Tokenizer, config: Config, tune, labels: Labels):
        self.tokenizer, self.config, self.tune, self.labels = tokenizer, config, tune, labels
        self.n = min(tune.seq_len, config.seq_len)
        self.spans_of = functools.cache(functools.partial(spans_of, tokenizer))  # many questions share a context

    def encode(self, questions: list[Question]) -> Encoded:
        """All windows of all questions, of at most n tokens. A window starts every doc_stride tokens, or every half
        window."""
        ids, targets, windows = [], [], []
        longest = min(self.tune.max_query, self.n // 2)
        for number, q in enumerate(questions):
            context, starts, ends = self.spans_of(q.context)
            first, last = answer_tokens(q, starts, ends)
            question = self.tokenizer.encode(q.question)
            query = [CLS, *question[:longest], SEP]
            room = self.n - len(query) - 1  # for the window
            stride = min(self.tune.doc_stride, max(1, room // 2))
            # The last window is the one that reaches the end of the context.
            end = max(0, len(context) - room) + stride
            for offset in range(0, end, stride):
                window = context[offset:offset + room]
                ids.append(np.array([*query, *window, SEP], np.int64))
                shift = len(query) - offset  # from an index in the context to an index in the input
                windows.append((number, shift))
                inside = q.answers and offset <= first and last < offset + room
                target = (first + shift, last + shift) if inside else (0, 0)
                targets.append((*target, len(query)))
        return Encoded(ids, torch.tensor(targets), questions, windows, f"{len(ids):,} windows of {self.n} tokens")

    def head(self) -> nn.Module:
        """A new head: H^L -> logits of the first and the last token of the answer, (B, m, 2)."""
        return nn.Linear(self.config.encoder_dim, 2)

    def in_passage(self, logits, targets, padding):
        """Logits (B, m, 2), -inf except at [CLS] and in the window; targets (B, 3) int64, padding (B, m) bool."""
        position = torch.arange(logits.shape[1], device=logits.device)
        start = targets[:, 2:]
        length = (~padding).sum(1, keepdim=True) - 1  # without the last [SEP]
        allowed = (position >= start) & (position < length)  # (B, m)
        allowed[:, 0] = True
        return logits.masked_fill(~allowed[:, :, None], -torch.inf)

    def loss(self, logits, targets, padding):
        """Mean of the cross-entropies of the first and the last token, in nats."""
        return F.cross_entropy(self.in_passage(logits, targets, padding), targets[:, :2])

    def decode(self, logits, targets, padding):
        """Logits (B, m, 2) -> (B, 4): the score of no answer; score, first and last token of the best span."""
        starts, ends = self.in_passage(logits, targets, padding).unbind(2)  # (B, m) each
        null = starts[:, 0] + ends[:, 0]
        longest = min(self.tune.max_answer, logits.shape[1])
        starts = F.pad(starts[:, 1:], (1, 0), value=-torch.inf)  # [CLS] is not an answer
        ends = F.pad(ends, (0, longest - 1), value=-torch.inf)
        ends = ends.unfold(1, longest, 1)  # (B, m, longest): the scores of each token and the next tokens
        spans = starts[:, :, None] + ends
        score, at = spans.flatten(1).max(1)
        first = at // longest
        return torch.stack([null, score, first, first + at % longest], dim=1)

    def score(self, outputs, encoded: Encoded) -> tuple[dict[str, float], dict[str, str]]:
        """Outputs of all windows (N, 4) -> the numbers of the official evaluation, and the files that it reads: by the
        id of a question, its answer ("" for none), and the score of no answer minus that of the best span."""
        null = {q.id: math.inf for q in encoded.examples}
        best = {q.id: (-math.inf, "") for q in encoded.examples}  # score and text of the best span
        for (number, shift), (no_answer, score, first, last) in zip(encoded.windows, outputs.tolist()):
            q = encoded.examples[number]
            null[q.id] = min(null[q.id], no_answer)
            if score > best[q.id][0]:
                _, starts, ends = self.spans_of(q.context)
                start = starts[int(first) - shift]  # first and last are tokens of the input
                end = ends[int(last) - shift]
                best[q.id] = score, q.context[start:end]
        answers, odds = {}, {}
        for name, (score, text) in best.items():
            odds[name] = null[name] - score
            answers[name] = text if odds[name] <= 0 else ""
        return squad_metrics(encoded.examples, answers, odds), {
            "predictions.json": json.dumps(answers, indent=1),
            "null_odds.json": json.dumps(odds, indent=1)}


# ---- 3. An encoder with a head ------------------------------------------------------------------------------
class Tuned(nn.Module):
    """An encoder with a head."""
    def __init__(self, encoder: nn.Module, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, tokens, padding):
        """tokens (B, m) int64, padding (B, m) bool -> the head's logits in float32, H^L (B, m, d)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        h = self.encoder(tokens, positions, padding)
        return self.head(h).float(), h
