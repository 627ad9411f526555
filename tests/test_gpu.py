"""Claims about runs on a GPU; without one, they are deselected. To run: CUDA_VISIBLE_DEVICES=0 pytest -m cuda -n 0."""
import pytest
import torch

import maelm
from conftest import generator, model_and_batch
from support.program.worker import make_worker
from tests.common import losses, short_run
from tests.test_precision import errors

pytestmark = pytest.mark.cuda
close = torch.testing.assert_close


def test_fused_attention_and_its_gradients_are_the_formulas():
    inputs = [torch.randn(2, 3, n, 16, generator=generator(i)) for i, n in enumerate((5, 7, 7))]
    inputs.append(torch.randn(2, 3, 5, 8, generator=generator(3))[..., :7])  # the stride between rows is 8
    found = []
    for device in ("cpu", "cuda"):
        leaves = [x.to(device).requires_grad_() for x in inputs]
        out = maelm.attention(*leaves)
        found.append([x.cpu() for x in (out, *torch.autograd.grad(out.sin().sum(), leaves))])
    close(*found, atol=5e-3, rtol=5e-3)  # TF32


def test_rows_of_a_bias_are_aligned():
    model, _, _ = model_and_batch()
    stack, positions = model.encoder.stack.cuda(), torch.arange(21, device="cuda")[None]
    padding = positions.expand(6, -1) > 9
    with make_worker("bf16", "cuda").autocast():
        bias = stack.attention_bias(positions, padding)
    assert bias.dtype == torch.bfloat16 and bias.stride(-2) % 8 == 0


@pytest.mark.parametrize("size, compiler", [("small", None), ("base", None), ("base", "inductor")])
@pytest.mark.parametrize("name", maelm.ABLATIONS)
def test_bf16_is_close_to_float64(size, compiler, name):
    torch.compiler.reset()
    for found in errors(size, name, make_worker("bf16", "cuda"), compiler, seq_len=61, vocab_size=320):
        assert max(found) < 0.02


@pytest.mark.parametrize("flags", [[], ["--compile", "on"]])
def test_a_run_that_was_stopped_continues(flags, text, tmp_path):
    flags = ["--device", "cuda", "--precision", "bf16", *flags]
    whole = short_run(text, tmp_path / "whole", *flags)
    out = short_run(text, tmp_path / "run", *flags, "--stop-at", 3)
    short_run(text, out, *flags)
    assert losses(out) == [(step, pytest.approx(loss, rel=1e-2)) for step, loss in losses(whole)]
