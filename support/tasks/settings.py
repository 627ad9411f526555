"""The settings of fine-tuning: defaults and grids of the groups of tasks (Tables 5 and 6), and allowed values."""
import itertools
import math

from support.program.cli import require
from support.tasks.types import TASKS

DEFAULTS = {
    "small": dict(epochs=10.0, batch_size=16),
    "large": dict(),
    "squad": dict(batch_size=16),
    "docs": dict(epochs=5.0, batch_size=16, learning_rate=8e-4),  # see docs/results.md
}
SWEPT = ("epochs", "learning_rate", "batch_size", "warmup_share")
SWEEPS = {  # group -> values to try; Tables 5 and 6
    "small": dict(epochs=(2.0, 3.0, 5.0, 10.0), batch_size=(16, 32), warmup_share=(0.06, 0.10),
                  learning_rate=(2e-5, 3e-5, 4e-5, 5e-5)),
    "large": dict(epochs=(2.0, 3.0, 5.0), batch_size=(32,), warmup_share=(0.06,),
                  learning_rate=(1e-5, 2e-5, 3e-5, 4e-5)),
    "squad": dict(epochs=(2.0, 3.0), batch_size=(16, 32), warmup_share=(0.06, 0.10),
                  learning_rate=(2e-5, 3e-5, 4e-5, 5e-5)),
}
LARGE_RATES = {  # group -> learning rates to try for an encoder as wide as large++
    "small": (7e-6, 1e-5, 2e-5, 3e-5),
    "large": (5e-6, 7e-6, 1e-5, 2e-5),
    "squad": (7e-6, 1e-5, 2e-5, 3e-5),
}
PROBED = {"batch_size", "seq_len", "l2"}  # the settings that --frozen uses


def grid(group: str, dim: int, given: dict) -> list[dict[str, float]]:
    """The settings of Table 5 or 6 for an encoder of width `dim`; a given value replaces them."""
    group = group if group in SWEEPS else "small"
    rates = LARGE_RATES[group] if dim >= 1024 else SWEEPS[group]["learning_rate"]
    smaller = max(1, 768 / dim) ** 2  # an encoder smaller than base needs higher rates, as in TuneConfig
    tried = SWEEPS[group] | {"learning_rate": [rate * smaller for rate in rates]}
    tried |= {name: (given[name],) for name in SWEPT if name in given}
    return [dict(zip(tried, values)) for values in itertools.product(*tried.values())]


def check_tune(t):
    """Raises ValueError for the first field of a finetune.TuneConfig whose value is not allowed."""
    require(
        t,
        ("epochs", 0 < t.epochs <= 10_000, "a number above 0, at most 10,000"),
        ("batch_size", 1 <= t.batch_size <= 10_000, "1 to 10,000"),
        ("seq_len", t.seq_len >= 8, "8 or more"),
        ("precision", t.precision in ("auto", "fp32", "bf16"), "auto, fp32 or bf16"),
        *[(name, 0 <= getattr(t, name) < math.inf, "0 or more") for name in ("learning_rate", "weight_decay", "l2")],
        *[(name, 0 <= getattr(t, name) < 1, "0 or more, below 1") for name in ("warmup_share", "dropout")],
        *[(name, getattr(t, name) >= 1, "1 or more") for name in ("max_query", "doc_stride", "max_answer")])


def check_options(options):
    """Raises ValueError for a flag that is missing or has no effect."""
    if options.task == "docs" and options.data:
        raise ValueError("--data: docs reads the documentation on this machine; use --task custom for your own files")
    if options.task == "custom" and not options.data:
        raise ValueError("--task custom: needs --data, a folder with train and dev")
    if options.seeds is not None and options.seeds < 1:
        raise ValueError(f"seeds={options.seeds}: use 1 or more")
    if not options.frozen:
        if "l2" in options.given:
            raise ValueError("--l2: needs --frozen")
        return
    unused = sorted(options.given.keys() - PROBED)
    if options.sweep:
        unused.append("sweep")
    if options.seeds is not None and not options.init.startswith("random:"):
        unused.append("seeds")  # nothing is random
    if unused:
        raise ValueError(f"--{unused[0].replace('_', '-')}: has no effect with --frozen")
    if options.task in TASKS and TASKS[options.task].kind != "classification":
        raise ValueError(f"--frozen: {options.task} needs an encoder that is fine-tuned")
