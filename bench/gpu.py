"""Speed and correctness on one GPU, in one call of under 8 minutes. bench/README.md explains every number.

    python bench/gpu.py            # needs torch with CUDA; writes bench/results/gpu-DEVICE.json
    python bench/gpu.py --tiny     # the same on a CPU at a size for tests; proves the script, measures nothing

Base size, n = 512, bf16 autocast. A step is forward, backward, clipping and a fused AdamW update on batches that lie
on the GPU already. Variants that are compared take turns; times are CUDA events, medians over several windows; warm-up
and compilation are not in them. The sections that matter most come first. Each stands alone: one that fails is recorded
as its error, one that would start after --budget seconds as skipped, and the file is written after each.
"""
import argparse
import copy
import itertools
import multiprocessing
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from cpu import HERE, machine, ratio, take_turns, wall_clock, write_report
from files import Parser, clear_errors
from maelm import (ABLATIONS, CLS, MAELM, MASK, NUM_SPECIAL, PAD, SEP, Config, Corruption, LayerNorm, RelativeBias,
                   attention, corrupt)
from run import Place, read_log
from speed import roberta
from train import TRAIN_PRESETS, TrainConfig, flops, make_config, make_optimizers, train_step

PEAK = {"A100": 312e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12}  # dense bf16, FLOP/s
Rows = list[dict[str, object]]  # of a table


@dataclass(frozen=True)
class Sizes:
    """How large everything is, and how often it is measured."""
    config: Config = Config()
    batch: int = 32  # rows in a step: the preset's micro-batch
    windows: int = 5
    steps: int = 4  # in a window of training
    kept: tuple = (435, 512, 64)  # m of the correctness checks; the first one of the attention kernels, too
    checked_rows: int = 4
    attention_rows: tuple = (32, 128)
    dropouts: tuple = (0.1, 0.0)
    backends: tuple = ("EFFICIENT_ATTENTION", "MATH")  # of SDPA, that take a bias
    without_bias: str = "FLASH_ATTENTION"  # a backend of SDPA that takes none
    apart: tuple = ("CUDNN_ATTENTION", "FlexAttention")  # kernels that get a process of their own
    compiler: str = "inductor"
    command: str = "--batch-size 256 --max-steps 50 --warmup-steps 10"
    stop_at: int = 25
    curve: Config = field(default_factory=lambda: make_config("toy"))
    curve_train: TrainConfig = TrainConfig(**TRAIN_PRESETS["toy"] | dict(max_steps=200, warmup_steps=20))
    smooth: int = 20  # steps


TINY = Sizes(
    config=Config(vocab_size=300, seq_len=24, encoder_layers=1, encoder_dim=48, encoder_heads=2, decoder_layers=1),
    batch=2, windows=1, steps=1, kept=(19, 24), checked_rows=2, attention_rows=(2,), backends=("MATH",),
    without_bias="MATH", apart=("FlexAttention",), compiler="eager",
    command="--batch-size 4 --micro-batch-size 2 --max-steps 4 --warmup-steps 1 --device cpu --vocab-size 300 "
            "--seq-len 24 --encoder-layers 1 --encoder-dim 48 --encoder-heads 2 --decoder-layers 1",
    stop_at=2,
    curve=make_config("toy", encoder_layers=1, encoder_dim=32, vocab_size=300, seq_len=16),
    curve_train=TrainConfig(batch_size=2, micro_batch_size=2, max_steps=8, warmup_steps=2), smooth=4)


# ---- 1. Measuring --------------------------------------------------------------------------------------------
class Bench:
    """What the sections share: sizes, place, clock, and until when there is time."""

    def __init__(self, sizes: Sizes, place: Place, deadline: float):
        self.sizes, self.place, self.device = sizes, place, place.device
        self.deadline = deadline  # of time.time(), which is the same in all processes
        self.clock = wall_clock if place.device.type == "cpu" else cuda_clock
        torch.backends.cuda.enable_cudnn_sdp(False)  # as run.choose_place; a section asks for it by name


def cuda_clock(run: Callable[[], object], times: int) -> float:
    """Seconds a call on the GPU, between two CUDA events."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
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
    first_line = (str(error).splitlines() or [""])[0]
    return f"{what}: {type(error).__name__}: {first_line[:80]}"


def gigabytes(count: int | None) -> float | None:
    """Bytes -> GB, if known."""
    return None if count is None else count / 1e9


def device_name(device: torch.device) -> str:
    """As the driver says it, or "tiny" on a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "tiny"


def mfu(rate: float, device: torch.device) -> float | None:
    """FLOP/s -> percent of the GPU's dense bf16 peak, if it is a GPU of the list."""
    for name, peak in PEAK.items():
        if name in device_name(device):
            return 100 * rate / peak
    return None


# ---- 2. Training steps ---------------------------------------------------------------------------------------
class Contestant:
    """A model with its optimizer and its batches; FLOPs of one row."""

    def __init__(self, name: str, make: Callable[[Config], nn.Module], config: Config, bench: Bench):
        self.name, self.config, self.place = name, config, bench.place
        self.ours = make in (MAELM, with_float32_norms)
        self.model = make(config).to(bench.device).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        # Others apply their head to all positions.
        self.flops = flops(config, config.seq_len, None if self.ours else config.seq_len)
        generator = torch.Generator().manual_seed(0)
        batches = []
        for _ in range(4):
            shape = bench.sizes.batch, config.seq_len
            tokens = torch.randint(NUM_SPECIAL, config.vocab_size, shape, generator=generator)
            corruption = corrupt(tokens, config, generator)
            on_device = [x.to(bench.device) for x in (tokens, *corruption)]
            batches.append((on_device[0], Corruption(*on_device[1:])))
        self.batches = itertools.cycle(batches)

    def step(self, call: Callable[..., object]) -> None:
        """One training step by the model's `call`."""
        tokens, corruption = next(self.batches)
        with self.place.autocast():
            if self.ours:
                loss = call(tokens, corruption)
            else:
                masked = corruption.masked
                loss = call(input_ids=tokens.masked_fill(masked, MASK), labels=tokens.masked_fill(~masked, -100)).loss
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


def with_float32_norms(config: Config) -> MAELM:
    """MAE-LM whose LayerNorms return what autocast makes of them on a GPU: float32."""
    model = MAELM(config)
    for module in model.modules():
        if isinstance(module, LayerNorm):
            module.forward = partial(nn.LayerNorm.forward, module)
    return model


def race(bench: Bench, chosen: dict[str, tuple[Contestant, Callable[[], None]]]) -> Rows:
    """Let training steps of models take turns -> a row of results for each."""
    runs, memory = {}, {}
    for name, (_, run) in chosen.items():
        runs[name] = run
        run()  # makes the optimizer's state, which stays
        memory[name] = memory_of(run, bench.device)
    seconds = take_turns(runs, bench.sizes.windows, bench.sizes.steps, bench.clock)
    rows = []
    for name, (contestant, _) in chosen.items():
        median = statistics.median(seconds[name])
        rate = contestant.flops * bench.sizes.batch / median
        peak = memory[name] and memory[name] + contestant.resident()
        rows.append({
            "model": name,
            "step ms": 1e3 * median,
            "slowest / fastest window": max(seconds[name]) / min(seconds[name]),
            "tokens/s": bench.sizes.batch * contestant.config.seq_len / median,
            "TFLOP/s": rate / 1e12,
            "MFU %": mfu(rate, bench.device),
            "peak GB": gigabytes(peak),
            "speed over RoBERTa": None,
        })
        # Compiled ones are compared with RoBERTa compiled.
        reference = "RoBERTa" + name.removeprefix(contestant.name)
        if reference in seconds:
            rows[-1]["speed over RoBERTa"] = ratio(seconds[reference], seconds[name])
    return rows


def training(bench: Bench) -> Rows:
    """A training step of each model, eager. MFU is counted FLOPs (train.flops) over the GPU's dense bf16 peak; peak
    memory is of the step with weights and optimizer; tokens are all n of a row."""
    base = bench.sizes.config
    mlm = replace(base, **ABLATIONS["mlm"])
    made, missing = {}, []
    for name, make, config in (
        ("MAE-LM", MAELM, base),
        ("MLM", MAELM, mlm),
        ("RoBERTa", roberta, mlm),
        ("MAE-LM, no relative bias", MAELM, replace(base, rel_pos_buckets=0)),
        ("MLM, no relative bias", MAELM, replace(mlm, rel_pos_buckets=0)),
        ("MAE-LM, LayerNorm in float32", with_float32_norms, base),
        ("ModernBERT", modernbert, mlm),
    ):
        try:
            contestant = Contestant(name, make, config, bench)
            contestant.eager()
        except Exception as error:  # transformers is missing or another, or there is too little memory
            missing.append({"model": name, "step ms": short("not available", error)})
            continue
        made[name] = contestant, contestant.eager
    return race(bench, made) + missing


def compiled(bench: Bench) -> Rows:
    """A training step of each model eager and compiled in place (dynamic=False), in turns. The first step includes the
    compilation; the last ones are left out when half of the time has passed."""
    base = bench.sizes.config
    mlm = replace(base, **ABLATIONS["mlm"])
    half = (time.time() + bench.deadline) / 2
    chosen, first = {}, {}
    for name, make, config in (("MAE-LM", MAELM, base), ("MLM", MAELM, mlm), ("RoBERTa", roberta, mlm)):
        key = f"{name}, compiled"
        if time.time() > half:
            first[key] = "skipped: out of time"
            continue
        try:
            contestant = Contestant(name, make, config, bench)
            contestant.model.compile(dynamic=False, backend=bench.sizes.compiler)
            contestant.eager()
            first[key] = wall_clock(contestant.compiled, 1)
        except Exception as error:  # a model that is not there or does not compile
            first[key] = short("fails", error)
            continue
        chosen[name] = contestant, contestant.eager
        chosen[key] = contestant, contestant.compiled
    rows = race(bench, chosen)
    for row in rows:
        row["first step s"] = first.pop(row["model"], None)
    return rows + [{"model": name, "first step s": why} for name, why in first.items()]


# ---- 3. Attention --------------------------------------------------------------------------------------------
@dataclass
class Case:
    """What attention computes from: q, k, v (B, heads, m, d_h), and a bias by the distance of positions (B, m)."""
    q: Tensor
    k: Tensor
    v: Tensor
    relative: RelativeBias
    kept: Tensor
    p: float  # dropout of the weights
    place: Place
    padding: Tensor | None = None  # (B, 1, 1, m) bool

    def bias(self) -> Tensor:
        """(B, heads, m, m), as the model makes it."""
        with self.place.autocast():
            bias = self.relative(self.kept, self.kept)
        return bias if self.padding is None else bias.masked_fill(self.padding, -torch.inf)

    def leaves(self) -> list[Tensor]:
        """What has a gradient."""
        return [self.q, self.k, self.v, self.relative.table.weight]


def make_case(bench: Bench, B: int, m: int, p: float, dtype: torch.dtype = torch.bfloat16) -> Case:
    """Normal numbers, and m of n positions in each row, ascending; always the same."""
    config = bench.sizes.config
    generator = torch.Generator(bench.device).manual_seed(m)
    shape = B, config.encoder_heads, m, config.encoder_dim // config.encoder_heads
    qkv = []
    for _ in range(3):
        x = torch.randn(shape, generator=generator, device=bench.device, dtype=dtype)
        qkv.append(x.requires_grad_())
    relative = RelativeBias(config).to(bench.device)
    nn.init.normal_(relative.table.weight, generator=generator)
    noise = torch.rand(B, config.seq_len, generator=generator, device=bench.device)
    kept = noise.topk(m).indices.sort().values
    return Case(*qkv, relative, kept, p, replace(bench.place, dtype=dtype))


def by_sdpa(backend: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float) -> Tensor:
    """maelm.attention by a certain backend of SDPA."""
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p)


def written_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, p: float) -> Tensor:
    """maelm.attention by its formula, as on a CPU."""
    logits = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1) + bias
    return F.dropout(logits.float().softmax(-1).to(q.dtype), p) @ v


def by_flex(q: Tensor, k: Tensor, v: Tensor, values: Tensor, kept: Tensor) -> Tensor:
    """Attention by FlexAttention, which reads the bias from values (heads, 2n - 1) by distance; it has no dropout."""
    middle = values.shape[1] // 2

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + values[h, kept[b, j] - kept[b, i] + middle]
    return flex_attention(q, k, v, score_mod=score)


Kernel = Callable[[Case, int], list[Tensor]]  # a case, and how many layers -> the output of each


def with_bias(attend: Callable[..., Tensor]) -> Kernel:
    """Layers that share a bias, which is made once."""
    def layers(case: Case, count: int) -> list[Tensor]:
        bias = case.bias()
        return [attend(case.q, case.k, case.v, bias, case.p) for _ in range(count)]
    return layers


def without_bias(attend: Callable[..., Tensor]) -> Kernel:
    """Layers without a bias."""
    def layers(case: Case, count: int) -> list[Tensor]:
        return [attend(case.q, case.k, case.v, None, case.p) for _ in range(count)]
    return layers


def with_flex(device: torch.device) -> Kernel:
    """Layers by FlexAttention, compiled on a GPU."""
    compiled_flex = torch.compile(by_flex, dynamic=False)

    def layers(case: Case, count: int) -> list[Tensor]:
        values = case.relative.table(case.relative.bucket).t().contiguous()
        return [compiled_flex(case.q, case.k, case.v, values, case.kept) for _ in range(count)]

    def layers_on_cpu(case: Case, count: int) -> list[Tensor]:
        # On a CPU FlexAttention has no gradient: its value with the gradient of the formula.
        formula = written_out(case.q, case.k, case.v, case.bias(), 0.0)
        values = case.relative.table(case.relative.bucket).t().contiguous()
        flex = by_flex(*[x.detach() for x in (case.q, case.k, case.v, values)], case.kept)
        return [formula + (flex - formula).detach() for _ in range(count)]
    return layers if device.type == "cuda" else layers_on_cpu


def gradients(kernel: Kernel, case: Case, count: int = 1) -> list[Tensor]:
    """Outputs of `count` layers and the gradients of their sum with fixed weights: for q, k, v and the table."""
    outputs = kernel(case, count)
    upstream = torch.linspace(-1, 1, outputs[0].numel(), device=case.q.device).view_as(outputs[0])
    upstream = upstream.to(outputs[0].dtype)
    leaves = case.leaves()
    return outputs + list(torch.autograd.grad(outputs, leaves, [upstream] * count, allow_unused=True))


def largest_error(found: Tensor, wanted: Tensor) -> float:
    """Over the largest value."""
    found, wanted = found.detach(), wanted.detach()
    return ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max()).item()


def measure_kernels(bench: Bench, kernels: dict[str, Kernel], case: Case) -> Rows:
    """Time and memory of forward and backward of all layers by each kernel, in turns, and how far it is from the first
    of them where there is no dropout."""
    B, heads, m, d = case.q.shape
    count = bench.sizes.config.encoder_layers
    runs, rows, wanted = {}, [], None
    for name, kernel in kernels.items():
        row = {"kernel": name, "rows": B, "dropout": case.p, "ms": None, "TFLOP/s": None, "GB": None,
               "error of output": None, "error of table": None}
        rows.append(row)
        try:
            run = partial(gradients, kernel, case, count)
            run()
            row["GB"] = gigabytes(memory_of(run, bench.device))
            if case.p == 0 and "no bias" not in name:
                output, *_, table = gradients(kernel, case)
                if wanted is None:
                    wanted = output, table
                row["error of output"] = largest_error(output, wanted[0])
                row["error of table"] = largest_error(table, wanted[1])
        except Exception as error:  # a kernel that is not there, or needs too much memory
            row["ms"] = short("not available", error)
            continue
        runs[name] = run
    seconds = take_turns(runs, bench.sizes.windows, 1, bench.clock)
    # Q K^T and A V of each layer; twice as much in the backward pass.
    products = 3 * 2 * 2 * B * heads * m * m * d * count
    for row in rows:
        if row["kernel"] in runs:
            median = statistics.median(seconds[row["kernel"]])
            row["ms"], row["TFLOP/s"] = 1e3 * median, products / median / 1e12
    return rows


def bias_alone(case: Case, count: int) -> list[Tensor]:
    """The bias, from its table; its gradient comes from one place instead of from every layer."""
    return [case.bias()]


def bias_by_product(case: Case, count: int) -> list[Tensor]:
    """The same as a product of the table with a one-hot matrix."""
    relative, kept = case.relative, case.kept
    bucket = relative.bucket[kept[:, None, :] - kept[:, :, None] + len(relative.bucket) // 2]  # (B, m, m)
    numbers = torch.arange(len(relative.table.weight), device=kept.device)[:, None]
    one_hot = (bucket.flatten(1)[:, None] == numbers).to(case.q.dtype)  # (B, buckets, m * m)
    table = relative.table.weight.t().to(case.q.dtype)
    return [(table.expand(len(kept), -1, -1) @ one_hot).unflatten(2, bucket.shape[1:])]


def kernels(bench: Bench) -> Rows:
    """Which kernel to choose: attention of all encoder layers, forward and backward, with the bias made once from its
    table and its gradient back to the table, in bf16; and the bias alone. TFLOP/s count Q K^T and A V, times 3. Errors
    are distances from the first kernel over its largest value."""
    compiled_formula = torch.compile(written_out, dynamic=False, backend=bench.sizes.compiler)
    rows = []
    for B, p in itertools.product(bench.sizes.attention_rows, bench.sizes.dropouts):
        case = make_case(bench, B, bench.sizes.kept[0], p)
        calls = {"maelm.attention": with_bias(attention)}
        for backend in bench.sizes.backends:
            calls[f"SDPA {backend}"] = with_bias(partial(by_sdpa, backend))
        calls["written out"] = with_bias(written_out)
        calls["written out, compiled"] = with_bias(compiled_formula)
        plain = bench.sizes.without_bias
        calls[f"SDPA {plain}, no bias"] = without_bias(partial(by_sdpa, plain))
        rows += measure_kernels(bench, calls, case)
        if p == 0:
            alone = measure_kernels(bench, {"bias alone, by gather": bias_alone,
                                            "bias alone, by one-hot product": bias_by_product}, case)
            rows += [row | {"TFLOP/s": None} for row in alone]
    return rows


def apart(bench: Bench) -> Rows:
    """The kernels that may crash, each in a process of its own, since after an illegal access nothing more runs in one:
    as in the section before, next to maelm.attention. FlexAttention has no dropout: it cannot run base."""
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    rows = []
    for name in bench.sizes.apart:
        # "spawn": a process that has used CUDA cannot be forked.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            try:
                rows += pool.submit(measure_apart, name, bench.sizes, bench.place).result()
            except Exception as error:  # or the process is gone
                rows.append({"kernel": name, "rows": short("fails", error)})
    return rows


def measure_apart(name: str, sizes: Sizes, place: Place) -> Rows:
    """The rows of one kernel."""
    bench = Bench(sizes, place, 0)
    rows = []
    for B, p in itertools.product(sizes.attention_rows, sizes.dropouts):
        if name == "FlexAttention":
            kernel = with_flex(place.device)
        else:
            kernel = with_bias(partial(by_sdpa, name))
        if p == 0 or name != "FlexAttention":
            case = make_case(bench, B, sizes.kept[0], p)
            rows += measure_kernels(bench, {"maelm.attention": with_bias(attention), name: kernel}, case)
    return rows


def correctness(bench: Bench) -> Rows:
    """Attention against the formula in float64, with the model's relative bias on m of n positions and padding: largest
    error over largest value, of the output and of the gradients of q, k, v and the bias table."""
    rows = []
    for m, dtype in itertools.product(bench.sizes.kept, (torch.bfloat16, torch.float32)):
        B = bench.sizes.checked_rows
        case = make_case(bench, B, m, 0.0, dtype)
        padded = 3 * torch.arange(B, device=bench.device)[:, None]  # 0, 3, 6 ... keys
        hidden = torch.arange(m, device=bench.device) >= m - padded
        case.padding = hidden[:, None, None, :]
        calls = {"maelm.attention": with_bias(attention), "maelm.attention, no bias": without_bias(attention)}
        for backend in bench.sizes.backends:
            calls[f"SDPA {backend}"] = with_bias(partial(by_sdpa, backend))
        if dtype == torch.bfloat16:
            plain = bench.sizes.without_bias
            calls[f"SDPA {plain}, no bias"] = without_bias(partial(by_sdpa, plain))
        for name, kernel in calls.items():
            row = {"attention": name, "m": m, "dtype": str(dtype)[6:]}
            row |= dict.fromkeys(("output", "q", "k", "v", "table"))
            rows.append(row)
            try:
                found = gradients(kernel, case)
            except Exception as error:  # a backend that is not there
                row["output"] = short("not available", error)
                continue
            wanted = gradients(exact_without_bias if "no bias" in name else exact, in_float64(case))
            for what, a, b in zip(("output", "q", "k", "v", "table"), found, wanted):
                if b is not None:
                    row[what] = largest_error(a, b)
    return rows


def in_float64(case: Case) -> Case:
    """The same numbers in double precision."""
    qkv = [x.detach().double().requires_grad_() for x in (case.q, case.k, case.v)]
    return Case(*qkv, copy.deepcopy(case.relative).double(), case.kept, 0.0, case.place, case.padding)


def exact(case: Case, count: int) -> list[Tensor]:
    """The formula of section 2.1 with the bias looked up, in the precision of the case."""
    distance = case.kept[:, None, :] - case.kept[:, :, None]
    bucket = case.relative.bucket[distance + len(case.relative.bucket) // 2]  # (B, m, m)
    bias = case.relative.table.weight[bucket].permute(0, 3, 1, 2)
    logits = case.q @ case.k.transpose(-2, -1) * case.q.shape[-1] ** -0.5 + bias
    return [logits.masked_fill(case.padding, -torch.inf).softmax(-1) @ case.v]


def exact_without_bias(case: Case, count: int) -> list[Tensor]:
    """The formula of section 2.1."""
    logits = case.q @ case.k.transpose(-2, -1) * case.q.shape[-1] ** -0.5
    return [logits.softmax(-1) @ case.v]


def kernel_names(bench: Bench) -> Rows:
    """The kernels that took most of the time of forward and backward of maelm.attention, from torch.profiler."""
    cuda = bench.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    rows = []
    for name, kernel in (("bias", with_bias(attention)), ("no bias", without_bias(attention))):
        for p in bench.sizes.dropouts:
            case = make_case(bench, bench.sizes.checked_rows, bench.sizes.kept[0], p)
            gradients(kernel, case)
            with torch.profiler.profile(activities=[activity]) as profiled:
                gradients(kernel, case)
            spent = {}
            for event in profiled.key_averages():
                spent[event.key] = event.self_device_time_total if cuda else event.self_cpu_time_total
            total = sum(spent.values()) or 1.0  # nothing, where the profiler may not read the GPU
            row = {"attention": f"{name}, dropout {p}"}
            for number in range(4):
                row[f"kernel {number + 1}"] = None
            longest = sorted(spent, key=spent.get, reverse=True)[:4]
            for number, key in enumerate(longest):
                row[f"kernel {number + 1}"] = f"{100 * spent[key] / total:.0f} % {key[:90]}"
            rows.append(row)
    return rows


# ---- 4. Whole runs -------------------------------------------------------------------------------------------
def write_words(path: Path, count: int = 400_000) -> None:
    """A text of made-up words, in documents of a thousand."""
    chosen = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(chosen.choices(syllables, k=chosen.randint(1, 4))) for _ in range(5000)]
    documents = []
    for _ in range(count // 1000):
        documents.append(" ".join(chosen.choices(words, k=1000)))
    path.write_text("\n\n".join(documents), encoding="utf-8")


def train_py(bench: Bench) -> Rows:
    """`train.py --preset base` itself in a process of its own, stopped half way and started again: seconds from start
    to end, until the first step is made (it includes the compilation, which the second start finds in the cache of
    torch.compile, empty before the first), and the speed of the later steps, with data, masks and log."""
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    row_flops = flops(bench.sizes.config)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_words(folder / "words.txt")
        command = [sys.executable, str(HERE.parent / "train.py"), "--preset", "base", "--data",
                   str(folder / "words.txt"), "--val-share", "0.1", "--eval-rows", "32", "--log-interval", "1",
                   "--cache", str(folder / "cache"), "--out", str(folder / "run"), *bench.sizes.command.split()]
        own_cache = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
        stop = ["--stop-at", str(bench.sizes.stop_at)]
        seen = 0  # lines of the log
        before = 0.0  # seconds of training
        for start, arguments in (("first", command + stop), ("second", command)):
            began = time.time()
            # subprocess.TimeoutExpired, which names the command, is the error of this section.
            done = subprocess.run(arguments, env=own_cache, capture_output=True, text=True,
                                  timeout=max(1.0, bench.deadline - time.time()))
            if done.returncode:
                raise RuntimeError(f"{start} start: exit code {done.returncode}: {done.stderr.strip()[-300:]}")
            seconds = time.time() - began
            lines = [line for line in read_log(folder / "run") if "loss" in line]
            new = lines[seen:]
            # The first step compiles; a second one may still warm up.
            speed = statistics.median(line["tokens_per_second"] for line in (new[2:] or new))
            rows.append({
                "start": start,
                "steps": f"{new[0]['step']} to {new[-1]['step']}",
                "start to end s": seconds,
                "first step s": new[0]["seconds"] - before,
                "tokens/s": speed,
                "MFU %": mfu(speed / bench.sizes.config.seq_len * row_flops, bench.device),
                "waiting for rows %": 100 * statistics.median(line["waiting"] for line in new),
                "loss": new[-1]["loss"],
            })
            seen, before = len(lines), new[-1]["seconds"]
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


def losses(bench: Bench, rows: Tensor, place: Place, make: Callable[[Config], MAELM]) -> Tensor:
    """The loss of each step of train.py's own training at toy size, averaged over `smooth` steps."""
    train, config = bench.sizes.curve_train, bench.sizes.curve
    torch.manual_seed(0)
    model = make(config).to(place.device)
    optimizers = make_optimizers(model, train, place.dtype)
    found = []
    for step, tokens in enumerate(rows.split(train.batch_size)):
        batch = tokens, corrupt(tokens, config, torch.Generator().manual_seed(step))
        found.append(train_step(model, optimizers, batch, step, train, place))
    return torch.stack(found).double().cpu().unfold(0, bench.sizes.smooth, 1).mean(1)


def curves(bench: Bench) -> Rows:
    """Smoothed loss of the toy on the same rows: on the CPU in fp32; on this device in fp32, in bf16, and in bf16 with
    LayerNorms that return float32. Differences are from the CPU's loss, in nats."""
    rows = markov_rows(bench)
    cpu = Place(0, 1, torch.device("cpu"), torch.float32)
    found = {
        "CPU fp32": losses(bench, rows, cpu, MAELM),
        "fp32": losses(bench, rows, replace(bench.place, dtype=torch.float32), MAELM),
        "bf16": losses(bench, rows, bench.place, MAELM),
        "bf16, LayerNorm in float32": losses(bench, rows, bench.place, with_float32_norms),
    }
    table = []
    for i in range(0, len(found["bf16"]), bench.sizes.smooth):
        table.append({"step": i + bench.sizes.smooth} | {name: x[i].item() for name, x in found.items()})
    for what, of in (("largest difference", torch.max), ("mean difference", torch.mean)):
        row = {"step": what}
        for name in list(found)[1:]:
            row[name] = of((found[name] - found["CPU fp32"]).abs()).item()
        table.append(row)
    return table


SECTIONS = (training, compiled, kernels, train_py, curves, correctness, kernel_names, apart)


def main(argv: list[str] | None = None) -> None:
    began = time.time()
    parser = Parser(prog="bench/gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of gpu-DEVICE.json")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, at a size for tests")
    parser.add_argument("--batch", type=int, default=0, help="rows in a step; 0 = 32, the preset's micro-batch [0]")
    parser.add_argument("--budget", type=float, default=400, help="seconds after which no section is started [400]")
    options = parser.parse_args(argv)
    if not (options.tiny or torch.cuda.is_available()):
        parser.error("no GPU that torch can use; --tiny runs the same on a CPU at a size for tests")
    place = Place(0, 1, torch.device("cpu" if options.tiny else "cuda"), torch.bfloat16)
    torch.manual_seed(0)
    sizes = TINY if options.tiny else Sizes()
    if options.batch:
        sizes = replace(sizes, batch=options.batch)
    about = machine(place.device) | {"dtype": "bfloat16", "rows in a step": sizes.batch}
    name = re.sub(r"\W+", "-", device_name(place.device).lower())
    with clear_errors("bench/gpu.py"):
        # The last section that is started has a minute.
        bench = Bench(sizes, place, began + options.budget + 60)
        write_report(SECTIONS, (bench,), options.out / f"gpu-{name}.json", about, options.budget)


if __name__ == "__main__":
    main()
