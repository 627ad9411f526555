"""Training speed on this machine.

    python -m bench.speed                  # CPU: MAE-LM, our MLM and transformers' RoBERTa, like for like
    python -m bench.speed --device cuda    # one GPU: errors, then steps
    python -m bench.speed --device cuda --only small   # the items with these words, into the same file
    python -m bench.speed --tiny           # the GPU part at a size that measures nothing, on a CPU too

Rewrites bench/results/speed.json, or speed-cuda.json, after each result. Tokens are random; all n of a row count.
CPU: a step is forward, backward, clipping and a fused AdamW update; the models take turns, so noise meets all alike.
RoBERTa has no relative positions, and its head reads all positions. GPU: loss and gradients of each row of Table 2, in
bf16 next to float64 on the CPU, also of padded texts; then train.py's own step. Times are of one micro-batch.
"""
import argparse
import gc
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch

from maelm import ABLATIONS, MASK, NUM_SPECIAL, Config, Corruption, corrupt
from support import models
from support.cost import flops, peak_of
from support.device import Worker, make_worker
from support.files import clear_errors, read_json, write_json
from support.flags import Parser
from support.muon import make_optimizers
from train import Batch, make_config, make_recipe, to_device, train_step

HERE = Path(__file__).resolve().parent


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


class Roberta(torch.nn.Module):
    """transformers' RobertaForMaskedLM of the size of our encoder, with the interface of MAELM."""
    def __init__(self, config: Config):
        super().__init__()
        from transformers import RobertaConfig, RobertaForMaskedLM
        self.model = RobertaForMaskedLM(RobertaConfig(
            vocab_size=config.vocab_size, hidden_size=config.encoder_dim, num_hidden_layers=config.encoder_layers,
            num_attention_heads=config.encoder_heads, intermediate_size=4 * config.encoder_dim,
            max_position_embeddings=config.seq_len + 2, hidden_dropout_prob=config.dropout,
            attention_probs_dropout_prob=config.dropout, type_vocab_size=1, pad_token_id=1))

    def forward(self, tokens: torch.Tensor, masks: Corruption) -> torch.Tensor:
        """tokens (B, n) int64 and their masks -> the loss."""
        labels = tokens.masked_fill(~masks.masked, -100)
        return self.model(input_ids=tokens.masked_fill(masks.masked, MASK), labels=labels).loss


MODELS = {"mae-lm": "mae-lm", "mlm": "mlm", "roberta": "mlm"}  # -> the ablation with the same masks


def make_model(size: str, name: str, **fields) -> tuple[torch.nn.Module, Config]:
    """One of MODELS, or of ABLATIONS, in training mode, and its configuration."""
    config = make_config(size, MODELS.get(name, name), **fields)
    return (Roberta(config) if name == "roberta" else models.make_model(config)).train(), config


# ---- 1. CPU: next to RoBERTa --------------------------------------------------------------------------------
SIZES = {"toy": (64, 4, (0.0, 0.1)), "small": (16, 2, (0.0, 0.1)), "base": (2, 1, (0.1, 0.0))}  # batch, steps, dropouts


def stepper(model: torch.nn.Module, config: Config, rows: int, worker: Worker) -> Callable[[], None]:
    """A function that makes a training step of a model: forward, backward, clipping and a fused AdamW update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        with worker.autocast():
            loss = model(*random_batch(config, rows, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(size: str, dropout: float, worker: Worker, rounds: int = 7) -> dict[str, dict]:
    """Model -> tokens per second in each round, and how many times as fast as RoBERTa it is within a round: the least,
    the median and the most."""
    batch, steps, _ = SIZES[size]
    runs, speeds = {}, {}
    for name in MODELS:
        model, config = make_model(size, name, dropout=dropout)
        runs[name], speeds[name] = stepper(model, config, batch, worker), []
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
        ratio = [ratios[0], statistics.median(ratios), ratios[-1]]
        found[name] = {"tokens_per_second": speeds[name], "ratio": ratio}
    return found


def cpu_part(result: dict, options: argparse.Namespace, worker: Worker) -> None:
    """Compare the models at each of --sizes. Rewrites --out after each."""
    print("size   dropout model     tokens/s   times RoBERTa: least, median, most")
    for size in options.sizes:
        for dropout in SIZES[size][2]:
            found = compare(size, dropout, worker)
            result["runs"].append({"size": size, "dropout": dropout, "batch": SIZES[size][0], "models": found})
            write_json(options.out, result)
            for name, one in found.items():
                speed = statistics.median(one["tokens_per_second"])
                ratios = "  ".join(f"{ratio:.2f}" for ratio in one["ratio"])
                print(f"{size:6} {dropout:7} {name:8} {speed:9,.0f}   {ratios}", flush=True)


# ---- 2. GPU: is it right? -----------------------------------------------------------------------------------
TOLERANCE = 0.05  # of bf16 against float64, as a share
EXACT = Worker(0, 1, torch.device("cpu"), torch.float32)  # without autocast


def gradients(config: Config, batch: Batch, worker: Worker, padded: bool, compiler: str | None = None) -> torch.Tensor:
    """The loss and all gradients of a model without dropout on a batch, side by side in float64 on the CPU. With
    `padded`, of its encoder alone, on rows of which the last tokens are padding, as in fine-tuning."""
    torch.manual_seed(0)
    model = models.make_model(config).to(worker.device, torch.float64 if worker is EXACT else torch.float32)
    if compiler:
        model.compile(dynamic=False, backend=compiler)
    tokens, corruption = to_device(batch, worker.device)
    with worker.autocast():
        if padded:
            positions = torch.arange(tokens.shape[1], device=worker.device)[None]
            length = torch.linspace(1, tokens.shape[1], len(tokens), device=worker.device)
            h = model.encoder(tokens, positions, positions >= length[:, None])
            weights = torch.linspace(-1, 1, h.shape[2], device=h.device)
            loss = (1 + (h[:, 0].float() * weights).mean(1)).square().mean()
        else:
            loss = model(tokens, corruption)
    loss.backward()
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([loss.detach().flatten(), *found]).double().cpu()


def errors(size: str, name: str, rows: int, compiler: str | None, worker: Worker, **fields) -> dict[str, float]:
    """How far the loss and the gradients of two layers of an ablation are from those of float64 on the CPU, as shares.
    ValueError if that is too far."""
    config = make_config(size, name, encoder_layers=2, dropout=0.0, **fields)
    batch = random_batch(config, rows, torch.Generator().manual_seed(1))
    found = {}
    for path in ("plain", "padded"):
        exact = gradients(config, batch, EXACT, path == "padded")
        here = gradients(config, batch, worker, path == "padded", compiler)
        found[f"{path}_loss"] = float((here[0] - exact[0]).abs() / exact[0].abs())
        found[f"{path}_gradient"] = float((here - exact)[1:].norm() / exact[1:].norm())
    if not max(found.values()) < TOLERANCE:
        raise ValueError(f"too far from float64: {found}")
    return found


# ---- 3. GPU: how fast is it? --------------------------------------------------------------------------------
# Preset, model, rows of a micro-batch. More rows need more memory and fewer launches.
STEPS = (("base", "mae-lm", 64), ("small", "mae-lm", 256), ("base", "mlm", 64), ("base", "roberta", 64),
         ("base", "mae-lm", 128), ("base", "mae-lm", 32), ("small", "mlm", 256), ("base", "no-relative", 64))
WINDOW = 0.3  # seconds between two looks at the clock, at least


def synchronize(worker: Worker) -> None:
    """Wait for the GPU, if there is one."""
    if worker.device.type == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], object], worker: Worker) -> float:
    """Seconds of a call: the median of three windows."""
    def window(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(worker)
        return (time.perf_counter() - start) / calls

    calls = 1 + int(WINDOW / min(window(1), window(1)))  # the first call may be slow
    return statistics.median(window(calls) for _ in range(3))


def measure(size: str, name: str, rows: int, kind: str, compiler: str, worker: Worker) -> dict[str, float | None]:
    """Times in seconds; of a step also tokens/s, MFU, and peak memory in GB (None where it is not known). The kind is
    eager, compiled or graphs; the compiler is one of torch.compile's backends."""
    torch.manual_seed(0)
    graphs = kind == "graphs"
    train = make_recipe(size, "", {"micro_batch_size": rows, "compile": "graphs" if graphs else "off"})[0]
    model, config = make_model(size, name)
    model.to(worker.device)
    if kind != "eager":
        torch.compiler.reset()  # each model is compiled as if it were the only one
        model.compile(dynamic=False, backend=compiler, mode="reduce-overhead" if graphs else None)
    optimizers = make_optimizers(model, train, worker.dtype)
    batch = to_device(random_batch(config, rows, torch.Generator().manual_seed(0)), worker.device)
    batches = [batch] * (train.batch_size // rows)

    def forward() -> torch.Tensor:
        with worker.autocast():
            return model(*batch)

    def both() -> None:
        forward().backward()

    def step() -> None:
        train_step(model, optimizers, batches, 0, train, worker)

    timed = [step] if graphs else [both, forward, step]  # only a step allocates gradients outside of the graphs
    start = time.perf_counter()
    timed[0]()
    synchronize(worker)
    found = {"first_s": time.perf_counter() - start}
    for call in timed:
        found[f"{call.__name__}_s"] = seconds_of(call, worker)
    found["tokens_per_second"] = train.batch_size * config.seq_len / found["step_s"]
    found["peak_gb"] = found["mfu"] = None
    if worker.device.type == "cuda":
        found["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        peak = peak_of(torch.cuda.get_device_name(), worker.dtype)
        if peak is not None and name != "roberta":
            found["mfu"] = train.batch_size * flops(config) / found["step_s"] / peak
    return found


def gpu_part(result: dict, options: argparse.Namespace, worker: Worker) -> None:
    """Do all items, or those that --only names. Rewrites --out after each. An item that fails is recorded with its
    error, and the rest goes on."""
    rows, backend = (2, "eager") if options.tiny else (4, "inductor")
    kinds = product((("small", None), ("base", None), ("base", backend)), ABLATIONS)
    items = {f"errors {size} {name} {compiler or ''}": partial(errors, size, name, rows, compiler, worker)
             for (size, compiler), name in kinds}
    steps = (("toy", "mae-lm", 16), ("toy", "roberta", 16)) if options.tiny else STEPS
    for kind, (size, name, rows) in product(("eager", "compiled", "graphs"), steps):
        items[f"{size} {name} {rows} {kind}"] = partial(measure, size, name, rows, kind, backend, worker)
    for item, call in items.items():
        if options.only and not any(word in item for word in options.only):
            continue
        try:
            row = call()
        except Exception as error:  # too little memory, or no compiler
            row = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        result["runs"][item] = row
        write_json(options.out, result)
        print(item, *[f"{field} {value:.4g}" if isinstance(value, float) else f"{field} {value}"
                      for field, value in row.items()], sep="  ", flush=True)
        gc.collect()  # a compiled model refers to itself
        if worker.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


# ---- 4. Command line ----------------------------------------------------------------------------------------
def main(argv: list[str] | None = None) -> None:
    parser = Parser("bench.speed", __doc__)
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "cuda"), help="[cpu]")
    add("--tiny", action="store_true", help="the GPU part at a size for tests")
    add("--only", nargs="+", metavar="WORD", help="of the GPU's items those that contain one of these words [all]")
    add("--sizes", nargs="+", default=list(SIZES), choices=SIZES, help="on a CPU [all]")
    add("--out", type=Path, help="JSON file [in bench/results; with --tiny in out]")
    options = parser.parse_args(argv)
    cuda = options.device == "cuda"
    folder = Path("out") if options.tiny else HERE / "results"
    options.out = options.out or folder / ("speed-cuda.json" if cuda else "speed.json")
    with clear_errors("bench.speed"):
        worker = make_worker("bf16" if cuda or options.tiny else "auto", options.device)
        machine = torch.cuda.get_device_name() if cuda else f"{cpu_name()}, {torch.get_num_threads()} threads"
        gpu = cuda or options.tiny
        result = {"machine": machine, "autocast": str(worker.dtype).removeprefix("torch."), "commit": commit(),
                  "versions": {"python": platform.python_version(), "torch": torch.__version__},
                  "runs": {} if gpu else []}
        if options.only and options.out.is_file():
            result["runs"] = read_json(options.out)["runs"]
        print(f"{machine}, {result['autocast']}, torch {torch.__version__}, commit {result['commit']}", flush=True)
        if gpu:
            gpu_part(result, options, worker)
        else:
            cpu_part(result, options, worker)


if __name__ == "__main__":
    main()
