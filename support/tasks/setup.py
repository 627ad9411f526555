"""How the runs of a task begin: what they share, and which folder is theirs."""
import argparse
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from support.program.errors import say
from support.program.files import code_hash, write_text
from support.program.worker import Worker
from support.tasks import results
from support.tasks.classification import Classification
from support.tasks.encoder import Pretrained
from support.tasks.examples import hash_of
from support.tasks.squad import Spans
from support.tasks.types import TASKS, Encoded, labels_of

# The kinds of tasks (see Task in types.py). finetune.py calls encode, head, loss, decode and score of each.
KINDS = {"classification": Classification, "spans": Spans}
# The code that makes a run. A result never mixes runs of different code.
CODE = ("maelm.py", "train.py", "rank.py", "finetune.py", "support/model/*.py",
        "support/tasks/*.py", "support/text/*.py")


class Setup(NamedTuple):
    """Everything that the runs of a task share. A run is a TuneConfig and a seed."""
    task: str
    pretrained: Pretrained
    kind: Classification | Spans
    train: Encoded
    dev_splits: dict[str, Encoded]  # dev and, for MNLI, dev_mm
    tune: object  # finetune.TuneConfig; a sweep replaces some of its fields
    frozen: str  # "" to fine-tune; mean or cls for a linear probe
    worker: Worker
    out: Path

    @property
    def metric(self) -> str:
        """The metric that selects checkpoints, and is the value of a run."""
        return self.kind.labels.metrics[0]


def make_setup(task: str, pretrained: Pretrained, examples: dict[str, list], tune, out: Path,
               options: argparse.Namespace, worker: Worker) -> Setup:
    """Encode the examples of a task, and claim the folder `out` for its runs."""
    default_rate = 3e-5 * (768 / pretrained.config.encoder_dim) ** 2
    tune = replace(tune, learning_rate=tune.learning_rate or default_rate)
    pretrained = pretrained.with_dropout(tune.dropout)
    labels = labels_of(task, examples["train"])
    kind = KINDS[TASKS[task].kind](pretrained.tokenizer, pretrained.config, tune, labels)
    train = kind.encode(examples["train"])
    dev_splits = {split: kind.encode(each) for split, each in examples.items() if split != "train"}
    results.claim(out, worker, {
        "init": options.init, "task": task, "weights": pretrained.weights_hash(), "code": code_hash(*CODE),
        "examples": hash_of(examples), "sweep": options.sweep, "frozen": options.frozen, **vars(tune)})
    if worker.is_main:
        write_text(out / "tokenizer.json", pretrained.tokenizer.to_json())
        remarks = {"train": train.remark} | {split: encoded.remark for split, encoded in dev_splits.items()}
        say(f"{out}: {len(train.ids):,} training inputs", *[f"  {split}: {each}" for split, each in remarks.items()])
    return Setup(task, pretrained, kind, train, dev_splits, tune, options.frozen, worker, out)
