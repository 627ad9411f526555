"""A small model and a batch for all tests."""
import os

# Set before torch is imported, and for processes that tests start: one thread, no network, no GPU unless one is named.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest  # noqa: E402
import torch  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map_only  # noqa: E402

import maelm  # noqa: E402

torch.set_num_threads(1)


def task(name, gate=False):
    """Marks a claim about a task, such that `pytest -m corrupt` runs it. A task that fails a gate gets no points."""
    return getattr(pytest.mark, name)


def close(found, expected, hint="", rtol=1e-6, atol=1e-5, any_dtype=False):
    """Fails with a hint unless two tensors, or all tensors in two lists, are nearly equal, in shape and dtype too. (The
    first call of torch.testing.assert_close takes a second.)"""
    if isinstance(expected, (list, tuple)):
        for x, y in zip(found, expected, strict=True):
            close(x, y, hint, rtol, atol, any_dtype)
        return
    assert found.shape == expected.shape, f"{hint}\nshape {tuple(found.shape)}, not {tuple(expected.shape)}"
    assert any_dtype or found.dtype == expected.dtype, f"{hint}\n{found.dtype}, not {expected.dtype}"
    if expected.is_floating_point() and expected.isfinite().all():
        assert found.isfinite().all(), f"{hint}\nthe result has NaN or infinity: does exp overflow, or a sum vanish?"
    wide = torch.promote_types(found.dtype, torch.float64)  # complex128 for complex numbers
    gap = (found.to(wide) - expected.to(wide)).abs()
    far = (found != expected) & ~(gap <= atol + rtol * expected.to(wide).abs())  # not for equal infinities
    at = tuple(far.nonzero()[0].tolist()) if far.any() else ()
    assert not far.any(), f"{hint}\n{found[at]}, not {expected[at]}, at index {at}; wrong: {far.sum()} of {far.numel()}"


def on_meta(function, *arguments):
    """Fails unless a function works on torch's device without values, and its results are there."""
    hint = "create new tensors on the device of the arguments, as a GPU needs"
    try:
        results = function(*tree_map_only(torch.Tensor, lambda x: x.to("meta"), arguments))
    except RuntimeError as error:
        pytest.fail(f"{hint}: {error}")
    assert all(x.is_meta for x in tree_leaves(results)), hint


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
    """Sequences (B, n) int64 that start with [CLS], end with [SEP], and have real tokens between."""
    tokens = torch.randint(maelm.NUM_SPECIAL, vocab_size, (B, n), generator=generator(7))
    tokens[:, 0] = maelm.CLS
    tokens[:, -1] = maelm.SEP
    return tokens


def model_and_batch(**fields):
    """A small model in evaluation mode, tokens (6, 24) and their corruption."""
    config = tiny(**fields)
    torch.manual_seed(0)
    kind = maelm.MAELM
    if config.decoder != "bi":
        from support.cross_attention import DECODERS  # here, because students do not have it
        kind = DECODERS[config.decoder]
    model = kind(config).eval()
    for name, parameter in model.named_parameters():  # zeros and ones could hide errors
        gain = parameter.ndim == 1 and name.endswith("weight")
        torch.nn.init.normal_(parameter, mean=float(gain), std=0.2)
    tokens = random_tokens()
    return model, tokens, maelm.corrupt(tokens, config, generator(1))
