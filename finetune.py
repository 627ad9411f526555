"""Fine-tuning: GLUE, SQuAD 2.0, and a task that needs no download.

    python finetune.py --init out/toy --task docs               # name a docstring's library
    python finetune.py --init out/toy --task docs --frozen      # a linear probe
    python finetune.py --init out/base --task rte --sweep       # Table 5's grid, then five seeds
    python finetune.py --init out/base --task glue --data DIR   # all eight tasks, and their average

--task custom reads train, dev and, if there is one, test (.csv, .tsv, .jsonl or .parquet) in --data, with the
columns text, text2 (optional) and label. Labels in tables are used as written (01 is not 1), and decimals mean
regression. F1 treats the second of two labels as positive. Without dev, a tenth of train is dev. The best of at
most 20 checkpoints is chosen on dev, so its scores are slightly optimistic. predictions_test.jsonl is for test,
which may lack labels. Repeat a command to complete missing runs.
"""
import argparse
import copy
import math
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from rank import Moments
from support.checkpoints import Pretrained, Tuned, hidden_states
from support.classification import DIVERGED
from support.kinds import make_kind
from support.model import seed_of
from support.optim import take_step
from support.probe import POOLINGS, probe_layers
from support.program import Parser, UserError, clear_errors, fields_of, lock_folder, short_hash, short_name
from support.results import Results, table1
from support.tasks import GLUE, PROBED, TASKS, TuneConfig, defaults_of, grid, read_task, tune_of
from support.worker import Worker
from train import learning_rate_factor

FIRST_SEED = 1  # of a result; a sweep uses seed 0


# ---- 1. All runs of a task -----------------------------------------------------------------------
class FineTuning:
    """The runs of a task with an encoder: a sweep, if wanted, then several seeds."""
    def __init__(self, task: str, pretrained: Pretrained, tune: TuneConfig, examples: dict[str, list], out: Path,
                 flags: argparse.Namespace, worker: Worker):
        """Encode the examples, and claim the folder `out`, as in Results."""
        self.task, self.pretrained, self.tune, self.flags, self.worker = task, pretrained, tune, flags, worker
        pretrained.config = replace(pretrained.config, dropout=tune.dropout)
        self.kind = make_kind(task, pretrained.tokenizer, pretrained.config, tune, examples["train"])
        self.metric = self.kind.labels.metrics[0]  # selects checkpoints, and is the value of a run
        splits = {split: self.kind.encode(each) for split, each in examples.items()}
        self.results = Results(out, asdict(tune) | {
            "init": flags.init, "task": task, "weights": pretrained.weights_hash(), "metric": self.metric,
            "examples": short_hash(repr(examples)), "task_settings": repr(TASKS[task]), "sweep": flags.sweep,
            "frozen": flags.frozen})
        print(f"{out}:", *[f"  {split}: {encoded.remark}" for split, encoded in splits.items()], sep="\n")
        self.train = splits.pop("train")
        self.splits = splits  # dev, which chooses checkpoints; dev_mm of MNLI; test of custom

    def run_all(self) -> dict:
        """Do all runs: the grid with --sweep, then seeds 1, 2, ... Returns result.json."""
        flags, tune = self.flags, self.tune
        dim = self.pretrained.config.encoder_dim
        sweep = []
        if flags.sweep:
            # Seed 0, because the choice must not depend on the seeds of the result.
            sweep = self.finish([(point, 0) for point in grid(self.task, tune, dim, vars(flags))])
            sweep.sort(key=lambda run: run["value"], reverse=True)
            tune = TuneConfig(**sweep[0]["tune"])
        is_random = not flags.frozen or self.pretrained.is_random
        seeds = flags.seeds or (5 if is_random else 1)
        runs = self.finish([(tune, FIRST_SEED + i) for i in range(seeds)])
        before = self.ranks(self.pretrained.new_encoder(FIRST_SEED).to(self.worker.device), tune)
        return self.results.finish(runs, sweep, before, dim, self.pretrained.step)

    def finish(self, jobs: list[tuple[TuneConfig, int]]) -> list[dict]:
        """Do the jobs (settings, seed) that the results lack. Returns the runs of all jobs."""
        runs = []
        for number, (tune, seed) in enumerate(jobs, start=1):
            run = self.results.find(tune, seed)
            if run is None:
                began = time.perf_counter()
                run, files = self.probe_once(tune, seed) if self.flags.frozen else self.run_once(tune, seed)
                run |= {"tune": asdict(tune), "seed": seed, "seconds": round(time.perf_counter() - began, 2)}
                self.results.add(run, files if seed == FIRST_SEED else {})
            self.results.show(run, number, len(jobs))
            runs.append(run)
        return runs

    # ---- 2. A run: section 4.1, Tables 5 and 6 ---------------------------------------------------
    def run_once(self, tune: TuneConfig, seed: int) -> tuple[dict, dict[str, str]]:
        """Fine-tune, without gradient clipping. Returns the value, metrics, ranks and step of the best checkpoint on
        the dev split, and its prediction files. The first seed's checkpoint is also saved."""
        train, kind, worker = self.train, self.kind, self.worker
        encoder = self.pretrained.new_encoder(seed)
        torch.manual_seed(seed_of(seed))  # for the new head
        model = Tuned(encoder, kind.head()).to(worker.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=tune.learning_rate, betas=(0.9, 0.98),
                                      eps=1e-6, weight_decay=tune.weight_decay, fused=True)
        steps = math.ceil(tune.epochs * math.ceil(len(train.ids) / tune.batch_size))
        evaluations = min(20, math.ceil(2 * tune.epochs))  # two per epoch, but at most 20
        evaluate_after = {math.ceil(steps * i / evaluations) for i in range(1, evaluations + 1)}
        best = None
        bar = tqdm(range(steps), desc=f"{self.task} seed {seed}", leave=False, disable=None)
        for step, indices in zip(bar, train.shuffled(seed, tune.batch_size)):  # without end
            model.train()  # evaluation switched dropout off
            torch.manual_seed(seed_of(seed, step, 1))  # for dropout
            tokens, padding, targets = train.batch(indices, worker.device)
            with worker.autocast():
                logits = model(tokens, padding)
            kind.loss(logits, targets, tokens).backward()
            take_step([optimizer], learning_rate_factor(step, round(tune.warmup_share * steps), steps))
            if step + 1 in evaluate_after:
                value = self.evaluate(model, tune, ["dev"])[0][self.metric]
                if value == DIVERGED:  # whatever earlier checkpoints scored
                    best = None
                if best is None or value > best["value"]:
                    best = {"value": value, "step": step + 1}
                    best_weights = copy.deepcopy(model.state_dict())

        model.load_state_dict(best_weights)
        metrics, files = self.evaluate(model, tune, [*self.splits])
        if seed == FIRST_SEED:
            model.save(self.results.out / "encoder.pt", self.pretrained, task=self.task,
                       labels=list(kind.labels.names), scale=kind.labels.scale, longest=tune.seq_len)
        return best | {"metrics": metrics, "ranks": self.ranks(model.encoder, tune)}, files

    def evaluate(self, model: Tuned, tune: TuneConfig, splits: list[str]) -> tuple[dict, dict[str, str]]:
        """The metrics of a model on these splits, and prediction files by name."""
        model.eval()

        def decoded(tokens, padding):
            return self.kind.decode(model(tokens, padding), tokens)

        outputs = {split: self.splits[split].outputs(decoded, tune.batch_size, self.worker.device) for split in splits}
        return self.kind.scores(outputs, self.splits)

    @torch.no_grad()
    def ranks(self, encoder: nn.Module, tune: TuneConfig) -> dict[str, int] | None:
        """The effective ranks of H^L on the dev split (Table 3); None if there are too few tokens, or the run has
        diverged."""
        encoder.eval()
        moments = Moments()
        for _, tokens, padding, _ in self.splits["dev"].by_length(tune.batch_size, self.worker.device):
            moments.add(hidden_states(encoder, tokens, padding)[-1][~padding])
        return moments.ranks(0.9) if moments.are_enough() and moments.gram.isfinite().all() else None

    def probe_once(self, tune: TuneConfig, seed: int) -> tuple[dict, dict[str, str]]:
        """Fit a linear model to the vectors of the frozen encoder. Returns its value, metrics and strength of
        regularization, and prediction files. There are no new `ranks`, because they do not change."""
        encoder = self.pretrained.new_encoder(seed).to(self.worker.device).eval()
        last = self.pretrained.config.encoder_layers
        [(metrics, files, l2)] = probe_layers(encoder, self.kind, self.train, self.splits, self.flags.frozen, [last],
                                              tune)
        return {"value": metrics[self.metric], "metrics": metrics, "l2": l2, "ranks": None}, files


# ---- 3. Command line -----------------------------------------------------------------------------
def parse(argv) -> argparse.Namespace:
    """Read and check the command line. The result has only those fields of TuneConfig that were given."""
    first = Parser("finetune.py", __doc__, add_help=False)
    first.add_argument("--task", choices=[*TASKS, "glue"], default="docs", help="glue: all eight tasks [%(default)s]")
    task = first.parse_known_args(argv)[0].task  # whose defaults -h shows
    parser = Parser("finetune.py", __doc__, parents=[first])
    add = parser.add_argument
    add("--init", default="out/toy", help="run folder, checkpoint or random:FOLDER [%(default)s]")
    add("--out", type=Path, help="folder for all results [out/TASK-INIT, and -mean or -cls with --frozen]")
    add("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="[%(default)s]")
    add("--data", help="folder with the Hub's own files or, for custom, with train [GLUE and SQuAD: the Hub]")
    add("--seeds", type=int, default=0, help="number of runs; the result is their median [5; 1 if nothing is random]")
    add("--sweep", action="store_true", help="first search the grid of Table 5 or 6; flags replace its values")
    add("--frozen", choices=POOLINGS, nargs="?", const="mean", default="", help="freeze the encoder, and fit a "
        "linear model to the mean vector (also without a value), or to the vector at [CLS]")
    parser.add_fields(TuneConfig, defaults_of(task))
    flags = parser.parse_args(argv)
    given = fields_of(TuneConfig, vars(flags))
    if flags.task == "docs" and flags.data:
        raise UserError("--data: docs reads the documentation on this machine; use --task custom for your own files")
    if flags.task == "custom" and not flags.data:
        raise UserError("--task custom: needs --data, a folder with a file train")
    if flags.frozen and (flags.sweep or not given.keys() <= {*PROBED} or flags.task == "squad2"):
        raise UserError(f"--frozen {flags.frozen}: no --sweep, no squad2, and no settings but {', '.join(PROBED)}")
    return flags


def main(argv=None):
    with clear_errors("finetune.py"):
        flags = parse(argv)
        worker = Worker.make("fp32" if flags.frozen else vars(flags).get("precision", "auto"), flags.device)
        parts = filter(None, [flags.task, short_name(flags.init), flags.frozen])
        folder = flags.out or Path("out", "-".join(parts))
        tasks = GLUE if flags.task == "glue" else [flags.task]
        pretrained = Pretrained(flags.init)
        examples = {task: read_task(task, flags.data, pretrained.settings) for task in tasks}  # finds errors early
        results = []
        for task in tasks:
            out = folder / task if flags.task == "glue" else folder
            with lock_folder(out):
                tune = tune_of(task, fields_of(TuneConfig, vars(flags)), pretrained.config.encoder_dim)
                runs = FineTuning(task, pretrained, tune, examples[task], out, flags, worker)
                results.append(runs.run_all())
        if flags.task == "glue":
            table1(results, folder)


if __name__ == "__main__":
    main()
