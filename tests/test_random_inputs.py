"""Claims that only the grader runs: a function and our solution agree on arguments of random sizes, values and dtypes.

When the grader runs, our solutions are in a folder of their own. Otherwise each function is compared with itself.
"""
import copy
import random
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map

import maelm
import rank
import train
from conftest import generator, tiny
from support.tasks import metrics

PLACE = "solutions." if find_spec("solutions") else ""
our_maelm, our_rank, our_train = [import_module(PLACE + name) for name in ("maelm", "rank", "train")]
our_metrics = import_module(PLACE + "support.tasks.metrics")
task = pytest.mark.task
DTYPES = (torch.float32, torch.float64)


def outcome(function, arguments):
    """The effect of a call: the results, the arguments after the call, and the gradients of a random sum of the results
    with respect to arguments that require gradients and to all parameters of the function's module. Or a ValueError."""
    arguments = copy.deepcopy(arguments)
    sources = {name: x for name, x in arguments.items() if getattr(x, "requires_grad", False)}
    given = arguments | {name: 1 * x for name, x in sources.items()}  # copies, safe to edit in place
    try:
        results = function(*given.values())
    except ValueError:
        return {"ValueError": True}
    if hasattr(function, "__self__"):
        sources |= dict(function.__self__.named_parameters())
    gradients = {}
    learning = [x for x in tree_leaves(results) if getattr(x, "requires_grad", False)]
    if learning:
        loss = sum((x.double() * torch.randn(x.shape, generator=generator(0))).sum() for x in learning)
        found = torch.autograd.grad(loss, sources.values(), allow_unused=True, materialize_grads=True)
        gradients = dict(zip(sources, found))
    numbers = tree_map(lambda x: float(x) if isinstance(x, (int, float)) else x, results)  # 1 is as good as 1.0
    return {"result": numbers, "argument after the call": given, "gradient": gradients}


def agree(function, ours, **arguments):
    """Fails unless a function and our solution do the same with these arguments, up to rounding."""
    found, expected = outcome(function, arguments), outcome(ours, arguments)
    try:
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    except AssertionError as error:  # in one line, for the grade
        sizes = tree_map(lambda x: tuple(x.shape) if hasattr(x, "shape") else x, arguments)
        raise AssertionError(f"with arguments of sizes {sizes}: {' '.join(str(error).split())}") from None


# ---- Random arguments -----------------------------------------------------------------------------------------------
def draws(count=40):
    """Sources of random numbers; each also sets the seed of torch."""
    for seed in range(count):
        torch.manual_seed(seed)
        yield random.Random(seed)


def some_config(draw, **fields):
    """A small Config of random sizes."""
    heads = draw.randint(1, 3)
    sizes = dict(vocab_size=draw.choice((8, 40, 400)), seq_len=draw.choice((12, 30, 90)), encoder_heads=heads,
                 encoder_dim=heads * draw.randint(2, 9), encoder_layers=draw.randint(1, 3), decoder_layers=1,
                 rel_pos_buckets=draw.choice((8, 10, 16)), rel_pos_max_distance=draw.randint(10, 90),
                 mask_in_encoder=draw.choice((0.0, 0.3, 0.5, 1.0)), decoder_reset=draw.choice((False, True)))
    return tiny(norm=draw.choice(("pre", "post")), dropout=0.3, **sizes | fields)


def some_batch(draw, config):
    """Tokens (B, n), some of them special, and their corruption."""
    B, n = draw.randint(1, 5), draw.randint(4, config.seq_len)
    tokens = torch.randint(config.vocab_size, (B, n))
    masked = torch.rand(B, n).topk(draw.randint(1, n - 1)).indices
    return tokens, our_maelm.apply_masks(tokens, masked, config, generator(0))


def some_bias(draw, B, heads, t, s, dtype):
    """A bias that broadcasts to (B, heads, t, s) and may hide any key but the first; or None."""
    shape = draw.choice(((t, s), (1, 1, t, s), (B, 1, 1, s), (1, heads, t, s), (B, heads, t, s)))
    bias = torch.randn(shape, dtype=dtype)
    hidden = torch.rand(bias.shape) < draw.choice((0, 0.3))
    hidden[..., 0] = False
    return draw.choice((None, bias.masked_fill(hidden, -torch.inf).requires_grad_()))


def twins(draw, kind, *arguments):
    """A student's module and ours with the same random weights, in evaluation mode."""
    dtype = draw.choice(DTYPES)
    mine, ours = [getattr(module, kind)(*arguments).to(dtype).eval() for module in (maelm, our_maelm)]
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    mine.load_state_dict(ours.state_dict())
    return mine, ours


# ---- One claim per task ---------------------------------------------------------------------------------------------
@task("learning_rate_factor")
def test_random_schedules():
    for draw in draws(200):
        last = draw.randint(1, draw.choice((3, 60, 1000)))
        agree(train.learning_rate_factor, our_train.learning_rate_factor, step=draw.randrange(last),
              warmup_steps=draw.randint(0, last), max_steps=last)


@task("tau_rank")
def test_rank_of_random_values():
    for draw in draws(200):
        values = torch.randint(6, (draw.randint(1, 12),)).double().sort(descending=True).values
        share = draw.choice(values.cumsum(0) / values.sum().clamp(min=1)).item()
        beyond = share + draw.choice((-1e-8, 5e-10, 5e-9, 1e-7))  # the rank changes at share + 1e-9
        taus = draw.random(), share, -share, beyond
        agree(rank.tau_rank, our_rank.tau_rank, values=values * 10.0 ** draw.randint(-20, 20), tau=draw.choice(taus))


@task("matthews")
def test_matthews_of_random_labels():
    for draw in draws(100):
        names = np.array(draw.sample(range(-9, 10), draw.randint(1, 6))) * draw.choice((1, 256))
        N = draw.choice((1, 2, 3, 20))
        true, other = np.array([draw.choices(names, k=N) for _ in range(2)])
        predicted = np.where(np.arange(N) % draw.randint(1, 4), true, other)
        agree(metrics.matthews, our_metrics.matthews, predicted=predicted, true=true)


@task("effective_rank")
def test_rank_of_random_matrices():
    for draw in draws(120):
        N, d = draw.choice((9, 30, 300)), draw.randint(1, 30)
        h = torch.randn(N, d).double() * torch.logspace(0, -draw.randint(0, 4), d) / 3 + draw.choice((0, 3))
        h = (h * draw.choice((0, 1, 5, 1000))).to(draw.choice((*DTYPES, torch.int64)))
        squares = torch.linalg.svdvals(h.double()) ** 2
        share = draw.choice(squares.cumsum(0) / squares.sum().clamp(min=1e-9)).item()
        refused = draw.choice((h[0], h[None], h[:0], h[:, :0], F.pad(h.float(), (0, 0, 0, 1), value=torch.nan)))
        agree(rank.effective_rank, our_rank.effective_rank, h=draw.choice((h, h.T, h.numpy(), refused)),
              tau=draw.choice((draw.random(), share - 1e-8, share + 3e-9)))


@task("relative_bucket")
def test_random_distances():
    for draw in draws(300):
        buckets = draw.randint(4, 70)
        distance = torch.arange(-300, 300).view(draw.choice(((600,), (20, 30), (2, 60, 5))))
        agree(maelm.relative_bucket, our_maelm.relative_bucket, distance=distance, num_buckets=buckets,
              max_distance=draw.randint(buckets // 4 + 1, 200))


@task("attention")
def test_attention_of_random_heads():
    for draw in draws():
        B, heads, t, s, d_h = [draw.randint(1, 7) for _ in range(5)]
        dtype = draw.choice(DTYPES)
        q, k, v = [torch.randn(B, n, heads, d_h, dtype=dtype).transpose(1, 2) for n in (t, s, s)]
        q = q * draw.choice((1, 30))  # 30 makes exp(logits) overflow
        agree(maelm.attention, our_maelm.attention, q=q.requires_grad_(), k=k.requires_grad_(), v=v.requires_grad_(),
              bias=some_bias(draw, B, heads, t, s, dtype))


@task("RelativeBias.forward")
def test_biases_of_random_positions():
    for draw in draws():
        config = some_config(draw, seq_len=draw.choice((12, 400)), rel_pos_max_distance=draw.randint(10, 300))
        mine, ours = twins(draw, "RelativeBias", config, draw.randint(1, 5))
        positions = torch.randint(config.seq_len, (draw.randint(1, 4), draw.randint(1, 12)))
        agree(mine.forward, ours.forward, positions=positions)


@task("Attention.forward")
def test_layers_of_random_sizes():
    for draw in draws():
        B, t, s, heads, d_h = [draw.randint(1, 6) for _ in range(5)]
        mine, ours = twins(draw, "Attention", heads * d_h, heads, 0.3)
        dtype = ours.query.weight.dtype
        x, memory = [torch.randn(B, n, heads * d_h, dtype=dtype).requires_grad_() for n in (t, s)]
        memory = draw.choice((None, memory))
        bias = some_bias(draw, B, heads, t, t if memory is None else s, dtype)
        agree(mine.forward, ours.forward, x=x, bias=bias, memory=memory)


@task("corrupt")
def test_masks_of_random_texts():
    for draw in draws(80):
        config = some_config(draw, mask_rate=draw.choice((0.02, 0.2, 0.5)))
        tokens, (_, masked, _) = some_batch(draw, config)
        masked[0] = draw.choice((masked[0], masked[0, 0]))  # the latter repeats one position
        agree(lambda *given: maelm.apply_masks(*given, config, generator(0)),
              lambda *given: our_maelm.apply_masks(*given, config, generator(0)), tokens=tokens, masked=masked)

        real, n = tokens >= maelm.NUM_SPECIAL, tokens.shape[1]
        few, m = draw.randint(0, n), config.num_masked(n)
        for count, function in ((few, lambda: maelm.draw_masks(real, few, generator(0))),
                                (m, lambda: maelm.corrupt(tokens, config, generator(0)).masked)):
            if 0 < count <= real.sum(1).min():
                masked = function()
                found = [int(row[positions.unique()].sum()) for row, positions in zip(real, masked)]
                right = found == [count] * len(tokens) and masked.shape[1] == count
                assert right, f"{tuple(masked.shape)} has {found} different maskable positions, not {count} of {n}"
            else:
                with pytest.raises(ValueError):
                    function()


@task("Encoder.hidden_states")
def test_states_of_random_texts():
    for draw in draws():
        config = some_config(draw)
        mine, ours = twins(draw, "Encoder", config)
        tokens, (_, at, _) = some_batch(draw, config)
        positions = torch.rand(draw.choice((1, len(tokens))), config.seq_len).topk(tokens.shape[1]).indices
        padding = torch.rand(tokens.shape) < 0.3
        padding[:, 0] = False
        agree(mine.hidden_states, ours.hidden_states, tokens=tokens, positions=positions,
              padding=draw.choice((None, padding)), at=draw.choice((None, at)))


@task("MAELM.fill_gaps")
def test_random_gaps():
    for draw in draws():
        config = some_config(draw)
        mine, ours = twins(draw, "MAELM", config)
        _, corruption = some_batch(draw, config)
        h = torch.randn(*corruption.kept.shape, config.encoder_dim, dtype=draw.choice(DTYPES))
        agree(mine.fill_gaps, ours.fill_gaps, h=h.requires_grad_(), corruption=corruption)


@task("MAELM.forward")
def test_losses_of_random_texts():
    for draw in draws():
        config = some_config(draw, **draw.choice(({}, maelm.ABLATIONS["mlm"])))
        mine, ours = twins(draw, "MAELM", config)
        tokens, corruption = some_batch(draw, config)
        agree(mine.forward, ours.forward, tokens=tokens, corruption=corruption)
