"""From a task and its training examples to the kind of task that it is."""
from maelm import Config
from support.classification import Classification, Kind
from support.squad import Spans
from support.tasks import TASKS, TuneConfig, labels_of
from support.tokenizer import Tokenizer

KINDS = {"classification": Classification, "spans": Spans}  # by Task.kind


def make_kind(task: str, tokenizer: Tokenizer, config: Config, tune: TuneConfig, train: list) -> Kind:
    """The kind of a task, with the labels of its training examples."""
    return KINDS[TASKS[task].kind](tokenizer, config, tune, labels_of(task, train))
