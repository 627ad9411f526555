"""Speed and correctness on one GPU, in one call of under 8 minutes. bench/README.md explains every number.

    python bench/gpu.py            # needs torch with CUDA and transformers; writes bench/results/gpu-DEVICE.json
    python bench/gpu.py --tiny     # the same on a CPU at a size for tests; proves the script, measures nothing

Base size, n = 512, bf16 autocast. A step is forward, backward, clipping and a fused AdamW update on batches that lie
on the GPU already. Variants that are compared take turns; times are CUDA events, medians over several windows; warm-up
and compilation are not in them. Each section stands alone: one that fails is recorded as its error, one that would
start after --budget seconds as skipped, the most important come first.
"""
import argparse
import itertools
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from cpu import HERE, machine, ratio, take_turns, wall_clock, write_report
from data import Parser, clear_errors
from maelm import (ABLATIONS, CLS, MAELM, MASK, NUM_SPECIAL, PAD, SEP, Config, Corruption, RelativeBias, attention,
                   corrupt)
from run import Place
from speed import roberta
from train import TRAIN_PRESETS, TrainConfig, flops, make_config, make_optimizers, train_step

PEAK = {"A100": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12}  # dense bf16, FLOP/s


@dataclass(frozen=True)
class Sizes:
    """How large everything is, and how often it is measured."""
    config: Config = Config()
    largest_batch: int = 64  # RoBERTa's logits at all positions then stay below 2^31 elements
    windows: int = 7
    steps: int = 3  # in a window of training
    calls: int = 20  # in a window of a kernel
    kept: tuple = (435, 512, 64)  # m of the correctness checks
    rows: int = 4  # of the correctness checks
    kernel_rows: int = 32
    backends: tuple = ("EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION")  # that take a bias
    compiler: str = "inductor"
    curve: Config = field(default_factory=lambda: make_config("toy"))
    curve_train: TrainConfig = TrainConfig(**TRAIN_PRESETS["toy"] | dict(max_steps=200, warmup_steps=20))
    smooth: int = 20  # steps


TINY = Sizes(Config(vocab_size=300, seq_len=24, encoder_layers=1, encoder_dim=48, encoder_heads=2, decoder_layers=1),
             largest_batch=2, windows=1, steps=1, calls=1, kept=(19, 24), rows=2, kernel_rows=2, backends=("MATH",),
             compiler="eager", curve=make_config("toy", encoder_layers=1, encoder_dim=32, vocab_size=300, seq_len=16),
             curve_train=TrainConfig(batch_size=2, micro_batch_size=2, max_steps=8, warmup_steps=2), smooth=4)


def cuda_clock(run: Callable[[], object], times: int) -> float:
    """Seconds a call on the GPU, between two CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def memory_of(run: Callable[[], object], device: torch.device) -> int | None:
    """Bytes on the GPU that a call needs at its peak, beyond what was there before it."""
    if device.type == "cpu":
        run()
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def short(what: str, error: Exception) -> str:
    """An error in a cell of a table."""
    return f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:80]}"


def gigabytes(count: int | None) -> float | None:
    """Bytes -> GB, if known."""
    return None if count is None else count / 1e9


# ---- 1. The models that are compared -------------------------------------------------------------------------
class Contestant:
    """A model with its optimizer and its batches; FLOPs of one row."""

    def __init__(self, name: str, model: nn.Module, config: Config, place: Place, ours: bool):
        self.name, self.config, self.place, self.ours = name, config, place, ours
        self.model = model.to(place.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.flops = flops(config, config.seq_len, None if ours else config.seq_len)

    def prepare(self, size: int) -> None:
        """Make the batches of `size` rows that steps take in turn."""
        generator = torch.Generator().manual_seed(0)
        shape, batches = (size, self.config.seq_len), []
        for _ in range(4):
            tokens = torch.randint(NUM_SPECIAL, self.config.vocab_size, shape, generator=generator)
            corruption = corrupt(tokens, self.config, generator)
            batches.append((tokens.to(self.place.device), Corruption(*(x.to(self.place.device) for x in corruption))))
        self.batches = itertools.cycle(batches)

    def loss(self, call: Callable[..., object], tokens: Tensor, corruption: Corruption) -> Tensor:
        """Of a batch, by the model as it is or as it was compiled."""
        if self.ours:
            return call(tokens, corruption)
        masked = corruption.masked
        return call(input_ids=tokens.masked_fill(masked, MASK), labels=tokens.masked_fill(~masked, -100)).loss

    def step(self, call: Callable[..., object]) -> None:
        """One training step."""
        with self.place.autocast():
            loss = self.loss(call, *next(self.batches))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 2.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def eager(self) -> None:
        """A step of the model as it is written: forward itself is never compiled, only the call."""
        self.step(self.model.forward)

    def compiled(self) -> None:
        """A step of the model as compiled in place."""
        self.step(self.model)

    def fits(self, size: int) -> bool:
        """Whether a step of `size` rows leaves a fifth of the GPU's memory free."""
        self.prepare(size)
        try:
            used = memory_of(self.eager, self.place.device)
            return used is None or torch.cuda.max_memory_allocated() < 0.8 * torch.cuda.mem_get_info()[1]
        except torch.OutOfMemoryError:
            return False
        finally:
            self.optimizer.zero_grad()
            torch.cuda.empty_cache()

    def resident(self) -> int:
        """Bytes of weights and of AdamW's two moments, all fp32."""
        return 12 * sum(p.numel() for p in self.model.parameters())


def modernbert(config: Config) -> nn.Module:
    """transformers' ModernBertForMaskedLM of the same depth, width and vocabulary. Its gated FFN of width 8/3 d has as
    many weights as ours of 4 d; SDPA computes its sliding windows as full attention with a mask."""
    from transformers import ModernBertConfig, ModernBertForMaskedLM
    model = ModernBertForMaskedLM(ModernBertConfig(
        vocab_size=config.vocab_size, hidden_size=config.encoder_dim, num_hidden_layers=config.encoder_layers,
        num_attention_heads=config.encoder_heads, intermediate_size=8 * config.encoder_dim // 3,
        max_position_embeddings=config.seq_len, attention_dropout=config.dropout, mlp_dropout=config.dropout,
        embedding_dropout=config.dropout, pad_token_id=PAD, cls_token_id=CLS, bos_token_id=CLS, sep_token_id=SEP,
        eos_token_id=SEP))
    model.set_attn_implementation("sdpa")
    return model


class Bench:
    """What the sections share: sizes, place, clock, deadline, and the models, which are made when first asked for."""

    def __init__(self, sizes: Sizes, place: Place, batch: int, deadline: float):
        self.sizes, self.place, self.device, self.batch, self.deadline = sizes, place, place.device, batch, deadline
        self.clock = wall_clock if place.device.type == "cpu" else cuda_clock
        self.missing: list[dict] = []  # models that could not be made

    @cached_property
    def contestants(self) -> list[Contestant]:
        """All models, on batches of the largest power of two that fits for each of them."""
        base = self.sizes.config
        mlm = replace(base, **ABLATIONS["mlm"])
        made = []
        for name, make, config in (("MAE-LM", MAELM, base), ("MLM", MAELM, mlm), ("RoBERTa", roberta, mlm),
                                   ("ModernBERT", modernbert, mlm),
                                   ("MAE-LM, no relative bias", MAELM, replace(base, rel_pos_buckets=0)),
                                   ("MLM, no relative bias", MAELM, replace(mlm, rel_pos_buckets=0))):
            try:
                contestant = Contestant(name, make(config), config, self.place, ours=make is MAELM)
                contestant.fits(1)  # makes the optimizer's state, which a step without memory would leave in halves
                made.append(contestant)
            except Exception as error:  # a transformers that is missing or another
                self.missing.append({"model": name, "batch": short("not available", error)})
        size = self.batch or self.sizes.largest_batch
        for contestant in [] if self.batch else made:
            while size > 1 and not contestant.fits(size):
                size //= 2
        self.batch = size
        for contestant in made:
            contestant.prepare(size)
        return made

    def race(self, chosen: dict[str, tuple[Contestant, Callable[[], None]]]) -> list[dict]:
        """Let training steps of models take turns -> a row of results for each."""
        runs = {name: run for name, (_, run) in chosen.items()}
        memory = {name: memory_of(run, self.device) for name, run in runs.items()}
        seconds = take_turns(runs, self.sizes.windows, self.sizes.steps, self.clock)
        peak = next((peak for name, peak in PEAK.items() if name in device_name(self.device)), None)
        rows = []
        for name, (contestant, _) in chosen.items():
            median = statistics.median(seconds[name])
            rate = contestant.flops * self.batch / median
            rows.append({"model": name, "batch": self.batch, "step ms": 1e3 * median,
                         "slowest / fastest window": max(seconds[name]) / min(seconds[name]),
                         "tokens/s": self.batch * contestant.config.seq_len / median, "TFLOP/s": rate / 1e12,
                         "MFU %": peak and 100 * rate / peak,
                         "peak GB": gigabytes(memory[name] and memory[name] + contestant.resident())})
            reference = "RoBERTa" + name.removeprefix(contestant.name)
            rows[-1]["speed over RoBERTa"] = ratio(seconds[reference], seconds[name]) if reference in seconds else None
        return rows


def device_name(device: torch.device) -> str:
    """As the driver says it, or "tiny" on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "tiny"


# ---- 2. Sections ---------------------------------------------------------------------------------------------
def training(bench: Bench) -> list[dict]:
    """A training step of each model, eager. MFU is counted FLOPs (train.flops) over the GPU's dense bf16 peak; peak
    memory is of the step with weights and optimizer; tokens are all n of a row."""
    return bench.race({c.name: (c, c.eager) for c in bench.contestants}) + bench.missing


def positions(bench: Bench, rows: int, m: int) -> Tensor:
    """m of n positions for each row, (rows, m) int64, ascending."""
    noise = torch.rand(rows, bench.sizes.config.seq_len, generator=torch.Generator().manual_seed(m))
    return noise.topk(m).indices.sort().values.to(bench.device)


def with_gradients(call: Callable[..., Tensor], leaves: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """The output of call(q, k, v, table) and its gradient for each leaf."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def exact(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float, hidden: Tensor) -> Tensor:
    """The formula of section 2.1, in the precision of its arguments."""
    logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + bias
    return logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def by_distance(table: Tensor, relative: RelativeBias) -> Tensor:
    """The table of buckets -> (heads, 2n - 1), a number for each head and distance."""
    return table[relative.bucket].t().contiguous()


def bias_by_distance(values: Tensor, kept: Tensor, hidden: Tensor) -> Callable[..., Tensor]:
    """FlexAttention's score_mod: adds values (heads, 2n - 1) by distance, hides the keys hidden (B, k) bool."""
    middle = values.shape[1] // 2

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(hidden[b, j], -torch.inf, s + values[h, kept[b, j] - kept[b, i] + middle])
    return score


def correctness(bench: Bench) -> list[dict]:
    """Attention against the formula in float64, with the model's relative bias on m of n positions and padding: largest
    error over largest value, of the output and of the gradients of q, k, v and the bias table."""
    found = []
    for m in bench.sizes.kept:
        for dtype in (torch.bfloat16, torch.float32):
            found += check_attention(bench, m, dtype)
    return found


def check_attention(bench: Bench, m: int, dtype: torch.dtype) -> list[dict]:
    """The rows of `correctness` for one length and precision."""
    config, B, device = bench.sizes.config, bench.sizes.rows, bench.device
    generator = torch.Generator().manual_seed(0)
    shape = B, config.encoder_heads, m, config.encoder_dim // config.encoder_heads
    q, k, v, upstream = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    relative = RelativeBias(config).to(device)
    table = torch.randn(relative.table.weight.shape, generator=generator).to(device)
    kept = positions(bench, B, m)
    hidden = torch.arange(m, device=device) >= m - 3 * torch.arange(B, device=device)[:, None]  # 0, 3, 6 ... keys
    bucket = relative.bucket[kept[:, None, :] - kept[:, :, None] + config.seq_len - 1]  # (B, m, m)
    padding = hidden[:, None, None, :]

    def model_bias(table: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            bias = torch.func.functional_call(relative, {"table.weight": table}, (kept, kept))
        return bias.masked_fill(padding, -torch.inf)

    def sdpa(backend: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    calls = {"maelm.attention": lambda q, k, v, table: attention(q, k, v, model_bias(table))}
    for backend in bench.sizes.backends:
        calls[f"SDPA {backend}"] = lambda q, k, v, table, backend=backend: sdpa(backend, q, k, v, model_bias(table))
    calls["maelm.attention, no bias"] = lambda q, k, v: attention(q, k, v)
    if dtype == torch.bfloat16:
        calls["SDPA FLASH_ATTENTION, no bias"] = lambda q, k, v: sdpa("FLASH_ATTENTION", q, k, v)
    if dtype == torch.bfloat16 and m == bench.sizes.kept[0] and device.type == "cuda":  # no backward on a CPU
        flex = torch.compile(flex_attention, dynamic=False)
        calls["FlexAttention"] = lambda q, k, v, table: flex(
            q, k, v, score_mod=bias_by_distance(by_distance(table, relative), kept, hidden))
    def formula(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        return exact(q, k, v, table[bucket].permute(0, 3, 1, 2), padding)

    double = [x.double() for x in (q, k, v, table)]
    want = {False: with_gradients(formula, double, upstream),
            True: with_gradients(lambda *qkv: exact(*qkv, 0.0, torch.zeros_like(padding)), double[:3], upstream)}
    rows = []
    for name, call in calls.items():
        plain = "no bias" in name
        row = {"attention": name, "m": m, "dtype": str(dtype)[6:]}
        try:
            got = with_gradients(call, [q, k, v] if plain else [q, k, v, table], upstream)
            row |= {what: ((a - b).abs().max() / b.abs().max()).item()
                    for what, a, b in zip(("output", "q", "k", "v", "table"), got, want[plain])}
        except Exception as error:  # a backend that is not there
            row["output"] = short("not available", error)
        rows.append({key: row.get(key) for key in ("attention", "m", "dtype", "output", "q", "k", "v", "table")})
    return rows


def leaf(*shape: int, bench: Bench, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor of normal numbers whose gradient is asked for."""
    return torch.randn(shape, device=bench.device, dtype=dtype).requires_grad_()


def kernels(bench: Bench) -> list[dict]:
    """Forward and backward of attention alone, gradients of bias or table included, in bf16, and of the bias from its
    table, once for all layers. TFLOP/s count Q K^T and A V, times 3. For choosing kernels."""
    config, B, m = bench.sizes.config, bench.sizes.kernel_rows, bench.sizes.kept[0]
    heads, d = config.encoder_heads, config.encoder_dim // config.encoder_heads
    q, k, v = (leaf(B, heads, m, d, bench=bench) for _ in range(3))
    bias = leaf(B, heads, m, m, bench=bench)
    aligned = F.pad(bias.detach(), (0, -m % 8))[..., :m].requires_grad_()
    values = leaf(heads, 2 * config.seq_len - 1, bench=bench, dtype=torch.float32)
    kept, upstream = positions(bench, B, m), torch.randn_like(q)
    hidden = torch.zeros_like(kept, dtype=torch.bool)
    relative = RelativeBias(config).to(bench.device)
    bucket = relative.bucket[kept[:, None, :] - kept[:, :, None] + config.seq_len - 1].flatten(1)  # (B, m * m)
    table, numbers = relative.table.weight, torch.arange(config.rel_pos_buckets, device=bench.device)[:, None]

    def sdpa(backend: str, mask: Tensor | None) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def one_hot() -> Tensor:
        return (bucket[:, None] == numbers).bfloat16()  # (B, buckets, m * m)

    def by_product(chosen: Tensor) -> Tensor:
        return (table.t().bfloat16().expand(B, -1, -1) @ chosen).unflatten(2, (m, m))

    def by_gather() -> Tensor:
        with bench.place.autocast():
            return relative(kept, kept)

    def training_call(forward: Callable, leaves: tuple[Tensor, ...], upstream: Tensor) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(), leaves, upstream)

    qkv, built = (q, k, v), one_hot()
    calls = {f"SDPA {backend}, bias": training_call(lambda backend=backend: sdpa(backend, bias), (*qkv, bias), upstream)
             for backend in bench.sizes.backends}
    calls |= {f"SDPA {backend}, bias stored in rows of 8":
              training_call(lambda backend=backend: sdpa(backend, aligned), (*qkv, aligned), upstream)
              for backend in bench.sizes.backends if backend != "MATH"}
    calls["maelm.attention, bias"] = training_call(lambda: attention(q, k, v, bias), (*qkv, bias), upstream)
    calls["written out, bias"] = training_call(
        lambda: (q * d ** -0.5 @ k.transpose(-2, -1) + bias).float().softmax(-1).to(q.dtype) @ v,
        (*qkv, bias), upstream)
    calls["SDPA FLASH_ATTENTION, no bias"] = training_call(lambda: sdpa("FLASH_ATTENTION", None), qkv, upstream)
    if bench.device.type == "cuda":
        flex, score = torch.compile(flex_attention, dynamic=False), bias_by_distance(values, kept, hidden)
        calls["FlexAttention, values by distance"] = training_call(
            lambda: flex(q, k, v, score_mod=score), (*qkv, values), upstream)
    else:  # where it has no backward
        score = bias_by_distance(values.detach(), kept, hidden)
        calls["FlexAttention, forward"] = lambda: flex_attention(*(x.detach() for x in qkv), score_mod=score)
    attentions = len(calls)
    calls["table to bias by gather, as the model"] = training_call(by_gather, (table,), bias.detach())
    calls["table to bias by one-hot product"] = training_call(lambda: by_product(one_hot()), (table,), bias.detach())
    calls["the same, one-hot built before"] = training_call(lambda: by_product(built), (table,), bias.detach())
    errors, memory = {}, {}
    for name, call in calls.items():
        try:
            call()
            memory[name] = memory_of(call, bench.device)
        except Exception as error:  # a kernel that is not there
            errors[name] = short("not available", error)
    seconds = take_turns({name: call for name, call in calls.items() if name not in errors}, bench.sizes.windows,
                         bench.sizes.calls, bench.clock)
    count = 3 * 4 * B * heads * m * m * d
    return [{"kernel": name, "ms": errors.get(name) or 1e3 * statistics.median(seconds[name]),
             "TFLOP/s": count / statistics.median(seconds[name]) / 1e12 if name in seconds and i < attentions else None,
             "GB": gigabytes(memory.get(name))} for i, name in enumerate(calls)]


def kernel_names(bench: Bench) -> list[dict]:
    """The kernels that took most of the time of forward and backward of maelm.attention, from torch.profiler."""
    config, m = bench.sizes.config, bench.sizes.kept[0]
    heads, cuda, rows = config.encoder_heads, bench.device.type == "cuda", []
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    for case, biased, p in (("bias", True, 0.0), ("bias, dropout", True, 0.1), ("no bias", False, 0.0),
                            ("no bias, dropout", False, 0.1)):
        q, k, v = (leaf(bench.sizes.rows, heads, m, config.encoder_dim // heads, bench=bench) for _ in range(3))
        bias = leaf(bench.sizes.rows, heads, m, m, bench=bench) if biased else None
        leaves = [x for x in (q, k, v, bias) if x is not None]
        torch.autograd.grad(attention(q, k, v, bias, p).sum(), leaves)
        with torch.profiler.profile(activities=[activity]) as profiled:
            torch.autograd.grad(attention(q, k, v, bias, p).sum(), leaves)
        spent = {event.key: event.self_device_time_total if cuda else event.self_cpu_time_total
                 for event in profiled.key_averages()}
        longest = sorted(spent, key=spent.get, reverse=True)[:4]
        total = sum(spent.values()) or 1.0  # nothing, where the profiler may not read the GPU
        rows.append({"attention": case} | {f"kernel {i}": f"{100 * spent[key] / total:.0f} % {key[:90]}"
                                           for i, key in enumerate(longest, 1)})
    return rows


def markov_rows(bench: Bench) -> Tensor:
    """Rows (steps * batch, n) int64 of a made-up language: 64 words, each followed by one of two others."""
    train, config = bench.sizes.curve_train, bench.sizes.curve
    generator = torch.Generator().manual_seed(0)
    followers = torch.randint(64, (64, 2), generator=generator)
    count = train.max_steps * train.batch_size
    words = [torch.randint(64, (count,), generator=generator)]
    for coin in torch.randint(2, (config.seq_len - 1, count), generator=generator):
        words.append(followers[words[-1], coin])
    return NUM_SPECIAL + torch.stack(words, dim=1)


def losses(bench: Bench, rows: Tensor, place: Place) -> Tensor:
    """The loss of each step of train.py's own training at toy size, averaged over `smooth` steps."""
    train, config = bench.sizes.curve_train, bench.sizes.curve
    torch.manual_seed(0)
    model = MAELM(config).to(place.device)
    optimizers, found = make_optimizers(model, train), []
    for step, tokens in enumerate(rows.split(train.batch_size)):
        batch = tokens, corrupt(tokens, config, torch.Generator().manual_seed(step))
        found.append(train_step(model, optimizers, batch, step, train, place))
    return torch.stack(found).double().cpu().unfold(0, bench.sizes.smooth, 1).mean(1)


def curves(bench: Bench) -> list[dict]:
    """Smoothed loss of the toy on the same rows: CPU in fp32, this device in fp32 and in bf16. Differences are from the
    CPU's loss, in nats."""
    rows = markov_rows(bench)
    places = {"CPU fp32": Place(0, 1, torch.device("cpu"), torch.float32),
              "fp32": replace(bench.place, dtype=torch.float32), "bf16": bench.place}
    found = {name: losses(bench, rows, place) for name, place in places.items()}
    apart = {f"{name} - CPU": found[name] - found["CPU fp32"] for name in ("fp32", "bf16")}
    every = range(0, len(found["bf16"]), bench.sizes.smooth)
    table = [{"step": i + bench.sizes.smooth} | {name: x[i].item() for name, x in (found | apart).items()}
             for i in every]
    return table + [{"step": what} | {name: of(x.abs()).item() for name, x in apart.items()}
                    for what, of in (("largest difference", torch.max), ("mean difference", torch.mean))]


def compiled(bench: Bench) -> list[dict]:
    """A training step of each model eager and compiled in place (dynamic=False), in turns. The first step includes the
    compilation, which is started only in the first 80 % of the budget."""
    torch._dynamo.config.recompile_limit = 64  # all models share nn.Module's call: one entry for each
    chosen, rows = {}, {}
    for contestant in bench.contestants:
        name = f"{contestant.name}, compiled"
        rows[name] = {"model": name, "first step s": "skipped: out of time"}
        if time.perf_counter() > bench.deadline:
            continue
        contestant.model.compile(dynamic=False, backend=bench.sizes.compiler)
        try:
            first = wall_clock(contestant.compiled, 1)
        except Exception as error:  # a model that does not compile
            rows[name]["first step s"] = short("fails", error)
            continue
        rows[name]["first step s"] = first
        chosen[contestant.name] = contestant, contestant.eager
        chosen[name] = contestant, contestant.compiled
    for row in bench.race(chosen):
        rows[row["model"]] = row | {"first step s": rows.get(row["model"], {}).get("first step s")}
    return sorted(rows.values(), key=len, reverse=True)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(prog="bench/gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of gpu-DEVICE.json")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, at a size for tests")
    parser.add_argument("--batch", type=int, default=0, help="rows in a step; 0 = as many as fit, a power of 2 [0]")
    parser.add_argument("--budget", type=float, default=450, help="seconds after which no section is started [450]")
    options = parser.parse_args(argv)
    if not (options.tiny or torch.cuda.is_available()):
        parser.error("no GPU that torch can use; --tiny runs the same on a CPU at a size for tests")
    place = Place(0, 1, torch.device("cpu" if options.tiny else "cuda"), torch.bfloat16)
    torch.manual_seed(0)
    bench = Bench(TINY if options.tiny else Sizes(), place, options.batch, time.perf_counter() + 0.8 * options.budget)
    name = re.sub(r"\W+", "-", device_name(place.device).lower())
    with clear_errors("bench/gpu.py"):
        write_report([training, correctness, kernels, kernel_names, curves, compiled], (bench,),
                     options.out / f"gpu-{name}.json", machine(place.device) | {"dtype": "bfloat16"}, options.budget)


if __name__ == "__main__":
    main()
