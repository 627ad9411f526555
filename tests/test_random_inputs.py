"""Claims that only the grader runs: a function and our solution agree for arguments of random sizes, values and dtypes.

In a grade the solutions are in a folder of their own. Here the functions are the solutions, but for test_mistakes.py.
"""
import copy
import dataclasses
import random
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

import maelm
import rank
import train
from conftest import generator, tiny
from support import metrics

if find_spec("solutions"):
    from solutions import maelm as our_maelm
    from solutions import metrics as our_metrics
    from solutions import rank as our_rank
    from solutions import train as our_train
else:
    our_maelm, our_metrics, our_rank, our_train = maelm, metrics, rank, train

task = pytest.mark.task
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


# ---- Comparing ------------------------------------------------------------------------------------------------------
def shown(x):
    """A value in a message: the shape and dtype of a tensor or an array."""
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}" if hasattr(x, "shape") else repr(x)


def named(name, x):
    """{name: value}, or the values in a list or tuple by name and index; {} for None."""
    leaves = [leaf for leaf in tree_leaves(x) if leaf is not None]
    return {name if len(leaves) == 1 else f"{name}[{i}]": leaf for i, leaf in enumerate(leaves)}


def outcome(function, arguments):
    """By name, the results of a function, the arguments after the call, and the gradients of a random weighted sum of
    the results, in the arguments that require one and the parameters of the function's module. Or "ValueError"."""
    arguments = copy.deepcopy(arguments)
    sources = {name: x for name, x in arguments.items() if getattr(x, "requires_grad", False)}
    given = arguments | {name: 1 * x for name, x in sources.items()}  # a change in place is no error then
    try:
        results = named("the result", function(*given.values()))
    except ValueError:
        return "ValueError"
    found = dict(results)
    for name, x in given.items():
        found |= named(f"after the call, {name}", x)
    sources |= dict(function.__self__.named_parameters()) if hasattr(function, "__self__") else {}
    learning = [x for x in results.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    if learning:
        loss = sum((x.double() * torch.randn(x.shape, generator=generator(0))).sum() for x in learning)
        gradients = torch.autograd.grad(loss, sources.values(), allow_unused=True, materialize_grads=True)
        found |= {f"the gradient of {name}": x for name, x in zip(sources, gradients)}
    return found


def same(found, expected, what):
    """Fails unless two values agree, up to rounding in any order of summation."""
    hint = f"{what} is {shown(found)}, not {shown(expected)}"
    if not isinstance(found, torch.Tensor) or not isinstance(expected, torch.Tensor):
        assert type(found) is type(expected) or not isinstance(found, torch.Tensor), hint
        assert found == pytest.approx(expected, 1e-6, 1e-9), hint
        return
    assert shown(found) == shown(expected), hint
    tolerance = 0.05 if expected.dtype == torch.bfloat16 else 2e-4
    wrong = ~torch.isclose(found, expected, tolerance, tolerance)
    assert not wrong.any(), f"{what} has a difference of {(found - expected)[wrong].abs().max():.2g}"


def agree(function, ours, **arguments):
    """Fails unless a function and our solution do the same with arguments, which they get in this order."""
    hint = ", ".join(f"{name} {shown(leaf)}" for arg, x in arguments.items() for name, leaf in named(arg, x).items())
    found, expected = outcome(function, arguments), outcome(ours, arguments)
    if "ValueError" in (found, expected):
        assert found == expected, f"with {hint}: ValueError is {'missing' if expected == 'ValueError' else 'wrong'}"
        return
    differing = found.keys() ^ expected.keys()
    assert not differing, f"with {hint}: {min(differing)} is {'missing' if differing & expected.keys() else 'too much'}"
    for name, x in expected.items():
        same(found[name], x, f"with {hint}: {name}")


# ---- Random arguments -----------------------------------------------------------------------------------------------
def draws(count=40):
    """Sources of random numbers. The random numbers of torch begin anew with each."""
    for seed in range(count):
        torch.manual_seed(seed)
        yield random.Random(seed)


def some_config(draw, **fields):
    """A small Config of random sizes."""
    heads = draw.randint(1, 3)
    sizes = dict(vocab_size=draw.randint(8, 40), seq_len=draw.randint(12, 40), encoder_heads=heads,
                 encoder_dim=heads * draw.randint(2, 9), encoder_layers=draw.randint(1, 3), decoder_layers=1,
                 rel_pos_buckets=draw.choice((8, 10, 16)), rel_pos_max_distance=draw.randint(10, 60),
                 norm=draw.choice(("pre", "post")), mask_rate=draw.uniform(0.1, 0.9), dropout=0.3,
                 mask_in_encoder=draw.choice((0.0, 0.3, 0.5, 1.0)), decoder_reset=draw.random() < 0.5)
    return tiny(**sizes | fields)


def some_batch(draw, config):
    """Tokens (B, n), a few of them special, and their corruption."""
    B, n = draw.randint(1, 5), draw.randint(4, config.seq_len)
    tokens = torch.randint(config.vocab_size, (B, n))
    masked = torch.rand(B, n).topk(draw.randint(1, n - 1)).indices
    return tokens, our_maelm.apply_masks(tokens, masked, config, generator(0))


def some_bias(draw, B, heads, t, s, dtype):
    """None, or a bias of attention of a random shape, which can hide keys, but not the first."""
    shape = draw.choice(((t, s), (1, 1, t, s), (B, 1, 1, s), (1, heads, t, s), (B, heads, t, s)))
    bias = 2 * torch.randn(shape)
    if draw.random() < 0.5:
        bias[..., 1:] = bias[..., 1:].masked_fill(torch.rand(bias[..., 1:].shape) < 0.3, -torch.inf)
    return draw.choice((None, bias.to(dtype).requires_grad_()))


def twins(kind, *arguments, dtype=torch.float32):
    """A student's module and ours with the same random weights, as in evaluation."""
    mine, ours = [getattr(module, kind)(*arguments).to(dtype).eval() for module in (maelm, our_maelm)]
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    mine.load_state_dict(ours.state_dict())
    return mine, ours


# ---- One claim per task ---------------------------------------------------------------------------------------------
@task("learning_rate_factor")
def test_random_schedules():
    for draw in draws(200):
        last = draw.randint(1, 60)
        agree(train.learning_rate_factor, our_train.learning_rate_factor, step=draw.randrange(last),
              warmup_steps=draw.randint(0, last), max_steps=last)


@task("tau_rank")
def test_rank_of_random_values():
    for draw in draws(200):
        values = torch.randint(6, (draw.randint(1, 12),)).double().sort(descending=True).values
        shares = (values.cumsum(0) / values.sum()).tolist()  # the rank changes from tau = share + 1e-9 on
        tau = draw.choice(shares) + draw.choice((-0.01, -1e-8, -1e-10, 0, 1e-10, 5e-10, 5e-9, 1e-7, 0.01))
        scale = 10.0 ** draw.randint(-20, 20)
        agree(rank.tau_rank, our_rank.tau_rank, values=scale * values, tau=draw.choice((draw.random(), tau, -tau)))


@task("matthews")
def test_matthews_of_random_labels():
    for draw in draws(100):
        names = np.array(draw.sample(range(-9, 10), draw.randint(1, 7)))
        N = draw.randint(1, 30)
        true, other = [np.array(draw.choices(names, k=N), draw.choice((np.int64, np.int32))) for _ in range(2)]
        predicted = np.where(torch.rand(N).numpy() < draw.random(), true, other)
        agree(metrics.matthews, our_metrics.matthews, predicted=predicted, true=true)


@task("effective_rank")
def test_rank_of_random_matrices():
    for draw in draws(120):
        N, d = draw.choice(((draw.randint(1, 9), draw.randint(1, 9)), (draw.randint(100, 300), draw.randint(1, 30))))
        h = torch.randn(N, d) * torch.logspace(0, -draw.randint(0, 6), d) + draw.choice((0, 3))
        h = (h * draw.choice((0, 1, 5, 1000))).to(draw.choice((*DTYPES, torch.int64)))
        if draw.random() < 0.3:
            h = draw.choice((h[0], h[None], h[:0], h[:, :0], h / 0, h.float() - torch.inf))
        h = draw.choice((h, h.T if h.ndim == 2 else h, h.float().numpy()))
        agree(rank.effective_rank, our_rank.effective_rank, h=h, tau=draw.choice((0.5, 0.9, 0.999, draw.random(), 1)))


@task("relative_bucket")
def test_random_distances():
    for draw in draws(100):
        shape = draw.choice(((), (7,), (3, 4), (2, 3, 3)))
        distance = torch.randint(-300, 300, shape) // draw.choice((1, 5, 40))
        buckets = draw.randint(4, 70)
        agree(maelm.relative_bucket, our_maelm.relative_bucket, distance=distance, num_buckets=buckets,
              max_distance=draw.randint(buckets // 4 + 1, 200))


@task("attention")
def test_attention_of_random_heads():
    for draw in draws():
        B, heads, t, s, d_h = [draw.randint(1, 7) for _ in range(5)]
        dtype, scale = draw.choice(DTYPES), draw.choice((1, 1, 12))  # 12: large logits
        q, k, v = [torch.randn(B, n, heads, d_h).to(dtype).transpose(1, 2) for n in (t, s, s)]
        agree(maelm.attention, our_maelm.attention, q=(scale * q).requires_grad_(), k=k.requires_grad_(),
              v=v.requires_grad_(), bias=some_bias(draw, B, heads, t, s, dtype))


@task("RelativeBias.forward")
def test_biases_of_random_positions():
    for draw in draws():
        config, dtype = some_config(draw), draw.choice(DTYPES)
        mine, ours = twins("RelativeBias", config, draw.randint(1, 5), dtype=dtype)
        positions = torch.randint(config.seq_len, (draw.randint(1, 4), draw.randint(1, 12)))
        agree(mine.forward, ours.forward, positions=draw.choice((positions, positions.sort(1).values)))


@task("Attention.forward")
def test_layers_of_random_sizes():
    for draw in draws():
        (B, t, s, heads, d_h), dtype = [draw.randint(1, 6) for _ in range(5)], draw.choice(DTYPES[:2])
        x, memory = [torch.randn(B, n, heads * d_h, dtype=dtype).requires_grad_() for n in (t, s)]
        memory = draw.choice((None, memory))
        bias = some_bias(draw, B, heads, t, t if memory is None else s, dtype)
        mine, ours = twins("Attention", heads * d_h, heads, 0.3, dtype=dtype)
        agree(mine.forward, ours.forward, x=x, bias=bias, memory=memory)


@task("corrupt")
def test_masks_of_random_texts():
    for draw in draws(80):
        config = some_config(draw, mask_rate=draw.choice((0.02, 0.2, 0.5, 1.0)))
        tokens, (_, masked, _) = some_batch(draw, config)
        masked = torch.where(torch.rand(masked.shape) < draw.choice((0.0, 0.0, 0.05)), masked[:, :1], masked)
        filled = dataclasses.replace(config, encoder_fill="random")

        def apply(module, tokens, masked):
            corrupted, masked, kept = module.apply_masks(tokens, masked, filled, generator(0))
            fill = corrupted.gather(1, masked)
            legal = (fill >= maelm.NUM_SPECIAL) & (fill < config.vocab_size)
            corrupted = corrupted.scatter(1, masked, legal.long())
            return module.apply_masks(tokens, masked, config, generator(0)), corrupted, kept

        def draw_any(module, tokens):
            found = module.corrupt(tokens, config, generator(0))
            expected = our_maelm.apply_masks(tokens, found.masked, config, generator(0))
            same(found.corrupted, expected.corrupted, "of masks that corrupt drew, corrupted")
            same(found.kept, expected.kept, "of masks that corrupt drew, kept")
            return found.masked.shape, bool((tokens.gather(1, found.masked) >= maelm.NUM_SPECIAL).all())

        for function, arguments in ((apply, dict(tokens=tokens, masked=masked)), (draw_any, dict(tokens=tokens))):
            agree(partial(function, maelm), partial(function, our_maelm), **arguments)


@task("Encoder.hidden_states")
def test_states_of_random_texts():
    for draw in draws():
        config, dtype = some_config(draw), draw.choice(DTYPES[:2])
        mine, ours = twins("Encoder", config, dtype=dtype)
        tokens, _ = some_batch(draw, config)
        B, r = tokens.shape
        positions = torch.rand(draw.choice((1, B)), config.seq_len).topk(r).indices
        padding = (torch.rand(B, r) < 0.3).index_fill(1, torch.tensor(0), False)
        at = torch.rand(B, r).topk(draw.randint(1, r)).indices
        agree(mine.hidden_states, ours.hidden_states, tokens=tokens, positions=positions,
              padding=draw.choice((None, padding)), at=draw.choice((None, at)))


@task("MAELM.fill_gaps")
def test_random_gaps():
    for draw in draws():
        config, dtype = some_config(draw), draw.choice(DTYPES)
        mine, ours = twins("MAELM", config)
        _, corruption = some_batch(draw, config)
        h = torch.randn(*corruption.kept.shape, config.encoder_dim, dtype=dtype).requires_grad_()
        agree(mine.fill_gaps, ours.fill_gaps, h=h, corruption=corruption)


@task("MAELM.forward")
def test_losses_of_random_texts():
    for draw in draws():
        mlm = draw.choice(({}, {}, maelm.ABLATIONS["mlm"]))
        config = some_config(draw, **mlm)
        mine, ours = twins("MAELM", config, dtype=draw.choice(DTYPES))
        tokens, corruption = some_batch(draw, config)
        agree(mine.forward, ours.forward, tokens=tokens, corruption=corruption)
