"""Where the time of a training step goes on a CPU, and what MAE-LM costs next to MLM. bench/README.md says more.

    python bench/cpu.py            # about 5 minutes on two cores; writes bench/results/cpu.json and cost.png
    python bench/cpu.py --tiny     # the same at a size for tests, in seconds

Variants that are compared take turns: a round is one call of each, so that noise of the machine meets all of them
alike, and a ratio is the median of the ratios within a round. Each section stands alone: one that fails is recorded
as its error, one that would start after --budget seconds as skipped.
"""
import argparse
import itertools
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from files import Parser, atomic, clear_errors, write_json  # noqa: E402
from maelm import MAELM, NUM_SPECIAL, Config, Corruption, corrupt  # noqa: E402
from run import Place, set_up  # noqa: E402
from train import TRAIN_PRESETS, TrainConfig, flops, make_config, make_optimizers, train_step  # noqa: E402


# ---- 1. Measuring and reporting: also for bench/gpu.py -------------------------------------------------------
def wall_clock(run: Callable[[], object], times: int) -> float:
    """Seconds a call, on a CPU."""
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


def take_turns(runs: dict[str, Callable[[], object]], rounds: int, times: int = 1,
               clock: Callable[[Callable[[], object], int], float] = wall_clock) -> dict[str, list[float]]:
    """Variant -> seconds a call in each round, after one round that warms up."""
    for run in runs.values():
        run()
    seconds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(clock(run, times))
    return seconds


def ask(pipe, steps: int) -> object:
    """What a worker in another process answers when it has taken so many steps."""
    pipe.send(steps)
    return pipe.recv()


def ask_in_turns(pipes: dict, rounds: int, steps: int) -> dict[str, list]:
    """Variant -> what its worker answers in each round; workers have clocks of their own. As take_turns."""
    runs = {name: partial(ask, pipe, steps) for name, pipe in pipes.items()}
    return take_turns(runs, rounds, clock=lambda run, times: run())


def ratio(a: list[float], b: list[float]) -> float:
    """Median of the ratios within a round."""
    return statistics.median(x / y for x, y in zip(a, b))


def commit() -> str:
    """The short hash of the commit that is measured, or "" where there is no git."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=HERE, capture_output=True, text=True).stdout.strip()


def cpu_name() -> str:
    """As Linux says it, or "unknown CPU"."""
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"


def machine(device: torch.device) -> dict[str, object]:
    """What a result was measured on and with."""
    return {"device": torch.cuda.get_device_name() if device.type == "cuda" else cpu_name(),
            "threads": torch.get_num_threads(), "commit": commit(),
            "versions": {name: version(name) for name in ("torch", "transformers", "numpy") if find_spec(name)}}


def markdown(rows: list[dict[str, object]]) -> str:
    """A table with the keys of the first row as its head."""
    def cell(value: object) -> str:
        return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1e4 else f"{value:,.0f}" if isinstance(
            value, (int, float)) else "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
    keys = list(rows[0])
    return table(keys, [[cell(row.get(key)) for key in keys] for row in rows])


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown; a row may lack its last cells."""
    lines = [head, ["---"] * len(head)]
    for row in rows:
        lines.append(row + [""] * (len(head) - len(row)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_report(sections: list[Callable[..., list[dict]]], arguments: tuple, path: Path, about: dict[str, object],
                 budget: float) -> dict[str, dict]:
    """Run the sections in turn, each a function of `arguments` that returns the rows of its table. After each, `path`
    is written and the table printed. What fails is recorded and the rest goes on. Returns all that was found."""
    start = time.perf_counter()
    found = {}
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    for section in sections:
        began = time.perf_counter() - start
        found[section.__name__] = result = run_section(section, arguments) if began < budget else {
            "skipped": f"{began:.0f} s had passed, the budget is {budget:.0f} s"}
        write_json(path, about | {"sections": found})
        table = markdown(result["rows"]) if "rows" in result else next(": ".join(pair) for pair in result.items())
        print(f"\n**{section.__name__}**: {' '.join(section.__doc__.split())}\n\n{table}", flush=True)
    print(f"\n{path}")
    return found


def run_section(section: Callable[..., list[dict]], arguments: tuple) -> dict[str, object]:
    """Its rows or its error, and the seconds it took."""
    start = time.perf_counter()
    try:
        result = {"rows": section(*arguments)}
    except Exception as error:  # whatever it is: the sections to come do not depend on this one
        result = {"error": f"{type(error).__name__}: {error}"}
    return result | {"seconds": round(time.perf_counter() - start, 1)}


# ---- 2. What is measured -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Sizes:
    """How large everything is, and how often it is measured."""
    rounds: int = 3
    gemm: int = 2048
    profiled: tuple = (("toy", 64, 64), ("base", 2, 128))  # preset, batch, n
    tokens: int = 1024  # in a batch of the cost curves
    cost: str = "small"
    lengths: tuple = (64, 128, 256, 512, 1024)
    at_length: int = 256  # of the other two curves
    mask_rates: tuple = (0.15, 0.3, 0.45, 0.6, 0.75)
    depths: tuple = (1, 2, 3, 4, 6)
    base: tuple = ("base", 1, 512)
    compiled: tuple = ("toy", 64, 64)
    backend: str = "inductor"
    changes: tuple = ()  # fields of Config that are other than the preset's


TINY = Sizes(rounds=1, gemm=64, profiled=(("toy", 2, 16), ("toy", 2, 24)), tokens=32, cost="toy", lengths=(16, 32),
             at_length=16, mask_rates=(0.15, 0.5), depths=(1, 2), base=("toy", 2, 16), compiled=("toy", 2, 16),
             backend="aot_eager", changes=(("encoder_layers", 1), ("encoder_dim", 32), ("vocab_size", 300)))


class Trainer:
    """A model with its optimizers and batches of random tokens."""

    def __init__(self, preset: str, batch: int, n: int, place: Place, changes: tuple, ablation: str = "mae-lm",
                 **fields):
        torch.manual_seed(0)
        self.config = make_config(preset, ablation, **dict(changes) | {"seq_len": n} | fields)
        self.size, self.place = batch, place
        self.train = TrainConfig(**TRAIN_PRESETS[preset] | dict(batch_size=batch, micro_batch_size=batch))
        self.model = MAELM(self.config)
        self.optimizers = make_optimizers(self.model, self.train, place.dtype)
        self.generator = torch.Generator().manual_seed(0)
        self.flops = batch * flops(self.config, n)

    def batch(self) -> tuple[Tensor, Corruption]:
        """The next rows and their masks."""
        shape = self.size, self.config.seq_len
        tokens = torch.randint(NUM_SPECIAL, self.config.vocab_size, shape, generator=self.generator)
        return tokens, corrupt(tokens, self.config, self.generator)

    def step(self) -> None:
        """One training step as train.py makes it, its batch included."""
        with torch.profiler.record_function("data"):
            batch = self.batch()
        train_step(self.model, self.optimizers, batch, 0, self.train, self.place)

    def gradient(self) -> None:
        """Forward and backward alone."""
        with self.place.autocast():
            loss = self.model(*self.batch())
        loss.backward()
        self.model.zero_grad()


def gemm(size: int, place: Place) -> tuple[Callable[[], object], int]:
    """A large product of matrices in the dtype of training, and its FLOPs."""
    a, b = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0)).to(place.dtype)
    return partial(torch.mm, a, b), 2 * size ** 3


REST = "LayerNorm, GELU and the rest"
PARTS = ("GEMM of the layers", "attention", "head and loss", "optimizer", "data and masks", REST)
OPTIMIZER = ("Optimizer.", "clip", "foreach", "linalg_vector_norm")  # clipping is part of it


def part(event: torch.autograd.profiler_util.FunctionEvent, config: Config) -> str:
    """To which of PARTS the time of an operation belongs, by its callers, its name and its shapes."""
    callers, above = [], event
    while above is not None:
        callers.append(above.name)
        above = above.cpu_parent
    shapes = [shape for shape in event.input_shapes or [] if shape]
    sizes = {size for shape in shapes for size in shape}
    for name, belongs in (
        ("data and masks", "data" in callers),
        ("optimizer", any(word in caller for caller in callers for word in OPTIMIZER)),
        (REST, "embedding" in event.name),
        ("head and loss", config.vocab_size in sizes),
        ("attention", "bmm" in event.name or "softmax" in event.name or 2 * config.seq_len - 1 in sizes
         or any(len(shape) == 4 for shape in shapes)),
        ("GEMM of the layers", event.name in ("aten::mm", "aten::addmm")),
    ):
        if belongs:
            return name
    return REST


def where_time_goes(sizes: Sizes, place: Place) -> list[dict]:
    """Share of a training step of MAE-LM by part, of the time inside operations (torch.profiler); `outside` is what
    Python and the profiler add to that."""
    rows = []
    for preset, batch, n in sizes.profiled:
        trainer = Trainer(preset, batch, n, place, sizes.changes)
        trainer.step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiled:
            seconds = wall_clock(trainer.step, sizes.rounds)
        spent = Counter()
        for event in profiled.events():
            spent[part(event, trainer.config)] += event.self_cpu_time_total / 1e6 / sizes.rounds
        total = sum(spent.values())
        rows.append({"size": f"{preset}, {batch} x {n}", "step ms": 1e3 * seconds}
                    | {f"{name} %": 100 * spent[name] / total for name in PARTS}
                    | {"outside ms": 1e3 * (seconds - total)})
    return rows


def distance_to_the_limit(sizes: Sizes, place: Place) -> list[dict]:
    """A training step next to the time that its counted FLOPs would take at the rate of one large product of
    matrices, measured in the same rounds."""
    product, count = gemm(sizes.gemm, place)
    trainers = {f"{preset}, {batch} x {n}": Trainer(preset, batch, n, place, sizes.changes)
                for preset, batch, n in sizes.profiled}
    seconds = take_turns({"gemm": product} | {name: trainer.step for name, trainer in trainers.items()}, sizes.rounds)
    rate = count / statistics.median(seconds["gemm"])
    return [{"size": name, "step ms": 1e3 * statistics.median(seconds[name]), "GFLOP": trainer.flops / 1e9,
             "GEMM rate GFLOP/s": rate / 1e9, "limit ms": 1e3 * trainer.flops / rate,
             "step / limit": ratio(seconds[name], [trainer.flops * s / count for s in seconds["gemm"]])}
            for name, trainer in trainers.items()]


def base_size(sizes: Sizes, place: Place) -> list[dict]:
    """MAE-LM over MLM at base size: the whole step with its optimizer, and forward with backward, next to the ratio
    of counted FLOPs."""
    both = {name: Trainer(*sizes.base, place, sizes.changes, name) for name in ("mae-lm", "mlm")}
    runs = {f"{name}, {what}": getattr(both[name], what) for name in both for what in ("step", "gradient")}
    seconds = take_turns(runs, sizes.rounds)
    return [{"what": what, "MAE-LM s": statistics.median(seconds[f"mae-lm, {what}"]),
             "MLM s": statistics.median(seconds[f"mlm, {what}"]),
             "ratio": ratio(seconds[f"mae-lm, {what}"], seconds[f"mlm, {what}"]),
             "ratio of FLOPs": both["mae-lm"].flops / both["mlm"].flops} for what in ("step", "gradient")]


def cost_curve(what: str, values: tuple, field: str, sizes: Sizes, place: Place) -> list[dict]:
    """MAE-LM and MLM for each value of a field, in turns; MLM where it has no such field only once."""
    keys, trainers = {}, {}
    for value, ablation in itertools.product(values, ("mae-lm", "mlm")):
        n = value if field == "seq_len" else sizes.at_length
        fields = {} if field == "seq_len" or (ablation, field) == ("mlm", "decoder_layers") else {field: value}
        keys[value, ablation] = key = ablation, n, *fields.items()
        batch = max(1, sizes.tokens // n)
        trainers.setdefault(key, Trainer(sizes.cost, batch, n, place, sizes.changes, ablation, **fields))
    seconds = take_turns({key: trainer.gradient for key, trainer in trainers.items()}, sizes.rounds)
    rows = []
    for value in values:
        mae, mlm, first = keys[value, "mae-lm"], keys[value, "mlm"], keys[values[0], "mae-lm"]
        rows.append({"against": what, "value": value, "MAE-LM ms": 1e3 * statistics.median(seconds[mae]),
                     "MAE-LM / MLM": ratio(seconds[mae], seconds[mlm]),
                     "by FLOPs": trainers[mae].flops / trainers[mlm].flops,
                     "MAE-LM / its first": ratio(seconds[mae], seconds[first]),
                     "first by FLOPs": trainers[mae].flops / trainers[first].flops})
    return rows


def cost(sizes: Sizes, place: Place) -> list[dict]:
    """Forward and backward at the same number of tokens, against sequence length, mask rate and decoder depth: over
    MLM at the same setting, and over the first row of the curve; each next to the ratio of counted FLOPs."""
    return [row for what, values, field in (
        ("sequence length", sizes.lengths, "seq_len"), ("mask rate", sizes.mask_rates, "mask_rate"),
        ("decoder layers", sizes.depths, "decoder_layers")) for row in cost_curve(what, values, field, sizes, place)]


def draw_cost(rows: list[dict], path: Path) -> None:
    """cost.png: measured ratios as points, the arithmetic as lines."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    curves = {what: list(group) for what, group in itertools.groupby(rows, lambda row: row["against"])}
    drawn, axes = plt.subplots(1, len(curves), figsize=(11, 3.5), layout="constrained")
    for axis, (what, group) in zip(axes, curves.items()):
        x = [row["value"] for row in group]
        for color, (measured, counted, label) in enumerate((
                ("MAE-LM / MLM", "by FLOPs", "over MLM"),
                ("MAE-LM / its first", "first by FLOPs", "over its first point"))):
            axis.plot(x, [row[counted] for row in group], "-", color=f"C{color}", label=f"{label}, by FLOPs")
            axis.plot(x, [row[measured] for row in group], "o", color=f"C{color}", label=f"{label}, measured")
        axis.set(xlabel=what, ylabel="time of forward and backward, as a ratio" if axis is axes[0] else None)
        axis.set_ylim(bottom=0)
    axes[0].set_xscale("log", base=2)
    axes[0].xaxis.set_major_formatter("{x:.0f}")
    axes[-1].legend(fontsize="small")
    with atomic(path) as temporary:
        drawn.savefig(temporary, format="png", dpi=120)
    plt.close(drawn)


def compiling(sizes: Sizes, place: Place) -> list[dict]:
    """A training step with and without torch.compile. The first step of each includes the compilation."""
    pair = {name: Trainer(*sizes.compiled, place, sizes.changes) for name in ("eager", "compiled")}
    pair["compiled"].model.compile(dynamic=False, backend=sizes.backend)
    first = {name: wall_clock(trainer.step, 1) for name, trainer in pair.items()}
    seconds = take_turns({name: trainer.step for name, trainer in pair.items()}, 3 * sizes.rounds)
    return [{"model": name, "first step s": first[name], "step ms": 1e3 * statistics.median(seconds[name]),
             "speed over eager": ratio(seconds["eager"], seconds[name])} for name in pair]


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="bench/cpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of cpu.json and cost.png")
    parser.add_argument("--tiny", action="store_true", help="a size for tests")
    parser.add_argument("--budget", type=float, default=330, help="seconds after which no section is started [330]")
    options = parser.parse_args(argv)
    sizes = TINY if options.tiny else Sizes()
    place = set_up("auto", "cpu")
    with clear_errors("bench/cpu.py"):
        about = machine(place.device) | {"dtype": str(place.dtype)[6:]}
        found = write_report([where_time_goes, distance_to_the_limit, base_size, cost, compiling], (sizes, place),
                             options.out / "cpu.json", about, options.budget)
        if "rows" in found["cost"]:
            draw_cost(found["cost"]["rows"], options.out / "cost.png")


if __name__ == "__main__":
    main()
