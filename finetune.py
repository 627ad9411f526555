"""Fine-tuning: GLUE, SQuAD 2.0, and tasks that need no download.

    python finetune.py --init out/toy --task docs               # name a docstring's library
    python finetune.py --init out/toy --task docs --frozen      # a linear probe
    python finetune.py --init out/toy --task docs --frozen --shots 8   # with 8 labels per class
    python finetune.py --init bow:out/toy --task docs           # naive Bayes on the same tokens
    python finetune.py --init lsa:out/toy --task docs           # a probe of latent semantic analysis
    python finetune.py --init out/base --task rte --sweep       # Table 5's grid, then five seeds
    python finetune.py --init out/base --task rte,mrpc          # several tasks, and their average; glue: all eight
    python finetune.py --init out/toy --task custom --data DIR  # your own texts

In DIR, --task custom reads the files train, dev and test (.csv, .tsv, .jsonl or .parquet):

    columns    text, text2 (optional) and label, or those that flags name
    labels     names, as written: 01 is not 1. Whole numbers are also names, unless --regression is given
    numbers    labels with decimals are numbers to predict (regression)
    F1         with two labels, the second in alphabetical order is positive
    dev        chooses the best of at most 20 checkpoints, so its scores are slightly optimistic; without this
               file, it is a tenth of train
    test       may lack labels; predictions_test.jsonl has its predictions

Repeat a command to complete missing runs.
"""
import argparse
import copy
import math
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import nn

from rank import encoder_ranks
from support.checkpoints import Pretrained, Tuned
from support.classification import Encoded
from support.examples import Data, read_tasks
from support.kinds import encode_task
from support.model import seed_of
from support.optim import take_step
from support.probe import POOLINGS, Scores, fit, fit_counts, lsa_of, scores_of, strength_of
from support.probe import texts_of, vectors_of, words_of
from support.program import Parser, UserError, clear_errors, fields_of, progress, short_name
from support.results import Results, ordered, table1
from support.tasks import TASKS, TuneConfig, task_names
from support.worker import Worker
from train import learning_rate_factor

# Baselines without an encoder, such as --init bow:FOLDER, which stand in --frozen's place:
BOW = "bow"  # bag of words, for naive Bayes
LSA = "lsa"  # latent semantic analysis


# ---- 1. All runs of a task -----------------------------------------------------------------------
class FineTuning:
    """The runs of a task with an encoder: a sweep, if wanted, then several seeds. `kind` knows the
    task's inputs, head, loss and scores; `splits` are its encoded examples: train, and those on
    which models are scored."""
    def __init__(self, task: str, pretrained: Pretrained, examples: dict[str, list], given: dict, out: Path,
                 flags: argparse.Namespace, worker: Worker):
        """Encode the examples with the `given` settings, and reserve the folder `out`; see
        Results."""
        self.task = task
        self.given = given
        self.flags = flags
        self.worker = worker
        self.dim = pretrained.config.encoder_dim
        self.tune = TuneConfig.of(task, given, self.dim)
        self.pretrained = pretrained.with_dropout(self.tune.dropout)
        regression = flags.source.regression
        self.kind, self.splits = encode_task(task, examples, self.pretrained, self.tune, regression)
        if (flags.shots or flags.frozen == BOW) and not self.kind.labels.names:
            raise UserError(f"--task {task}: has no classes, which --shots and {BOW}: need")
        if flags.frozen == LSA and "corpus" not in pretrained.state:
            raise UserError(f"--init {flags.init}: the text of these weights is not known; "
                            "name a run of train.py")
        self.metric = self.kind.labels.metrics[0]  # selects checkpoints, and is the value of a run
        self.inputs = {}  # of a probe
        self.results = Results(out, asdict(self.tune) | {
            "init": flags.init, "task": task, "weights": pretrained.weights_hash(), "metric": self.metric,
            "examples": examples, "sweep": flags.sweep, "frozen": flags.frozen, "shots": flags.shots})
        print(f"{out}:", *[f"  {split}: {encoded.remark}" for split, encoded in self.splits.items()], sep="\n")

    def run_all(self) -> dict:
        """Do all runs: the grid with --sweep, then seeds 1, 2, ... Returns result.json."""
        flags = self.flags
        tune = self.tune
        sweep = []
        if flags.sweep:
            # Seed 0, because the choice must not depend on the seeds of the result.
            sweep = self.do_jobs([(point, 0) for point in tune.grid(self.task, self.dim, self.given)])
            best = max(sweep, key=lambda run: ordered(run["value"]))
            tune = TuneConfig(**best["tune"])
        is_fixed = flags.frozen and not self.pretrained.is_random
        count = flags.seeds or (1 if is_fixed and not flags.shots else 5)
        runs = self.do_jobs([(tune, seed) for seed in range(1, count + 1)])
        encoder = self.pretrained.new_encoder(seed=1).to(self.worker.device)
        before = None if flags.frozen in (BOW, LSA) else self.ranks(encoder)
        return self.results.finish(runs, sweep, before, self.dim, self.pretrained.step)

    def do_jobs(self, jobs: list[tuple[TuneConfig, int]]) -> list[dict]:
        """Do the jobs (settings, seed) that the results lack. Returns the runs of all jobs."""
        do_run = self.probe_once if self.flags.frozen else self.run_once
        print(f"{self.task}: {len(jobs)} runs")
        runs = []
        for number, (tune, seed) in enumerate(jobs, start=1):
            run = self.results.find(tune, seed)
            if run is None:
                began = time.perf_counter()
                run, scores = do_run(tune, seed)
                run |= {"value": scores.metrics[self.metric], "metrics": scores.metrics, "tune": asdict(tune),
                        "seed": seed, "seconds": round(time.perf_counter() - began, 2)}
                self.results.add(run, scores)
            self.results.show(run, number, len(jobs))
            runs.append(run)
        return runs

    # ---- 2. A run: section 4.1, Tables 5 and 6 ---------------------------------------------------
    def run_once(self, tune: TuneConfig, seed: int) -> tuple[dict, Scores]:
        """Fine-tune, without gradient clipping. Returns ranks and step of the checkpoint that is
        best on the examples of `choice`, and its Scores. The best seed's model is saved."""
        train, choice = self.examples_of(seed)
        kind = self.kind
        worker = self.worker
        encoder = self.pretrained.new_encoder(seed)
        torch.manual_seed(seed_of(seed))  # for the new head
        model = Tuned(encoder, kind.head()).to(worker.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=tune.learning_rate, betas=(0.9, 0.98),
                                      eps=1e-6, weight_decay=tune.weight_decay, fused=True)
        steps, evaluate_after = schedule(tune, len(train.ids))
        best_value = -math.inf  # of a checkpoint
        began = time.perf_counter()
        bar = progress(range(steps), desc=f"{self.task} seed {seed}")
        for step, indices in zip(bar, train.shuffled(seed, tune.batch_size)):  # shuffled never ends
            model.train()  # evaluation switched dropout off
            torch.manual_seed(seed_of(seed, step, 1))  # for dropout
            tokens, padding, targets = train.batch(indices, worker.device)
            with worker.autocast():
                logits = model(tokens, padding)
            kind.loss(logits, targets, tokens).backward()
            factor = learning_rate_factor(step, round(tune.warmup_share * steps), steps)
            take_step([optimizer], factor)
            if step == 9 and not self.results.runs:  # after ten steps of the first run
                minutes = (time.perf_counter() - began) / 10 * steps / 60
                print(f"{steps:,} steps per run, about {minutes:.1f} min without evaluations")
            if step + 1 in evaluate_after:
                with worker.autocast():
                    scores = self.evaluate(model, {"dev": choice})
                value = scores.metrics[self.metric]
                if value is None:  # the run has diverged, even if an earlier checkpoint was good
                    return {"step": step + 1, "ranks": None}, scores
                if value > best_value:
                    best_value = value
                    best_step = step + 1
                    best_weights = copy.deepcopy(model.state_dict())

        model.load_state_dict(best_weights)
        others = {split: encoded for split, encoded in self.splits.items() if split != "train"}
        scores = self.evaluate(model, others)
        best_run = self.results.best()
        if seed > 0 and (best_run is None or scores.metrics[self.metric] > best_run["value"]):
            model.save(self.results.out / "encoder.pt", self.pretrained, task=self.task, longest=tune.seq_len,
                       **kind.labels.saved())
        return {"step": best_step, "ranks": self.ranks(model.encoder)}, scores

    def examples_of(self, seed: int) -> tuple[Encoded, Encoded]:
        """The examples of a run, and those that choose its checkpoint: the splits train and dev or,
        with --shots, four fifths and a fifth of the drawn examples."""
        train = self.splits["train"]
        if not self.flags.shots:
            return train, self.splits["dev"]
        drawn = train.draw(self.flags.shots, seed)
        fifth = len(drawn) // 5  # of each label, if all have enough
        return train.take(drawn[:-fifth]), train.take(drawn[-fifth:])

    def evaluate(self, model: Tuned, splits: dict[str, Encoded]) -> Scores:
        """The Scores of a model on these splits."""
        model.eval()

        def decoded(tokens, padding):
            return self.kind.decode(model(tokens, padding), tokens)

        outputs = {split: encoded.outputs(decoded, self.worker.device) for split, encoded in splits.items()}
        return self.kind.scores(outputs, splits)

    def ranks(self, encoder: nn.Module) -> dict[str, int] | None:
        """The effective ranks of H^L on the dev split (Table 3); see encoder_ranks."""
        return encoder_ranks(encoder, self.splits["dev"].by_length(self.worker.device))

    def probe_once(self, tune: TuneConfig, seed: int) -> tuple[dict, Scores]:
        """Fit a linear model to the vectors of the frozen encoder or LSA, or naive Bayes. Returns
        its strength of regularization or smoothing, and Scores. There are no new `ranks`, because
        they do not change."""
        train = self.splits["train"]
        if not self.inputs or self.pretrained.is_random:
            self.inputs = self.inputs_of_probe(seed)
        drawn = train.draw(self.flags.shots, seed)
        inputs = self.inputs["train"][drawn]
        targets = train.targets[drawn].numpy()
        if self.flags.frozen == BOW:
            model = fit_counts(inputs, targets, self.metric)
        else:
            model = fit(inputs, targets, tune.l2, self.metric)
        scores = scores_of(model, self.kind, self.splits, self.inputs)
        return {"strength": strength_of(model), "ranks": None}, scores

    def inputs_of_probe(self, seed: int) -> dict[str, np.ndarray]:
        """For each split, the words of naive Bayes, (N,), or vectors of the last layer or LSA, (N, d)."""
        if self.flags.frozen == BOW:
            return {split: words_of(encoded) for split, encoded in self.splits.items()}
        if self.flags.frozen == LSA:
            decode = self.pretrained.tokenizer.decode
            documents = decode(self.pretrained.corpus().train.pieces.flatten()).split("[SEP]")
            lsa = lsa_of(documents, self.dim)
            return {split: lsa.transform(texts_of(encoded, decode)) for split, encoded in self.splits.items()}
        encoder = self.pretrained.new_encoder(seed).to(self.worker.device).eval()
        last = [self.pretrained.config.encoder_layers]
        inputs = {}
        for split, encoded in self.splits.items():
            inputs[split] = vectors_of(encoder, encoded, last)[self.flags.frozen][:, 0]
        return inputs


def schedule(tune: TuneConfig, inputs: int) -> tuple[int, set[int]]:
    """The number of steps for this many inputs, and the numbers of steps after which checkpoints
    are evaluated: two per epoch, but at most 20."""
    steps = math.ceil(tune.epochs * math.ceil(inputs / tune.batch_size))
    evaluations = min(20, math.ceil(2 * tune.epochs))
    return steps, {math.ceil(steps * i / evaluations) for i in range(1, evaluations + 1)}


# ---- 3. Command line -----------------------------------------------------------------------------
def parse(argv) -> tuple[argparse.Namespace, dict]:
    """Read and check the command line: flags, of which `source` is a Data, and the fields of
    TuneConfig that were given."""
    # Parse twice, because -h shows the settings of the task.
    first = Parser("finetune.py", __doc__, add_help=False)
    first.add_argument("--task", default="docs", help="docs, modules, bshift, custom, squad2, a task of GLUE, glue for "
                       "all eight, or several joined by commas [%(default)s]")
    task = first.parse_known_args(argv)[0].task
    parser = Parser("finetune.py", __doc__, parents=[first])
    add = parser.add_argument
    add("--init", default="out/toy", help="run folder, checkpoint, random:FOLDER, bow:FOLDER for naive Bayes on "
        "a run's tokens and their pairs, or lsa:FOLDER for a probe of LSA of its text [%(default)s]")
    add("--out", type=Path, help="folder for all results [out/TASK-INIT, then -mean or -cls with --frozen, and -SHOTS]")
    add("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="[%(default)s]")
    add("--seeds", type=int, default=0, help="number of runs; the result is their median [5; 1 if nothing is random]")
    add("--sweep", action="store_true", help="first search the grid of Table 5 or 6; flags replace its values")
    add("--frozen", choices=POOLINGS, nargs="?", const="mean", default="", help="freeze the encoder, and fit a "
        "linear model to the mean vector (also without a value), or to the vector at [CLS]")
    add("--shots", type=int, default=0, help="labeled examples per class, which each seed draws anew; 0 is all "
        "[%(default)s]. To fine-tune, a fifth of them chooses the checkpoint")
    parser.add_fields(Data, {})
    parser.add_fields(TuneConfig, TuneConfig.defaults(task))
    flags, given = parser.read(argv)
    flags.tasks = task_names(flags.task)
    flags.source = Data(**fields_of(Data, given))
    ignored = given.keys() & {"text_column", "text2_column", "label_column", "regression"}
    if ignored and flags.tasks != ["custom"]:
        raise UserError(f"{min(ignored)}: only for --task custom")
    if flags.source.data and all(TASKS[task].group == "docs" for task in flags.tasks):
        raise UserError(f"--data: {flags.task} reads the documentation on this machine; use --task custom for your "
                        "own files")
    if "custom" in flags.tasks and not flags.source.data:
        raise UserError("--task custom: needs --data, a folder with a file train")
    settings = fields_of(TuneConfig, given)
    baseline, _, folder = flags.init.partition(":")
    if baseline in (BOW, LSA) and folder:
        if flags.frozen:
            raise UserError(f"--frozen {flags.frozen}: {baseline}: has no encoder; leave it out")
        flags.frozen = baseline
    if flags.frozen and (flags.sweep or not settings.keys() <= TuneConfig.PROBED or "squad2" in flags.tasks):
        raise UserError(f"--frozen {flags.frozen}: no --sweep, no squad2, and no settings but "
                        f"{', '.join(sorted(TuneConfig.PROBED))}")
    if 0 < flags.shots < 5 and not flags.frozen:
        raise UserError(f"--shots {flags.shots}: use 5 or more, or a probe (--frozen)")
    return flags, settings


def main(argv=None):
    with clear_errors("finetune.py"):
        flags, given = parse(argv)
        shots = str(flags.shots or "")
        parts = filter(None, [flags.task.replace(",", "+"), short_name(flags.init), flags.frozen, shots])
        folder = flags.out or Path("out", "-".join(parts))
        pretrained = Pretrained(flags.init.removeprefix(f"{flags.frozen}:"))
        precision = "fp32" if flags.frozen else given.get("precision", "auto")
        worker = Worker.make(precision, flags.device, pretrained.config.encoder_dim)
        named = flags.task.split(",")  # of glue, tasks may be missing
        tasks = read_tasks(flags.tasks, flags.source, pretrained.settings, named)
        results = []
        for task, examples in tasks.items():
            out = folder if flags.task == task else folder / task
            with worker.lock(out):
                runs = FineTuning(task, pretrained, examples, given, out, flags, worker)
                results.append(runs.run_all())
        if len(flags.tasks) > 1:
            table1(results, [task for task in flags.tasks if task not in tasks], folder)


if __name__ == "__main__":
    main()
