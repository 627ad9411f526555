"""Training speed on this machine, like for like: MAE-LM, our MLM, and transformers' RoBERTa of the same size.

    python bench/speed.py                      # sizes toy, small, base; prints a table, writes bench/results/
    python bench/speed.py --sizes toy --rounds 3

Each model lives in a process of its own (so that its peak memory can be read), and the processes take turns: a
round is a few training steps of each, so that noise of the machine meets all of them alike. A step is forward,
backward, clipping and a fused AdamW update; all n tokens of a row count for everyone. Same layers, width, heads,
vocabulary, sequence length, batch, dropout and autocast. RoBERTa (`pip install -r requirements-test.txt`) has no
relative positions and applies its head to all positions, as its users get it.
"""
import argparse
import json
import multiprocessing
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402

from cpu import ask, ask_in_turns, commit, cpu_name  # noqa: E402
from files import Parser  # noqa: E402
from maelm import MAELM, MASK, NUM_SPECIAL, Config, corrupt  # noqa: E402
from run import set_up  # noqa: E402
from train import make_config  # noqa: E402

# size -> (batch, steps a round, dropouts)
SIZES = {"toy": (64, 4, (0.0, 0.1)), "small": (16, 2, (0.0, 0.1)), "base": (2, 1, (0.1, 0.0))}
MODELS = ("mae-lm", "mlm", "roberta")


def roberta(config: Config) -> torch.nn.Module:
    """transformers' RobertaForMaskedLM of the size of our encoder."""
    from transformers import RobertaConfig, RobertaForMaskedLM
    return RobertaForMaskedLM(RobertaConfig(
        vocab_size=config.vocab_size, hidden_size=config.encoder_dim, num_hidden_layers=config.encoder_layers,
        num_attention_heads=config.encoder_heads, intermediate_size=4 * config.encoder_dim,
        max_position_embeddings=config.seq_len + 2, hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=config.dropout, type_vocab_size=1, pad_token_id=1))


def worker(name: str, size: str, dropout: float, seq_len: int, threads: int, pipe) -> None:
    """Train one model for as many steps as `pipe` asks; answer seconds, then peak memory in MB."""
    torch.set_num_threads(threads)
    place = set_up("auto", "cpu")
    ours = name != "roberta"
    config = make_config(size, name if ours else "mlm", **({"seq_len": seq_len} if seq_len else {}), dropout=dropout)
    model = (MAELM(config) if ours else roberta(config)).to(place.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        tokens = torch.randint(NUM_SPECIAL, config.vocab_size, (SIZES[size][0], config.seq_len), generator=generator)
        masked = corrupt(tokens, config, generator)
        with place.autocast():
            if ours:
                loss = model(tokens, masked)
            else:
                loss = model(input_ids=tokens.masked_fill(masked.masked, MASK),
                             labels=tokens.masked_fill(~masked.masked, -100)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()

    while steps := pipe.recv():
        start = time.perf_counter()
        for _ in range(steps):
            step()
        pipe.send(time.perf_counter() - start)
    import resource  # which Windows lacks, and bench/gpu.py does not need
    pipe.send(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def measure(size: str, dropout: float, seq_len: int, rounds: int, threads: int) -> dict[str, dict]:
    """Model -> tokens per second in each round, and peak memory."""
    context = multiprocessing.get_context("spawn")
    batch, steps, _ = SIZES[size]
    tokens = batch * (seq_len or make_config(size).seq_len) * steps
    pipes = {}
    for name in MODELS:
        pipes[name], theirs = context.Pipe()
        context.Process(target=worker, args=(name, size, dropout, seq_len, threads, theirs), daemon=True).start()
    found = {}
    for name, seconds in ask_in_turns(pipes, rounds, steps).items():
        speeds = [tokens / second for second in seconds]
        found[name] = {"tokens_per_second": speeds, "peak_mb": ask(pipes[name], 0)}  # 0 steps: it ends
    return found


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="bench/speed.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seq-len", type=int, default=0, help="instead of the preset's")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "speed.json")
    options = parser.parse_args(argv)
    place = set_up("auto", "cpu")
    result = {"machine": f"{cpu_name()}, {options.threads} threads", "autocast": str(place.dtype)[6:],
              "commit": commit(), "versions": {name: version(name) for name in ("torch", "transformers", "numpy")},
              "runs": []}
    print(f"{result['machine']}, {result['autocast']}, torch {torch.__version__}, commit {result['commit']}")
    print(f"{'size':6} {'dropout':>7} {'model':8} {'tokens/s':>9} {'peak MB':>8}   ratio to RoBERTa: min, median, max")
    for size in options.sizes:
        for dropout in SIZES[size][2]:
            found = measure(size, dropout, options.seq_len, options.rounds, options.threads)
            for name in MODELS:
                speeds = found[name]["tokens_per_second"]
                ratios = sorted(a / b for a, b in zip(speeds, found["roberta"]["tokens_per_second"]))
                found[name]["ratio"] = ratios[0], statistics.median(ratios), ratios[-1]
                print(f"{size:6} {dropout:7} {name:8} {statistics.median(speeds):9,.0f} "
                      f"{found[name]['peak_mb']:8,.0f}   "
                      + "  ".join(f"{r:.2f}" for r in found[name]["ratio"]), flush=True)
            result["runs"].append({"size": size, "dropout": dropout, "batch": SIZES[size][0], "models": found})
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
