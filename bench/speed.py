"""Training speed on this machine: tokens per second of a training step, compared with transformers' RoBERTa.

    python -m bench.speed                                            # a CPU: toy, small, base; bench/results/speed.json
    python -m bench.speed --device cuda --kinds eager compiled       # a GPU: bench/results/speed-cuda.json

A step is train.py's own, with AdamW. On a GPU, it processes the preset's batch; on a CPU, one small micro-batch. The
models take turns, so that noise affects all of them alike, and ratios to RoBERTa are taken within a turn. Tokens are
random, and all n in a sequence are counted. RoBERTa has no relative positions, and its head reads all positions.
"""
import platform
import re
import statistics
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from maelm import ABLATIONS, NUM_SPECIAL, Config, Corruption, corrupt
from support.cli import Parser, clear_errors
from support.files import write_json
from support.log import commit, flops, peak_of
from support.models import make_model
from support.optim import make_optimizers
from support.worker import Worker, compile_model, make_worker
from train import PRESETS, make_config, make_settings, train_step

HERE = Path(__file__).resolve().parent
ROWS = {"cpu": {"toy": 64, "small": 16, "base": 2}, "cuda": {"toy": 64, "small": 256, "base": 64}}  # micro-batch


def cpu_name() -> str:
    """The name of the CPU on Linux, or its kind on other systems."""
    info = Path("/proc/cpuinfo")
    names = re.findall("model name.*: (.*)", info.read_text()) if info.is_file() else []
    return names[0] if names else platform.processor()


class Roberta(torch.nn.Module):
    """RobertaForMaskedLM of transformers, as large as our encoder and with the interface of MAELM."""
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
        true = tokens.gather(1, masks.masked)
        labels = torch.full_like(tokens, -100).scatter(1, masks.masked, true)  # -100: no loss there
        return self.model(input_ids=masks.corrupted, labels=labels).loss


class Contestant:
    """A model whose training is timed, eager or compiled."""
    def __init__(self, size: str, name: str, kind: str, rows: int, worker: Worker):
        self.config = make_config(size, "mlm" if name == "roberta" else name)
        on_gpu = worker.device.type == "cuda"
        given = {"optimizer": "adamw"} if on_gpu else {"optimizer": "adamw", "batch_size": rows}
        self.recipe = make_settings(PRESETS[size], given).recipe
        torch.manual_seed(0)
        model = Roberta(self.config) if name == "roberta" else make_model(self.config)
        model = model.to(worker.device)
        if kind != "eager":
            compile_model(model)
        optimizers = make_optimizers(model, self.recipe, worker.dtype)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(NUM_SPECIAL, self.config.vocab_size, (rows, self.config.seq_len), generator=generator)
        batch = worker.put(tokens, corrupt(tokens, self.config, generator))
        batches = [batch] * (self.recipe.batch_size // rows)

        def step() -> None:
            train_step(model, optimizers, batches, 0, self.recipe, worker)

        self.timer = Timer("step()", globals={"step": step}, num_threads=torch.get_num_threads())
        self.speeds = []  # tokens per second, by turn
        before = torch.cuda.memory_allocated() if on_gpu else 0
        for _ in range(3):  # compile, warm up
            self.timer.timeit(1)
        self.peak_gb = (torch.cuda.max_memory_allocated() - before) / 1e9 if on_gpu else None

    def take_turn(self) -> None:
        """Measure for about half a second, or for one step if that takes longer."""
        seconds = self.timer.timeit(1).median
        seconds = self.timer.timeit(max(1, round(0.5 / seconds))).median
        self.speeds.append(self.recipe.batch_size * self.config.seq_len / seconds)


def compare(size: str, names: list[str], kind: str, rows: int, turns: int, worker: Worker) -> dict[str, dict]:
    """Model -> its tokens per second by turn; the smallest, median and largest ratio to RoBERTa within a turn, if
    RoBERTa takes part; on a GPU, its memory and, if the GPU's peak is known, its MFU."""
    contestants = {name: Contestant(size, name, kind, rows, worker) for name in names}
    for _ in range(turns):
        for contestant in contestants.values():
            contestant.take_turn()
    found = {}
    for name, one in contestants.items():
        found[name] = {"tokens_per_second": one.speeds, "peak_gb": one.peak_gb}
        if "roberta" in contestants:
            ratios = sorted(ours / theirs for ours, theirs in zip(one.speeds, contestants["roberta"].speeds))
            found[name]["ratio"] = [ratios[0], statistics.median(ratios), ratios[-1]]
        peak = peak_of(torch.cuda.get_device_name(), worker.dtype) if worker.device.type == "cuda" else None
        if peak is not None and name != "roberta":
            found[name]["mfu"] = statistics.median(one.speeds) / one.config.seq_len * flops(one.config) / peak
    return found


def main(argv: list[str] | None = None) -> None:
    parser = Parser("bench.speed", __doc__)
    add = parser.add_argument
    add("--device", default="cpu", choices=ROWS, help="[cpu]")
    add("--sizes", nargs="+", default=["toy", "small", "base"], choices=ROWS["cpu"], help="presets [all]")
    add("--models", nargs="+", default=["mae-lm", "mlm", "roberta"], choices=[*ABLATIONS, "roberta"],
        help="roberta, or rows of Table 2 [mae-lm mlm roberta]")
    add("--kinds", nargs="+", default=["eager"], choices=["eager", "compiled"], help="[eager]")
    add("--rows", type=int, help="sequences at a time [64 for toy, 16 or 256 for small, 2 or 64 for base]")
    add("--turns", type=int, default=7, help="[7]")
    add("--out", type=Path, help="JSON file [in bench/results]")
    options = parser.parse_args(argv)
    cuda = options.device == "cuda"
    out = options.out or HERE / "results" / ("speed-cuda.json" if cuda else "speed.json")
    with clear_errors("bench.speed"):
        worker = make_worker("auto", options.device)
        machine = torch.cuda.get_device_name() if cuda else f"{cpu_name()}, {torch.get_num_threads()} threads"
        result = {"machine": machine, "autocast": str(worker.dtype).removeprefix("torch."), "commit": commit(),
                  "versions": {"python": platform.python_version(), "torch": torch.__version__}, "runs": []}
        print(f"{machine}, {result['autocast']}, torch {torch.__version__}, commit {result['commit']}")
        for size in options.sizes:
            for kind in options.kinds:
                rows = options.rows or ROWS[options.device][size]
                found = compare(size, options.models, kind, rows, options.turns, worker)
                result["runs"].append({"size": size, "kind": kind, "rows": rows, "models": found})
                write_json(out, result)
                for name, one in found.items():
                    ratio = "".join(f"{value:6.2f}" for value in one.get("ratio", []))
                    mfu = f"  MFU {one['mfu']:.1%}" if "mfu" in one else ""
                    print(f"{size:6}{kind:9}{name:20}{statistics.median(one['tokens_per_second']):12,.0f} tokens/s"
                          f"{ratio}{mfu}")


if __name__ == "__main__":
    main()
