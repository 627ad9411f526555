"""Fine-tuning: GLUE, SQuAD 2.0, and a task that needs no download.

    python finetune.py --init out/toy --task docs               # classify documentation by its library
    python finetune.py --init out/toy --task docs --frozen      # a linear probe: the encoder is not trained
    python finetune.py --init out/base --task rte --sweep       # Table 5's grid, then the median of five seeds
    python finetune.py --init out/base --task glue --data DIR   # all eight tasks, and their average

--task custom reads the files train and dev (.csv, .tsv, .jsonl or .parquet, or compressed) in --data,
with the columns text[,text2],label, or sentence1,sentence2,label as in GLUE. Labels are used as
written (01 is not 1); decimals mean regression. F1 treats the second of two labels as positive.
The best of at most 20 checkpoints is chosen on dev, so scores are slightly optimistic. Repeat a
command to complete missing runs; torchrun's processes share the runs.

main -> parse; for each task: make_setup, run_task -> finish_runs -> run_once or probe_once.
A Setup (support/tasks/setup.py) has what these runs share; its kind has head, loss and scores.
"""
import argparse
import copy
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from rank import CENTERINGS, VECTORS_PER_DIM, Moments, tau_rank
from support.model.optim import set_rates
from support.program.cli import Parser, add_flags, fields_of, path_of, short_name
from support.program.errors import clear_errors, say
from support.program.files import write_json
from support.program.worker import make_worker
from support.tasks import probe, results
from support.tasks.batches import batches, by_length, collate, in_order
from support.tasks.encoder import Pretrained, Tuned, last_states, write_tuned
from support.tasks.examples import read_task
from support.tasks.settings import DEFAULTS, check_options, check_tune, grid
from support.tasks.setup import Setup, make_setup
from support.tasks.types import GLUE, TASKS
from support.text.corpus import VAL_SHARE
from support.training.settings import seed_of
from train import learning_rate_factor

# ---- 1. Settings ---------------------------------------------------------------------------------
# The comment after a field is also its text in -h.
@dataclass(frozen=True)
class TuneConfig:
    """Settings of a run; each group of tasks has its own defaults."""
    epochs: float = 3.0  # number of passes over the training split
    learning_rate: float = 0.0  # peak learning rate; 0 means 3e-5 * (768 / d)^2
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

    def __post_init__(self):
        check_tune(self)


# ---- 2. One run: section 4.1, Tables 5 and 6 -----------------------------------------------------
def new_model(setup: Setup, seed: int) -> Tuned:
    """The encoder with a new head, which the seed determines."""
    encoder = setup.pretrained.new_encoder(seed)
    torch.manual_seed(seed_of(seed))
    return Tuned(encoder, setup.kind.head()).to(setup.worker.device)


def run_once(setup: Setup, tune: TuneConfig, seed: int) -> dict:
    """Fine-tune, without gradient clipping. Returns the value, metrics, ranks and step of the best
    checkpoint on the dev split. The first seed's checkpoint and predictions are also saved."""
    kind = setup.kind
    model = new_model(setup, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=tune.learning_rate, betas=(0.9, 0.98),
                                  eps=1e-6, weight_decay=tune.weight_decay, fused=True)
    steps = math.ceil(tune.epochs * math.ceil(len(setup.train.ids) / tune.batch_size))
    evaluations = min(20, math.ceil(2 * tune.epochs))  # one per half epoch, if 20 suffice
    evaluate_after = {math.ceil(steps * i / evaluations) for i in range(1, evaluations + 1)}
    best = None
    index_batches = batches(setup.train, seed, tune.batch_size)  # without end
    bar = tqdm(range(steps), desc=f"{setup.task} seed {seed}", leave=False, disable=None)
    for step, indices in zip(bar, index_batches):
        model.train()  # evaluation switched dropout off
        torch.manual_seed(seed_of(seed, step, 1))  # for dropout
        tokens, padding, targets = collate(setup.train, indices, setup.worker.device)
        with setup.worker.autocast():
            logits = model(tokens, padding)
        loss = kind.loss(logits, targets, padding)
        loss.backward()
        set_rates(optimizer, learning_rate_factor(step, round(tune.warmup_share * steps), steps))
        optimizer.step()
        optimizer.zero_grad()

        if step + 1 in evaluate_after:
            metrics, files = evaluate(model, setup)
            if metrics is None:  # diverged: no value, even if an earlier checkpoint had one
                return results.DIVERGED
            value = metrics[setup.metric]
            if best is None or results.or_lowest(value) > results.or_lowest(best.value):
                weights = copy.deepcopy(model.state_dict())
                best = results.Checkpoint(step + 1, value, metrics, files, weights)

    model.load_state_dict(best.weights)
    if seed == results.FIRST_SEED:
        results.write_predictions(setup.out, best.files)
        write_tuned(setup.out / "encoder.pt", model, setup.pretrained, setup.task, kind.labels, tune.seq_len)
    return {"value": best.value, "metrics": best.metrics, "step": best.step,
            "ranks": ranks(model.encoder, setup)}


@torch.no_grad()
def evaluate(model: Tuned, setup: Setup) -> tuple[dict | None, dict[str, str]]:
    """The metrics of a model, None if it has diverged, and its prediction files by name."""
    model.eval()
    outputs = {}
    for split, encoded in setup.dev_splits.items():
        found = []
        for tokens, padding, targets in by_length(encoded, setup.tune.batch_size, setup.worker.device):
            logits = model(tokens, padding)
            # decode takes the targets only because they hold the start of SQuAD's passage.
            found.append(setup.kind.decode(logits, targets, padding).cpu())
        outputs[split] = in_order(found, encoded)
    return results.scores(outputs, setup)


@torch.no_grad()
def ranks(encoder: nn.Module, setup: Setup) -> dict[str, int] | None:
    """The effective ranks of H^L on the dev split (Table 3); None if there are too few tokens."""
    encoder.eval()
    moments = Moments()
    dev = setup.dev_splits["dev"]
    for tokens, padding, _ in by_length(dev, setup.tune.batch_size, setup.worker.device):
        moments.add(last_states(encoder, tokens, padding)[~padding])
    if moments.count < VECTORS_PER_DIM * setup.pretrained.config.encoder_dim:
        return None
    return {name: tau_rank(moments.spectrum(centered), 0.9) for name, centered in CENTERINGS.items()}


# ---- 3. All runs of a task -----------------------------------------------------------------------
def finish_runs(setup: Setup, runs: list[tuple[TuneConfig, int]]) -> list[dict]:
    """Do the `runs` whose files are missing, shared by torchrun's processes. Returns all results."""
    do_run = probe.probe_once if setup.frozen else run_once
    mine = runs[setup.worker.rank::setup.worker.world_size]
    missing = [run for run in mine if not results.path_of_run(setup.out, *run).is_file()]
    if len(missing) < len(mine):
        say(f"{setup.out}: {len(mine) - len(missing)} of {len(mine)} runs are there")
    for number, (tune, seed) in enumerate(missing, start=1):
        began = time.perf_counter()
        result = do_run(setup, tune, seed)
        seconds = time.perf_counter() - began
        result = results.write_run(setup.out, tune, seed, result, seconds)
        left = (len(missing) - number) * seconds
        say(f"{setup.task}  {results.line_of_run(result, setup.metric, left)}")
    return [results.wait_for(results.path_of_run(setup.out, *run)) for run in runs]


def run_task(setup: Setup, options: argparse.Namespace) -> dict:
    """Do all runs of a task: the grid with --sweep, then seeds 1, 2, ... Writes result.json."""
    tune = setup.tune
    dim = setup.pretrained.config.encoder_dim
    sweep = []
    if options.sweep:
        # Flags replace the grid's values. In tune, make_setup has replaced a learning rate of 0.
        given = {name: getattr(tune, name) for name in options.given}
        points = grid(TASKS[setup.task].group, dim, given)
        # Seed 0, because the choice must not depend on the seeds of the result.
        sweep = finish_runs(setup, [(replace(tune, **point), 0) for point in points])
        sweep.sort(key=lambda run: results.or_lowest(run["value"]), reverse=True)
        tune = replace(tune, **sweep[0]["setting"])
    seeds = range(results.FIRST_SEED, results.FIRST_SEED + options.seeds)
    runs = finish_runs(setup, [(tune, seed) for seed in seeds])
    if not setup.worker.is_main:
        return {}
    ranks_before = ranks(setup.pretrained.new_encoder(results.FIRST_SEED).to(setup.worker.device), setup)
    result = {"task": setup.task, "init": options.init, "frozen": setup.frozen, "metric": setup.metric}
    result |= results.summarize(runs, ranks_before, dim) | {"tune": asdict(tune), "sweep": sweep}
    write_json(setup.out / "result.json", result)
    say(results.report(result), f"{setup.out}: result.json")
    return result


# ---- 4. Command line -----------------------------------------------------------------------------
def parse(argv) -> argparse.Namespace:
    """Read the command line. `given` in the result has the flags of TuneConfig that were given."""
    parser = Parser("finetune.py", __doc__)
    add = parser.add_argument
    add("--init", default="out/toy", help="run folder, checkpoint, or random:FOLDER [%(default)s]")
    add("--out", type=path_of, help="folder for all results [out/TASK-INIT, and -mean or -cls with --frozen]")
    add("--device", default="auto", help="auto | cpu | cuda | mps [%(default)s]")
    add("--task", choices=[*TASKS, "glue"], default="docs", help="glue: all eight tasks [%(default)s]")
    add("--data", help="folder with the Hub's own files or, for custom, with train and dev [GLUE and SQuAD: the Hub]")
    add("--seeds", type=int, help="number of runs; the result is their median [5; 1 if nothing is random]")
    add("--sweep", action="store_true", help="first search the grid of Table 5 or 6; flags replace its values")
    add("--frozen", choices=["mean", "cls"], nargs="?", const="mean", default="", help="freeze the encoder, and fit a "
        "linear model to the mean vector (also without a value) or to the vector at [CLS]; seconds")
    known = parser.parse_known_args(argv)[0]  # -h shows the defaults of its task
    add_flags(parser, TuneConfig, {} if known.task == "glue" else DEFAULTS[TASKS[known.task].group])
    options = parser.parse_args(argv)
    options.given = fields_of(TuneConfig, vars(options))
    try:
        TuneConfig(**options.given)  # checks the values
        check_options(options)
        if options.seeds is None:
            options.seeds = 1 if options.frozen and not options.init.startswith("random:") else 5
    except ValueError as error:
        parser.error(str(error))
    parts = filter(None, [options.task, short_name(options.init), options.frozen])
    options.out = options.out or Path("out", "-".join(parts))
    return options


def main(argv=None):
    with clear_errors("finetune.py"):
        options = parse(argv)
        precision = options.given.get("precision", "auto")
        worker = make_worker("fp32" if options.frozen else precision, options.device)
        tasks = GLUE if options.task == "glue" else [options.task]
        pretrained = Pretrained(options.init)
        held_out = pretrained.settings.get("val_share", VAL_SHARE)
        examples = {task: read_task(task, options.data, held_out) for task in tasks}  # finds missing files early
        table = []
        for task in tasks:
            out = options.out / task if options.task == "glue" else options.out
            with worker.lock(out, "config.json"):  # a folder with other files is refused
                # A flag overrides the default of the task, which overrides the default of the field.
                tune = TuneConfig(**(DEFAULTS[TASKS[task].group] | options.given))
                setup = make_setup(task, pretrained, examples[task], tune, out, options, worker)
                table.append(run_task(setup, options))
        if options.task == "glue" and worker.is_main:
            results.table1(table, options.out)


if __name__ == "__main__":
    main()
