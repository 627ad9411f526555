"""How long the first command takes on other kinds of CPU, as far as this one can play them.

    python bench/laptop.py             # about 5 minutes on two cores; writes bench/results/laptop.json
    python bench/laptop.py --tiny      # the same at a size for tests, in seconds

The libraries that multiply matrices are told to leave the newer instructions alone, and the precision is what
`--precision auto` chooses on such a CPU. Each kind trains the toy in a process of its own, by `train_step` and on rows
of random tokens, and they take turns: a round is a few steps of each, so that noise of the machine meets all of them
alike. A caution: cache, clock and memory stay those of this CPU.
"""
import argparse
import multiprocessing
import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402

from cpu import TINY, Sizes, Trainer, ask_in_turns, machine, markdown, ratio, wall_clock  # noqa: E402
from files import Parser, clear_errors, write_json  # noqa: E402
from run import set_up  # noqa: E402
from train import TRAIN_PRESETS  # noqa: E402


class Kind(NamedTuple):
    """A kind of CPU: the flag of /proc/cpuinfo that it needs here, how to play it, and its precision."""
    needs: str
    environment: dict[str, str]
    precision: str


NO_BF16 = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
KINDS = {
    "AMX": Kind("amx_bf16", {}, "bf16"),
    "AVX512-BF16": Kind("avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, "bf16"),
    "AVX-512, no bf16": Kind("avx512_vnni", NO_BF16, "fp32"),
    "AVX2": Kind("avx2", AVX2, "fp32"),
}
BASIS = "AVX-512, no bf16"


def worker(kind: Kind, preset: tuple, changes: tuple, threads: int, pipe) -> None:
    """Train the toy for as many steps as `pipe` asks; answer seconds a step, and seconds of that in the optimizers."""
    torch.set_num_threads(threads)
    name, batch, n = preset
    trainer = Trainer(name, batch, n, set_up(kind.precision, "cpu"), changes)
    trainer.step()

    def optimize() -> None:
        for optimizer in trainer.optimizers:
            optimizer.step()

    while steps := pipe.recv():
        whole = wall_clock(trainer.step, steps)
        with trainer.place.autocast():  # the step has cleared its gradients
            loss = trainer.model(*trainer.batch())
        loss.backward()
        pipe.send((whole, wall_clock(optimize, steps)))


def start(kind: Kind, sizes: Sizes, threads: int):
    """Start a worker that finds the kind's environment when it loads torch; returns its pipe."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    before = dict(os.environ)
    os.environ.update(kind.environment)
    context.Process(target=worker, args=(kind, sizes.profiled[0], sizes.changes, threads, theirs), daemon=True).start()
    os.environ.clear()
    os.environ.update(before)
    return pipe


def measure(sizes: Sizes, rounds: int, steps: int, threads: int) -> list[dict]:
    """A row for each kind that this CPU can play."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text().split() if info.is_file() else []
    pipes = {name: start(kind, sizes, threads) for name, kind in KINDS.items() if kind.needs in flags}
    answers = ask_in_turns(pipes, rounds, steps)
    seconds = {name: [whole for whole, _ in found] for name, found in answers.items()}
    rows = []
    for name, pipe in pipes.items():
        pipe.send(0)
        step = statistics.median(seconds[name])
        rows.append({"kind of CPU": name, "precision": KINDS[name].precision, "step ms": 1e3 * step,
                     "of which optimizers ms": 1e3 * statistics.median(part for _, part in answers[name]),
                     f"time / {BASIS}": ratio(seconds[name], seconds[BASIS]) if BASIS in seconds else None,
                     "minutes of the first command's steps": TRAIN_PRESETS["toy"]["max_steps"] * step / 60})
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="bench/laptop.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of laptop.json")
    parser.add_argument("--tiny", action="store_true", help="a size for tests")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args(argv)
    with clear_errors("bench/laptop.py"):
        if options.tiny:
            rows = measure(TINY, rounds=1, steps=1, threads=1)
        else:
            rows = measure(Sizes(), options.rounds, steps=10, threads=options.threads)
        about = machine(torch.device("cpu")) | {"threads": options.threads}
        write_json(options.out / "laptop.json", about | {"rows": rows})
        print(markdown(rows) if rows else "this system does not say what its CPU has: nothing to measure")


if __name__ == "__main__":
    main()
