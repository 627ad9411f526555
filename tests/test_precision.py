"""Claims about bf16: losses and gradients are close to those of float64. tests/test_gpu.py checks this on a GPU."""
import pytest
import torch

from conftest import generator, random_tokens
from maelm import ABLATIONS, corrupt
from support.model.build import make_model
from support.program.worker import Worker
from train import make_config

EXACT = Worker(0, 1, torch.device("cpu"), torch.float32)  # without autocast


def gradients(config, worker, padded, compiler):
    """The loss and all gradients of a model without dropout, concatenated in float64 on the CPU. With `padded`,
    those of its encoder on sequences that end in padding, as in fine-tuning."""
    torch.manual_seed(0)
    model = make_model(config).to(worker.device, torch.float64 if worker is EXACT else torch.float32)
    if compiler:
        model.compile(dynamic=False, backend=compiler)
    tokens = random_tokens(4, config.seq_len, config.vocab_size)
    tokens, corruption = worker.put(tokens, corrupt(tokens, config, generator(1)))
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


@pytest.mark.parametrize("name", ABLATIONS)
def test_bf16_is_close_to_float64_for_post_ln(name):
    worker = Worker(0, 1, torch.device("cpu"), torch.bfloat16)
    shape = dict(encoder_dim=96, encoder_heads=6, seq_len=21, vocab_size=300)  # two layers of base, an eighth as wide
    shape["decoder_dim"] = ABLATIONS[name].get("decoder_dim", 0) // 8
    for loss, gradient in errors("base", name, worker, **shape):
        assert loss < 1e-3 and gradient < 0.02
