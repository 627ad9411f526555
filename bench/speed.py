"""Training speed on this machine.

    python bench/speed.py                  # CPU: MAE-LM, our MLM and transformers' RoBERTa, like for like
    python bench/speed.py --device cuda    # one GPU, in less than eight minutes: eager and compiled, MFU, memory
    python bench/speed.py --tiny           # the GPU part at a size that measures nothing, on a CPU too

Rewrites bench/results/speed.json, or speed-cuda.json, after each result. Tokens are random; all n of a row count.

CPU: a step is forward, backward, clipping and a fused AdamW update. The models take turns: a round is a few steps of
each, so noise of the machine meets all of them alike. Same layers, width, heads, vocabulary, sequence length, batch,
dropout and autocast. RoBERTa (`pip install -r requirements-test.txt`) has no relative positions and applies its head to
all positions.

GPU: a step is train.py's own with the preset's batch, optimizer and accumulation, in bf16 autocast, on batches that are
on the GPU already. `forward_s` and `both_s`, forward and backward, are of one micro-batch. `first_s` is the first of
these, with torch.compile's work unless its cache on disk has it. MFU is the FLOPs of support/cost.py over --peak. Peak
memory includes weights and optimizer.
"""
import argparse
import gc
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402

from maelm import MAELM, MASK, NUM_SPECIAL, Config, corrupt  # noqa: E402
from support.cost import flops  # noqa: E402
from support.files import Parser, clear_errors, write_json  # noqa: E402
from support.muon import make_optimizers  # noqa: E402
from support.run import Place, choose_place  # noqa: E402
from train import TRAIN_PRESETS, Batch, TrainConfig, make_config, to_device, train_step  # noqa: E402


def commit() -> str:
    """The short hash of the commit, with -dirty if files have changed since; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_name() -> str:
    """The name of the CPU as Linux has it, elsewhere its kind."""
    info = Path("/proc/cpuinfo")
    names = re.findall("model name.*: (.*)", info.read_text()) if info.is_file() else []
    return names[0] if names else platform.processor()


def random_batch(config: Config, rows: int, generator: torch.Generator) -> Batch:
    """Random tokens (rows, n) int64, and what is masked in them."""
    tokens = torch.randint(NUM_SPECIAL, config.vocab_size, (rows, config.seq_len), generator=generator)
    return tokens, corrupt(tokens, config, generator)


# ---- 1. CPU: next to RoBERTa --------------------------------------------------------------------------------
# size -> (batch, steps a round, dropouts)
SIZES = {"toy": (64, 4, (0.0, 0.1)), "small": (16, 2, (0.0, 0.1)), "base": (2, 1, (0.1, 0.0))}
MODELS = {"mae-lm": "mae-lm", "mlm": "mlm", "roberta": "mlm"}  # -> the ablation with the same masks


def roberta(config: Config) -> torch.nn.Module:
    """transformers' RobertaForMaskedLM of the size of our encoder."""
    from transformers import RobertaConfig, RobertaForMaskedLM
    return RobertaForMaskedLM(RobertaConfig(
        vocab_size=config.vocab_size, hidden_size=config.encoder_dim, num_hidden_layers=config.encoder_layers,
        num_attention_heads=config.encoder_heads, intermediate_size=4 * config.encoder_dim,
        max_position_embeddings=config.seq_len + 2, hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout, type_vocab_size=1, pad_token_id=1))


def stepper(name: str, config: Config, rows: int, place: Place) -> Callable[[], None]:
    """A function that makes a training step of a model: forward, backward, clipping and a fused AdamW update."""
    model = (roberta(config) if name == "roberta" else MAELM(config)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        tokens, masks = random_batch(config, rows, generator)
        with place.autocast():
            if name == "roberta":
                labels = tokens.masked_fill(~masks.masked, -100)
                loss = model(input_ids=tokens.masked_fill(masks.masked, MASK), labels=labels).loss
            else:
                loss = model(tokens, masks)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(size: str, dropout: float, rounds: int, place: Place) -> dict[str, dict]:
    """Model -> tokens per second in each round, and how many times as fast as RoBERTa it is within a round: the least,
    the median and the most."""
    batch, steps, _ = SIZES[size]
    runs, speeds = {}, {}
    for name, ablation in MODELS.items():
        config = make_config(size, ablation, dropout=dropout)
        runs[name], speeds[name] = stepper(name, config, batch, place), []
        runs[name]()  # warm up
    for _ in range(rounds):
        for name, step in runs.items():
            start = time.perf_counter()
            for _ in range(steps):
                step()
            speeds[name].append(steps * batch * config.seq_len / (time.perf_counter() - start))
    found = {}
    for name in MODELS:
        ratios = sorted(ours / theirs for ours, theirs in zip(speeds[name], speeds["roberta"]))
        found[name] = {"tokens_per_second": speeds[name],
                       "ratio": [ratios[0], statistics.median(ratios), ratios[-1]]}
    return found


def cpu_part(result: dict, options: argparse.Namespace, place: Place) -> None:
    """Compare the models at each of --sizes. Rewrites --out after each."""
    result["versions"]["transformers"] = version("transformers")
    print("size   dropout model     tokens/s   times RoBERTa: least, median, most")
    for size in options.sizes:
        for dropout in SIZES[size][2]:
            found = compare(size, dropout, options.rounds, place)
            result["runs"].append({"size": size, "dropout": dropout, "batch": SIZES[size][0], "models": found})
            write_json(options.out, result)
            for name, one in found.items():
                speed = statistics.median(one["tokens_per_second"])
                ratios = "  ".join(f"{ratio:.2f}" for ratio in one["ratio"])
                print(f"{size:6} {dropout:7} {name:8} {speed:9,.0f}   {ratios}", flush=True)


# ---- 2. GPU: eager and compiled -----------------------------------------------------------------------------
PEAKS = {"H200": 989.0, "H100": 989.0, "A100": 312.0}  # dense bf16 TFLOP/s
# Preset, ablation, rows of a micro-batch, the most important first. More rows need more memory and fewer launches.
ITEMS = (("base", "mae-lm", 32), ("small", "mae-lm", 256), ("base", "mlm", 32), ("base", "mae-lm", 128),
         ("small", "mae-lm", 32), ("small", "mlm", 256))
BUDGET = 330.0  # seconds after which no measurement starts; the longest takes about two minutes
WINDOW = 0.3  # seconds between two looks at the clock, at least


def seconds_of(call: Callable[[], object], place: Place) -> float:
    """Seconds of a call: the median of three windows."""
    def window(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        if place.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / calls

    calls = 1 + int(WINDOW / min(window(1), window(1)))  # the first call may be slow
    return statistics.median(window(calls) for _ in range(3))


def measure(config: Config, train: TrainConfig, compiler: str | None, place: Place) -> dict[str, float | None]:
    """Times in seconds; of a step also tokens/s, TFLOP/s, and peak memory in GB (None on a CPU). The compiler is one of
    torch.compile's backends, or None."""
    torch.manual_seed(0)
    with place.device:
        model = MAELM(config)
    if compiler:
        torch.compiler.reset()  # each model is compiled as if it were the only one
        model.compile(dynamic=False, backend=compiler)
    optimizers = make_optimizers(model, train, place.dtype)
    batch = random_batch(config, train.micro_batch_size, torch.Generator().manual_seed(0))
    batch = to_device(batch, place.device)
    batches = [batch] * (train.batch_size // train.micro_batch_size)

    def forward() -> torch.Tensor:
        with place.autocast():
            return model(*batch)

    def both() -> None:
        forward().backward()

    def step() -> None:
        train_step(model, optimizers, batches, 0, train, place)

    start = time.perf_counter()
    both()
    if place.device.type == "cuda":
        torch.cuda.synchronize()
    found = {"first_s": time.perf_counter() - start}
    for call in (forward, both, step):
        found[f"{call.__name__}_s"] = seconds_of(call, place)
    rate = train.batch_size / found["step_s"]  # rows a second
    found["tokens_per_second"] = rate * config.seq_len
    found["tflops"] = rate * flops(config) / 1e12
    found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9 if place.device.type == "cuda" else None
    return found


def gpu_part(result: dict, options: argparse.Namespace, place: Place) -> None:
    """Measure all ITEMS, or the toy, eager and compiled. Rewrites --out after each. An item that fails is recorded
    with its error, and the rest goes on."""
    start = time.monotonic()
    items = (("toy", "mae-lm", 16),) if options.tiny else ITEMS
    for size, name, rows in items:
        config = make_config(size, name)
        train = TrainConfig(**TRAIN_PRESETS[size] | {"micro_batch_size": rows})
        for compiler in (None, "eager" if options.tiny else "inductor"):
            row = {"size": size, "model": name, "rows": rows, "compiler": compiler}
            result["runs"].append(row)
            try:
                if time.monotonic() - start > BUDGET:
                    raise TimeoutError(f"skipped, {BUDGET:.0f} s have passed")
                row |= measure(config, train, compiler, place)
                row["mfu"] = row["tflops"] / options.peak if options.peak else None
            except Exception as error:  # too little memory, or no compiler
                row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            write_json(options.out, result)
            print("  ".join(f"{field} {value:.4g}" if isinstance(value, float) else f"{field} {value}"
                            for field, value in row.items()), flush=True)
            gc.collect()  # a compiled model refers to itself
            if place.device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


# ---- 3. Command line ----------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> None:
    parser = Parser("bench/speed.py", __doc__)
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "cuda"), help="[cpu]")
    add("--tiny", action="store_true", help="the GPU part at a size for tests")
    add("--peak", type=float, help="dense bf16 TFLOP/s of the GPU, for MFU [known for H200, H100, A100]")
    add("--sizes", nargs="+", default=list(SIZES), choices=SIZES, help="on a CPU [all]")
    add("--rounds", type=int, default=7, help="on a CPU [7]")
    add("--out", type=Path, help="JSON file [in bench/results; with --tiny in out]")
    options = parser.parse_args(argv)
    cuda = options.device == "cuda"
    folder = Path("out") if options.tiny else HERE / "results"
    options.out = options.out or folder / ("speed-cuda.json" if cuda else "speed.json")
    with clear_errors("bench/speed.py"):
        place = choose_place("bf16" if cuda or options.tiny else "auto", options.device)
        machine = torch.cuda.get_device_name() if cuda else f"{cpu_name()}, {torch.get_num_threads()} threads"
        options.peak = options.peak or next((peak for name, peak in PEAKS.items() if name in machine), None)
        result = {"machine": machine, "autocast": str(place.dtype).removeprefix("torch."), "commit": commit(),
                  "versions": {"python": platform.python_version(), "torch": torch.__version__}, "runs": []}
        print(f"{machine}, {result['autocast']}, torch {torch.__version__}, commit {result['commit']}", flush=True)
        if cuda or options.tiny:
            gpu_part(result, options, place)
        else:
            cpu_part(result, options, place)
        print(options.out)


if __name__ == "__main__":
    main()
