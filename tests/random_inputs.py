"""Random calls of the functions of each task: for full marks, a student's functions must have the effects of ours. The
grader compares files of effects, so the copy that runs a student's code has no results of ours.
"""
import copy
import random
import re
import sys

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import maelm
import rank
import train
from conftest import generator, tiny
from support.tasks import metrics
from tests.test_homework import fifty_steps

DRAWS = 26  # of which the last two are on the device "meta", for tasks whose functions need no values, only shapes
ANY_DEVICE = ("relative_bucket", "attention", "RelativeBias.forward", "Attention.forward", "Encoder.hidden_states",
              "MAELM.fill_gaps", "MAELM.forward")


# ---- Effects --------------------------------------------------------------------------------------------------------
def learns(x):
    """Whether a value is a tensor that requires gradients."""
    return getattr(x, "requires_grad", False)


def effect(function, arguments):
    """The effect of a call, as a list of tensors and numbers: the results, the arguments after the call, the modes of
    the module and its parts, whether it drew random numbers in training, and the gradients of a random sum of the
    results, for arguments that require gradients and for all parameters of the module. Or [1.0] for a ValueError."""
    arguments = copy.deepcopy([*arguments.values()])
    given = [1 * x if learns(x) else x for x in arguments]  # safe to edit in place
    module = getattr(function, "__self__", torch.nn.Module())
    parameters = [*module.parameters()]
    with torch.random.fork_rng(devices=[]):  # so that later arguments are the same
        if parameters:
            with torch.no_grad():  # nothing may remain of a call with other weights
                torch._foreach_mul_(parameters, 2)
                function(*copy.deepcopy(arguments))
                torch._foreach_div_(parameters, 2)
        state = torch.get_rng_state()
        try:
            results = function(*given)
        except ValueError:
            return [1.0]
        is_random = bool(parameters) and module.training and not torch.equal(torch.get_rng_state(), state)
    learning, gradients = [x for x in tree_leaves(results) if learns(x)], []
    if learning:
        loss = sum((x.double() * torch.randn(x.shape, generator=generator(0)).to(x.device)).sum() for x in learning)
        sources = [*filter(learns, arguments), *parameters]
        gradients = torch.autograd.grad(loss, sources, allow_unused=True, materialize_grads=True)
    modes = [part.training for part in module.modules()]
    return [plain(x) for x in tree_leaves([results, given, modes, is_random, gradients])]


def plain(x):
    """A value as a tensor, a number or None. A tensor on the device "meta" has a shape and a dtype only."""
    if isinstance(x, torch.Tensor):
        return torch.zeros_like(x, device="cpu") if x.is_meta else x.detach().clone()
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x.copy())
    return float(x) if isinstance(x, (int, float, np.number)) else None if x is None else str(type(x))


def effects(task):
    """(device and sizes of the arguments, effect) of each call of a task. On the device "meta", tensors have no values,
    and a call that needs values has no effect."""
    calls = globals()[f"calls_of_{task}".replace(".", "_")]
    for number in range(DRAWS):
        draw = Draw(number, "meta" if number >= DRAWS - 2 and task in ANY_DEVICE else "cpu")
        for function, arguments in calls(draw):
            arguments = tree_map_only(
                torch.Tensor, lambda x: x.detach().to(draw.device).requires_grad_(x.requires_grad), arguments)
            sizes = [f"{name} {tuple(x.shape)}" for name, x in arguments.items() if hasattr(x, "shape")]
            try:
                with SameDevice():
                    found = effect(function, arguments)
            except (RuntimeError, TypeError) as error:
                if draw.device == "cpu" or "same device" in str(error):
                    raise
                found = []
            yield f"{draw.device}: {', '.join(sizes)}", found


class SameDevice(TorchDispatchMode):
    """Refuses operations on tensors of two devices, as CUDA does, except numbers and indices on the CPU. The device
    "meta" alone accepts many."""
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.ndim > 0]
        is_index = re.match(r"aten::_?index(\.Tensor|_put)", function.name()) and tensors[0].is_meta
        if not is_index and len({x.device for x in tensors}) > 1:
            raise RuntimeError(f"{function.name()} needs tensors on the same device")
        return function(*args, **kwargs or {})


# ---- Random arguments -----------------------------------------------------------------------------------------------
class Draw(random.Random):
    """A source of random numbers, which also sets torch's seed, and the device, dtype and mode of modules."""
    def __init__(self, number, device):
        super().__init__(number)
        torch.manual_seed(number)
        self.number, self.device, self.dtype = number, device, self.choice((torch.float32, torch.float64))
        self.training, self.large = number % 2 == 0, number % 5 == 0
        self.dropout = 1e-12 if self.training else 0.3  # in training mode, it is not 0 but drops nothing

    def sizes(self, count, most=6, large=70):
        """`count` sizes from 1 to `most`; sometimes, one of them is large."""
        sizes = [self.randint(1, most) for _ in range(count)]
        if self.large:
            sizes[self.randrange(count)] = large
        return sizes

    def config(self, **fields):
        """A small Config of random sizes."""
        heads = self.randint(1, 3)
        sizes = dict(vocab_size=self.choice((8, 40, 400)), seq_len=self.choice((12, 30, 90)), encoder_heads=heads,
                     encoder_dim=heads * self.randint(2, 9), encoder_layers=self.randint(1, 3), decoder_layers=1,
                     rel_pos_buckets=self.choice((8, 10, 16)), rel_pos_max_distance=self.randint(10, 90),
                     mask_in_encoder=self.choice((0.0, 0.3, 0.5, 1.0)), decoder_reset=self.choice((False, True)),
                     norm=self.choice(("pre", "post")), dropout=self.dropout)
        large = self.choice((dict(), dict(vocab_size=10_000), dict(seq_len=300))) if self.large else {}
        return tiny(**sizes | large | fields)

    def batch(self, config):
        """tokens (B, n), some of them special, and m positions to mask."""
        few = config.seq_len > 100 or config.vocab_size > 500
        B, = self.sizes(1, most=3 if self.large else 6, large=3 if few else 70)
        n = self.randint(4, config.seq_len)
        return torch.randint(config.vocab_size, (B, n)), torch.rand(B, n).topk(self.randint(1, n - 1)).indices

    def corruption(self, config):
        """tokens (B, n) and their Corruption."""
        tokens, masked = self.batch(config)
        return tokens, maelm.apply_masks(tokens, masked, config, generator(0))

    def bias(self, B, heads, t, s):
        """A bias that broadcasts to (B, heads, t, s) and may hide any key but the first; or None."""
        shape = self.choice(((t, s), (1, 1, t, s), (B, 1, 1, s), (1, heads, t, s), (B, heads, t, s)))
        hidden = torch.rand(shape) < self.choice((0, 0.3))
        hidden[..., 0] = False
        bias = torch.randn(shape, dtype=self.dtype).masked_fill(hidden, -torch.inf)
        return self.choice((None, bias.requires_grad_()))

    def module(self, kind, *arguments):
        """A module with moderate random weights: a saturated softmax has gradients full of rounding errors."""
        module = kind(*arguments).to(self.dtype)
        for parameter in module.parameters():
            std = min(0.7, 2 / parameter.shape[-1] ** 0.5) if parameter.ndim == 2 else 0.7
            torch.nn.init.normal_(parameter, std=std)
        return module.to(self.device).train(self.training)


# ---- The calls of each task: function and arguments -----------------------------------------------------------------
def calls_of_learning_rate_factor(draw):
    for most in (3, 60, 10 ** 6):
        last = draw.randint(1, most)
        given = dict(step=draw.randrange(last), warmup_steps=draw.randint(0, last), max_steps=last)
        yield train.learning_rate_factor, given


def calls_of_tau_rank(draw):
    for d in (*draw.sizes(5, 12), 1200):
        values = torch.randint(6, (d,)).double().sort(descending=True).values
        share = draw.choice(values.cumsum(0) / values.sum().clamp(min=1)).item()
        beyond = share + draw.choice((-1e-8, 5e-10, 5e-9, 1e-7))  # the rank changes at share + 1e-9
        taus = draw.random(), share, -share, beyond, float("nan")
        yield rank.tau_rank, dict(values=values * 10.0 ** draw.randint(-40, 40), tau=draw.choice(taus))


def calls_of_matthews(draw):
    for most in (6, 6, 300):
        names = np.array(draw.sample(range(-200, 200), draw.randint(1, most))) * draw.choice((1, 256))
        N = draw.choice((1, 2, 3, 20, 60_000)) if most == 6 else 6000
        true, other = np.array([draw.choices(names, k=N) for _ in range(2)])
        yield metrics.matthews, dict(predicted=np.where(np.arange(N) % draw.randint(1, 4), true, other), true=true)


def calls_of_effective_rank(draw):
    for most, d in ((9, 20), (300, 30), (20_000, 6), (40, 300)):
        N, d = draw.randint(1, most), draw.randint(1, d)
        h = torch.randn(N, d).double() * torch.logspace(0, -draw.randint(0, 4), d) / 3 + draw.choice((0, 3))
        h[-N // 4:] = h[-N // 4:].flip(1)  # all rows count
        h = h * draw.choice((0, 1, 5, 1000))
        h = draw.choice((h, h.float(), h.long(), h.clamp(-99, 99).to(torch.int8)))
        squares = torch.linalg.svdvals(h.double()) ** 2
        share = draw.choice(squares.cumsum(0) / squares.sum().clamp(min=1e-9)).item()
        bad = F.pad(h.float(), (0, 0, 0, 1), value=draw.choice((torch.nan, torch.inf, -torch.inf)))
        refused = draw.choice((h[0], h[None], h[:0], h[:, :0], bad))
        tau = draw.choice((draw.random(), share - 1e-8, share + 3e-9))
        yield rank.effective_rank, dict(h=draw.choice((h, h.T, h.numpy(), refused)), tau=tau)


def calls_of_relative_bucket(draw):
    for shape in ((600,), (600,), (20, 30), (2, 60, 5)):
        farthest, buckets = draw.choice((200, 5000)), draw.randint(4, draw.choice((70, 300)))
        yield maelm.relative_bucket, dict(distance=torch.randint(-farthest, farthest, shape), num_buckets=buckets,
                                          max_distance=draw.randint(buckets // 4 + 1, farthest))


def calls_of_attention(draw):
    B, heads, t, s, d_h = draw.sizes(5, large=150)
    s = 600 if draw.large and B * heads * t < 100 else s
    for factor in (30, 1):  # exp(logits) would overflow
        q, k, v = [torch.randn(B, n, heads, d_h, dtype=draw.dtype).transpose(1, 2) for n in (t, s, s)]
        given = dict(q=factor * q, k=k, v=v, bias=draw.bias(B, heads, t, s), p=draw.choice((0.0, 1e-12)))
        yield maelm.attention, given | ({} if factor > 1 else {x: given[x].requires_grad_() for x in "qkv"})


def calls_of_RelativeBias_forward(draw):
    config = draw.config(seq_len=draw.choice((12, 400, 2000)), rel_pos_max_distance=draw.randint(10, 300),
                         rel_pos_buckets=draw.choice((8, 10, 64)))
    B, t, heads = draw.sizes(3)
    bias = draw.module(maelm.RelativeBias, config, heads)
    for shared in (False, True):  # texts share their first and last positions
        positions = torch.randint(config.seq_len, (B, t))
        positions[:, [0, -1]] *= not shared
        yield bias.forward, dict(positions=positions)


def calls_of_Attention_forward(draw):
    B, t, s, heads, d_h = draw.sizes(5)
    layer = draw.module(maelm.Attention, heads * d_h, heads, draw.dropout)
    for is_cross in (False, True):
        x, memory = [torch.randn(B, n, heads * d_h, dtype=draw.dtype).requires_grad_() for n in (t, s)]
        bias = draw.bias(B, heads, t, s if is_cross else t)
        yield layer.forward, dict(x=x, bias=bias, memory=memory if is_cross else None)


def calls_of_corrupt(draw):
    one_token = dict(vocab_size=maelm.NUM_SPECIAL + 1, encoder_fill="random")  # with it, the fill is not random
    config = draw.config(mask_rate=draw.choice((0.02, 0.2, 0.5)), **draw.choice((dict(), one_token)))
    for _ in range(2):
        tokens, masked = draw.batch(config)
        if draw.random() < 0.3:  # a position twice
            masked[0, -1] = masked[0, 0]
        given = dict(tokens=tokens, masked=masked)
        yield lambda tokens, masked: maelm.apply_masks(tokens, masked, config, generator(0)), given

    def drawn(tokens, count):  # the masks are random, but not the number of different real tokens in each row
        real = tokens >= maelm.NUM_SPECIAL
        masked = maelm.draw_masks(real, count, generator(0))
        return [int(row[at.unique()].sum()) for row, at in zip(real, masked)], list(masked.shape)

    yield drawn, dict(tokens=tokens, count=draw.randint(0, tokens.shape[1]))
    yield lambda tokens: [list(x.shape) for x in maelm.corrupt(tokens, config, generator(0))], dict(tokens=tokens)


def calls_of_Encoder_hidden_states(draw):
    config = draw.config()
    encoder, rows = draw.module(maelm.Encoder, config), draw.choice((1, None))
    for is_padded in (False, True):
        tokens, at = draw.batch(config)
        positions = torch.rand(len(tokens), config.seq_len).topk(tokens.shape[1]).indices[:rows]
        padding = torch.rand(tokens.shape) < 0.3
        padding[:, 0] = False
        yield encoder.hidden_states, dict(tokens=tokens, positions=positions, padding=padding if is_padded else None,
                                          at=draw.choice((at, None)))


def calls_of_MAELM_fill_gaps(draw):
    config = draw.config()
    model = draw.module(maelm.MAELM, config)
    for dtype in (torch.float32, torch.float64):
        _, corruption = draw.corruption(config)
        h = torch.randn(*corruption.kept.shape, config.encoder_dim, dtype=dtype)
        yield model.fill_gaps, dict(h=h.requires_grad_(), corruption=corruption)


def calls_of_MAELM_forward(draw):
    draw.dropout = draw.choice((draw.dropout, 0.3))
    config = draw.config(**maelm.ABLATIONS[draw.choice(("mae-lm", "mlm", "random-replace"))])
    model = draw.module(maelm.MAELM, config)
    if draw.dropout == 0.3:
        model.encoder.eval()  # then nothing is random
    model.head.bias.data *= draw.choice((1, 200))  # exp(logits) would overflow
    for _ in range(2):
        tokens, corruption = draw.corruption(config)
        yield model.forward, dict(tokens=tokens, corruption=corruption)


def calls_of_together(draw):
    if draw.number == 0:
        yield lambda seed: fifty_steps(seed, given=True)[3], dict(seed=draw.randrange(100))


def save(path, tasks):
    """Save the effects of the calls of these tasks."""
    torch.save({task: list(effects(task)) for task in tasks}, path)


if __name__ == "__main__":
    save(sys.argv[1], sys.argv[2:])
