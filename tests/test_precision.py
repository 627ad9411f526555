"""Claims about bf16, whose losses and gradients are close to those of float64, and about runs on a GPU."""
import pytest
import torch

from conftest import close, generator, model_and_batch, random_tokens
from maelm import ABLATIONS, attention, corrupt
from support.model import make_model
from support.worker import Worker
from tests.common import PAPER_ROWS, losses, make_config, short_run

EXACT = Worker(0, 1, torch.device("cpu"), torch.float32)  # without autocast


def gradients(config, worker, padded, compiler):
    """The loss and all gradients of a model without dropout, concatenated in float64 on the CPU. With `padded`,
    those of its encoder on sequences that end in padding, as in fine-tuning."""
    torch.manual_seed(0)
    model = make_model(config).to(worker.device, torch.float64 if worker is EXACT else torch.float32)
    if compiler:
        model.compile(dynamic=False, backend=compiler)
    tokens = random_tokens(4, config.seq_len, config.vocab_size)
    tokens, corruption = worker.put((tokens, corrupt(tokens, config, generator(1))))
    with worker.autocast():
        if padded:
            positions = torch.arange(config.seq_len, device=worker.device)[None]
            length = torch.linspace(1, config.seq_len, len(tokens), device=worker.device)
            h = model.encoder(tokens, positions, positions >= length[:, None])
            weights = torch.linspace(-1, 1, h.shape[2], device=h.device)
            loss = (1 + (h[:, 0].float() * weights).mean(1)).square().mean()
        else:
            loss = model(tokens, corruption)
    loss.backward()
    found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([loss.detach().flatten(), *found]).double().cpu()


def errors(size, name, worker, compiler=None, **fields):
    """Relative errors of the loss and the gradients of an ablation with two layers, without and with padding."""
    config = make_config(size, name, encoder_layers=2, dropout=0.0, **fields)
    found = []
    for padded in (False, True):
        exact, here = gradients(config, EXACT, padded, None), gradients(config, worker, padded, compiler)
        found.append((float((here[0] - exact[0]).abs() / exact[0].abs()),
                      float((here - exact)[1:].norm() / exact[1:].norm())))
    return found


@pytest.mark.parametrize("name", PAPER_ROWS)
def test_bf16_is_close_to_float64_for_post_ln(name):
    worker = Worker(0, 1, torch.device("cpu"), torch.bfloat16)
    shape = dict(encoder_dim=96, encoder_heads=6, seq_len=21, vocab_size=300)  # two layers of base, an eighth as wide
    shape["decoder_dim"] = ABLATIONS[name].get("decoder_dim", 0) // 8
    for loss, gradient in errors("base", name, worker, **shape):
        assert loss < 1e-3 and gradient < 0.02


# ---- On a GPU: CUDA_VISIBLE_DEVICES=0 pytest -m cuda -n 0 -----------------------------------------------------------
@pytest.mark.cuda
def test_fused_attention_and_its_gradients_are_the_formulas():
    inputs = [torch.randn(2, 3, n, 16, generator=generator(i)) for i, n in enumerate((5, 7, 7))]
    inputs.append(torch.randn(2, 3, 5, 8, generator=generator(3))[..., :7])  # the stride between rows is 8
    found = []
    for device in ("cpu", "cuda"):
        leaves = [x.to(device).requires_grad_() for x in inputs]
        out = attention(*leaves)
        found.append([x.cpu() for x in (out, *torch.autograd.grad(out.sin().sum(), leaves))])
    torch.testing.assert_close(*found, atol=5e-3, rtol=5e-3)  # TF32


def test_biases_and_states_are_in_bf16():
    model, _, _ = model_and_batch()
    tokens, positions = torch.arange(4, 10).expand(2, -1), torch.arange(6)[None]
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    expected = model.encoder(tokens, positions, padding)
    with Worker.make("bf16", "cpu", 32).autocast():
        assert model.encoder(tokens, positions).dtype == torch.bfloat16  # also between layers
    stack = model.bfloat16().encoder.stack
    assert stack.attention_bias(positions, padding).dtype == torch.bfloat16
    close(model.encoder(tokens, positions, padding).float()[1, :4], expected[1, :4], atol=0.1, rtol=0.1)


@pytest.mark.cuda
@pytest.mark.parametrize("size, compiler", [("small", None), ("base", None), ("base", "inductor")])
@pytest.mark.parametrize("name", PAPER_ROWS)
def test_bf16_is_close_to_float64(size, compiler, name):
    torch.compiler.reset()
    for found in errors(size, name, Worker.make("bf16", "cuda", 32), compiler, seq_len=61, vocab_size=320):
        assert max(found) < 0.02


@pytest.mark.cuda
@pytest.mark.parametrize("flags", [[], ["--compile", "on"]])
def test_a_run_that_was_stopped_continues(flags, text, tmp_path):
    flags = ["--device", "cuda", "--precision", "bf16", *flags]
    whole = short_run(text, tmp_path / "whole", *flags)
    out = short_run(text, tmp_path / "run", *flags, "--stop-at", 3)
    short_run(text, out, *flags)
    assert losses(out) == [(step, pytest.approx(loss, rel=1e-2)) for step, loss in losses(whole)]
