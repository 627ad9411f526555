"""Training speed on this machine: tokens per second and TFLOP/s of train.py's own step, on random tokens.

    python -m bench.speed                                       # toy on the CPU
    python -m bench.speed --device cuda --preset base --compile  # base on a GPU
    python -m bench.speed --models mae-lm "mae-lm --mask-rate 0.5"

The models take turns, so that noise affects all of them alike. All n tokens of a sequence are counted.
"""
import platform
import shlex
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from maelm import NUM_SPECIAL, corrupt
from support.model import flops
from support.program import Parser, clear_errors, write_json
from support.run import commit
from support.worker import Worker
from train import PRESETS, Trainer, parse


def main(argv=None):
    with clear_errors("bench.speed"):
        parser = Parser("bench.speed", __doc__)
        add = parser.add_argument
        add("--device", default="cpu", help="cpu | cuda | mps [%(default)s]")
        add("--preset", default="toy", choices=PRESETS, help="[%(default)s]")
        add("--models", nargs="+", default=["mae-lm", "mlm"], help="rows and flags of train.py [mae-lm mlm]")
        add("--rows", type=int, help="sequences per step, in micro-batches of the preset [its batch size]")
        add("--compile", action="store_true", help="compile the models")
        add("--turns", type=int, default=7, help="[%(default)s]")
        add("--out", type=Path, default=Path("out/speed.json"), help="[%(default)s]")
        flags = parser.parse_args(argv)
        worker = Worker.make("auto", flags.device, dim=0)
        timers, speeds, size, cost = {}, {name: [] for name in flags.models}, {}, {}
        for name in flags.models:
            config, recipe, *_ = parse(["--preset", flags.preset, "--ablation", *shlex.split(name)])
            rows = flags.rows or recipe.batch_size
            trainer = Trainer(config, replace(recipe, compile="on" if flags.compile else "off"), worker)
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randint(NUM_SPECIAL, config.vocab_size, (rows, config.seq_len), generator=generator)
            batch = worker.put((tokens, corrupt(tokens, config, generator)))
            batches = worker.micro_batches(*batch, recipe.micro_batch_size)
            step = partial(trainer.step, batches, 0)
            timers[name] = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
            size[name], cost[name] = rows * config.seq_len, flops(config) / config.seq_len  # tokens; FLOPs per token
            timers[name].timeit(3)  # compile, warm up
        for _ in range(flags.turns):
            for name, timer in timers.items():
                speeds[name].append(size[name] / timer.timeit(1).median)
        machine = torch.cuda.get_device_name() if worker.device.type == "cuda" else platform.processor()
        write_json(flags.out, {"machine": machine, "dtype": str(worker.dtype), "torch": torch.__version__,
                                 "commit": commit(), "preset": flags.preset, "tokens_per_second": speeds})
        for name, values in speeds.items():
            speed = statistics.median(values)
            print(f"{flags.preset} {name:24}{speed:12,.0f} tokens/s  {speed * cost[name] / 1e12:8.2f} TFLOP/s  "
                f"({min(values):,.0f} to {max(values):,.0f})")


if __name__ == "__main__":
    main()
