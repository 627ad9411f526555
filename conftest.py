"""What tests share: a small model with a batch, matrices of known rank, and wrong versions of the code."""
import ast
import os
import sys
import types
from pathlib import Path

# Before torch, and also for the processes that tests start: one thread, no GPU, no network.
os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

import maelm  # noqa: E402

torch.set_num_threads(1)
HERE = Path(__file__).resolve().parent


def pytest_configure(config):
    """Register the mark of the course's tests."""
    config.addinivalue_line("markers", "task(name): tests a function that students write; see course/assign.py")


def pytest_itemcollected(item):
    """Let `pytest -k corrupt` find the tests of a task by its name."""
    for mark in item.iter_markers("task"):
        item.extra_keyword_matches.update(mark.args)


# ---- A small model and a batch --------------------------------------------------------------------------------------
TINY = dict(vocab_size=300, seq_len=24, encoder_layers=2, encoder_dim=32, encoder_heads=4, dropout=0.0, mask_rate=0.25,
            decoder_layers=2, init_std=0.2)


def tiny(**fields):
    """A small Config with these fields."""
    return maelm.Config(**{**TINY, **fields})


def generator(seed):
    """A random generator with this seed."""
    return torch.Generator().manual_seed(seed)


def random_tokens(B=6, n=24, vocab_size=300):
    """Rows (B, n) int64 that start with [CLS], end with [SEP], and hold real tokens between."""
    tokens = torch.randint(maelm.NUM_SPECIAL, vocab_size, (B, n), generator=generator(7))
    tokens[:, 0] = maelm.CLS
    tokens[:, -1] = maelm.SEP
    return tokens


def model_and_batch(**fields):
    """A small model in evaluation mode, tokens (6, 24) and their corruption."""
    config = tiny(**fields)
    torch.manual_seed(0)
    model = maelm.MAELM(config).eval()
    for name, parameter in model.named_parameters():  # none may hide at its neutral start
        gain = parameter.ndim == 1 and name.endswith("weight")
        torch.nn.init.normal_(parameter, mean=float(gain), std=0.2)
    tokens = random_tokens()
    return model, tokens, maelm.corrupt(tokens, config, generator(1))


# ---- Matrices of known rank -----------------------------------------------------------------------------------------
TAUS = (0.5, 0.8, 0.9, 0.95, 0.99)


def built(kind, n=2000, d=48):
    """(n, d) float32 with a known kind of spectrum, rotated, and a mean row that is not small."""
    random = np.random.default_rng(len(kind))
    scale = {
        "geometric": 0.8 ** np.arange(d),
        "power": 1 / np.arange(1, d + 1),
        "two-step": np.where(np.arange(d) < 7, 9, 0.3),
        "rogue": 0.9 ** np.arange(d),
    }[kind]
    rotation = np.linalg.qr(random.standard_normal((d, d)))[0]
    h = random.standard_normal((n, d)) * scale @ rotation + random.standard_normal(d)
    if kind == "rogue":
        h[:, 3] += 1000 * h[:, 3].std()
    return h.astype(np.float32)


# ---- Not for students: reference solutions and wrong versions -------------------------------------------------------
def svd_ranks(h, centered):
    """(ranks at TAUS, squared singular values) of h (n, d) by the paper's formula in float64."""
    h = h.astype(np.float64)
    if centered:
        h = h - h.mean(0)
    squares = np.linalg.svd(h, compute_uv=False) ** 2
    shares = np.cumsum(squares) / squares.sum()
    return [int(np.argmax(shares >= tau)) + 1 for tau in TAUS], squares


def logits_at(model, tokens, corruption, at):
    """The predictions (B, k, V) of a model at positions at (B, k)."""
    h = model.encode(corruption, at)
    return model.logits(model.decode(h, tokens, corruption, at))


def catches(place, source, *mistakes):
    """Decorator: the claim below fails if one of `mistakes` stands for `source`, which occurs once in the function or
    class `place`: module.function, module.Class or module.Class.method."""
    def attach(claim):
        others = getattr(claim, "wrong_versions", [])  # of the decorators below this one
        claim.wrong_versions = [(place, source, mistake) for mistake in mistakes] + others
        return claim
    return attach


def wrong_versions(names):
    """Parameters (claim, wrong version) for each claim of a test file; `names` are its globals()."""
    found = []
    for name, claim in names.items():
        for number, wrong in enumerate(getattr(claim, "wrong_versions", [])):
            found.append(pytest.param(claim, wrong, id=f"{name[5:45]}-{number}"))
    return found


def module_with(place, source, mistake):
    """(its name, the module of `place` with the mistake in it)."""
    parts = place.split(".")
    length = 2 if parts[0] == "support" else 1
    path = HERE.joinpath(*parts[:length]).with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    node = ast.parse(text)
    for name in parts[length:]:
        node = next(inner for inner in node.body if getattr(inner, "name", "") == name)
    function = ast.get_source_segment(text, node)
    assert (function.count(source), text.count(function)) == (1, 1), f"{source!r} must occur once in {place}"
    module = types.ModuleType("wrong")
    module.__file__ = str(path)  # where inspect finds comments
    sys.modules["wrong"] = module  # where dataclasses look for their module
    text = text.replace(function, function.replace(source, mistake))
    exec(compile(text, path, "exec"), vars(module))
    return parts[length - 1], module


def run_with_wrong_version(claim, wrong, monkeypatch):
    """Fails unless the claim fails. The claim is a test itself, so it holds for the code as it is."""
    name, module = module_with(*wrong)
    for names in (claim.__globals__, globals()):  # of the claim and of the helpers above
        monkeypatch.setitem(names, name, module)
    torch.manual_seed(0)
    with pytest.raises((AssertionError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError,
                        pytest.fail.Exception)):  # but no NameError: a mistake, not a slip
        claim()
