"""From a task and its examples to the kind of task that it is, and to tokens."""
from support.classification import Classification, Encoded, Kind
from support.checkpoints import Pretrained
from support.examples import labels_of
from support.squad import Spans
from support.tasks import TASKS, TuneConfig

KINDS = {"classification": Classification, "spans": Spans}  # by Task.kind


def encode_task(task: str, examples: dict[str, list], pretrained: Pretrained, tune: TuneConfig,
                regression: bool = False) -> tuple[Kind, dict[str, Encoded]]:
    """The kind of a task, with the labels of its training examples, and the tokens of each split."""
    labels = labels_of(task, examples["train"], regression)
    kind_of_task = KINDS[TASKS[task].kind]
    kind = kind_of_task(pretrained.tokenizer, pretrained.config, tune, labels)
    splits = {split: kind.encode(each) for split, each in examples.items()}
    return kind, splits
