"""Random calls of the functions of each task: for full marks, a student's functions must have the effects of ours.

    TASK=tau_rank pytest tests/random_inputs.py   # in a copy for a student: writes the effects to effects.pt
    python -m tests.random_inputs FOLDER          # of such files, named for tasks -> their first differences, as JSON
"""
import copy
import json
import os
import pickle
import random
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

import maelm
import rank
import train
from conftest import close, generator, tiny
from support.tasks import classification
from tests.test_homework import train_tiny

def learning(values):
    """The tensors among some values that require gradients."""
    return [x for x in tree_leaves(values) if getattr(x, "requires_grad", False)]


def effect(function, arguments):
    """The effect of a call, as a list of tensors and numbers: results; arguments after the call; the module's modes;
    whether it drew random numbers in training, seeded torch or changed the module's buffers; and the gradients of a
    random sum of the results, for arguments and parameters. Or [1.0] for a ValueError."""
    given = tree_map_only(torch.Tensor, torch.clone, arguments)  # no leaves, which could not be edited in place
    module = getattr(function, "__self__", torch.nn.Module())
    parameters = [*module.parameters()]
    names = [*module.state_dict()]
    with torch.random.fork_rng(devices=[]):  # so that later arguments are the same
        torch.manual_seed(12345)
        states = [torch.get_rng_state()]  # of torch's generator, before and after calls
        if parameters:
            with torch.no_grad():  # nothing may remain of calls with other positions or other weights
                torch._foreach_mul_(parameters, 2)
                flip = tree_map_only(torch.Tensor, lambda x: x if x.is_floating_point() else x.flip(-1), arguments)
                function(*copy.deepcopy(flip))
                function(*copy.deepcopy(arguments))
                torch._foreach_div_(parameters, 2)
        states.append(torch.get_rng_state())
        try:
            results = function(*given)
        except ValueError:
            return [1.0]
        states.append(torch.get_rng_state())
        draws = [not torch.equal(*two) for two in zip(states, states[1:]) if parameters and module.training]
        flags = [*draws, torch.initial_seed() == 12345, names == [*module.state_dict()]]
    sums = [(x.double() * torch.randn(x.shape, generator=generator(0)).to(x.device)).sum() for x in learning(results)]
    sources = learning([arguments, parameters])
    gradients = torch.autograd.grad(sums, sources, materialize_grads=True) if sums else []
    return tree_leaves([results, given, [part.training for part in module.modules()], flags, gradients])


def plain(x):
    """A value as a tensor, a number, or the name of its type."""
    if isinstance(x, (torch.Tensor, np.ndarray)):
        return torch.as_tensor(x).detach().clone()
    return float(x) if isinstance(x, (int, float, np.number)) else str(type(x))


def effects(task):
    """(arguments in words, effect) of each call of a task."""
    for number in range(1 if task == "together" else 32):
        function, arguments = call(task, Draw(number))
        words = [f"{name} {tuple(x.shape) if hasattr(x, 'shape') else x}" for name, x in arguments.items()
                 if isinstance(x, (int, float, torch.Tensor, np.ndarray))]
        with nullcontext() if task == "together" else SameDevice():
            found = effect(function, [*arguments.values()])
        yield ", ".join(words), [plain(x) for x in found]


class SameDevice(TorchFunctionMode):
    """Refuses what a GPU would refuse, although all tensors are on the CPU: to combine an argument with a tensor that
    was made without a device, unless the latter is a number or an index, or is copied."""
    def __torch_function__(self, function, types, args=(), kwargs=None):
        name, leaves = function.__name__, tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        lost = [x for x in tensors if getattr(x, "is_lost", False)]
        others = [x for x in tensors if not getattr(x, "is_lost", False)]
        is_free = name in ("copy_", "to", "type_as")
        is_index = name in ("__getitem__", "__setitem__") and not getattr(args[0], "is_lost", False)
        if any(x.ndim for x in lost) and any(x.ndim for x in others) and not (is_free or is_index):
            raise RuntimeError(f"{name} needs tensors on the same device")
        results = function(*args, **kwargs or {})
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor):
                x.is_lost = not others and not any(isinstance(leaf, torch.device) for leaf in leaves)
        return results


def difference(theirs, ours):
    """The first difference between a student's effects, or their file, and ours, in one line; "" if there is none."""
    words = ""
    try:
        theirs = torch.load(theirs, weights_only=True) if isinstance(theirs, Path) else theirs
        for (_, found), (words, expected) in zip(theirs, ours, strict=True):  # noqa: B007
            assert found == [1.0] or expected != [1.0], "a ValueError is expected"
            assert found != [1.0] or expected == [1.0], "a ValueError, although the arguments are allowed"
            for x, y in zip(found, expected, strict=True):
                assert type(x) is type(y), f"{type(x).__name__} instead of {type(y).__name__}"
                if torch.is_tensor(y):
                    finite = y.double().nan_to_num(0, 0, 0).abs().flatten()
                    largest = torch.nn.functional.pad(finite, (0, 1), value=1.0).max().item()
                    close(x, y, rtol=2e-4, atol=2e-4 * largest)
                else:
                    assert x == y or abs(x - y) <= max(1e-9, 2e-4 * abs(y)), f"{x}, not {y}"
    except (AssertionError, RuntimeError, TypeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        return f"with arguments {words}: {' '.join(str(error).split())}"
    return ""


class Draw(random.Random):
    """A source of random numbers, which also sets torch's seed, and the dtype and mode of modules."""
    def __init__(self, number):
        super().__init__(number)
        self.number = number
        torch.manual_seed(number)
        self.dtype = self.choice((torch.float32, torch.float64))
        self.training = number % 2 == 0
        self.large = number % 5 < 2  # whether some sizes are
        self.dropout = 1e-12 if self.training else 0.3  # in training mode, it is not 0 but drops nothing

    def config(self, **fields):
        """A small Config of random sizes."""
        heads = self.randint(1, 3)
        sizes = dict(vocab_size=self.choice((8, 40, 1000)), seq_len=self.choice((12, 30, 90)), encoder_heads=heads,
                     encoder_dim=heads * self.randint(2, 9), encoder_layers=self.randint(1, 3), decoder_layers=1,
                     rel_pos_buckets=self.choice((8, 10, 16)), rel_pos_max_distance=self.randint(10, 90),
                     mask_in_encoder=self.choice((0.0, 0.3, 0.5, 1.0)), decoder_reset=self.choice((False, True)),
                     norm=self.choice(("pre", "post")), dropout=self.dropout)
        return tiny(**sizes | fields)

    def batch(self, config):
        """tokens (B, n), some of them special, and m positions to mask."""
        B = 70 if self.large and config.seq_len == 12 else self.randint(1, 4)
        n = self.randint(4, config.seq_len)
        return torch.randint(config.vocab_size, (B, n)), torch.rand(B, n).topk(self.randint(1, n - 1)).indices

    def bias(self, B, heads, t, s):
        """A bias that broadcasts to (B, heads, t, s) and may hide any key but the first; or None."""
        shape = ((t, s), (1, 1, t, s), (B, 1, 1, s), (1, heads, t, s), (B, heads, t, s))[self.number % 5]
        hidden = (torch.rand(shape) < self.choice((0, 0.3))).index_fill(-1, torch.tensor(0), False)
        bias = torch.randn(shape, dtype=self.dtype).masked_fill(hidden, -torch.inf)
        return self.choice((None, bias.requires_grad_()))

    def module(self, kind, *arguments):
        """A module with moderate random weights: a saturated softmax has gradients full of rounding errors."""
        module = kind(*arguments).to(self.dtype)
        for parameter in module.parameters():
            std = min(0.7, 2 / parameter.shape[-1] ** 0.5) if parameter.ndim == 2 else 0.7
            torch.nn.init.normal_(parameter, std=std)
        return module.train(self.training)


def call(task, draw):
    """A function of a task, or a method of a module, and its arguments by their names."""
    config = draw.config()
    sizes = [70 if draw.large else 2, *draw.choices(range(1, 7), k=4)]
    B, t, s, heads, d_h = draw.sample(sizes, 5)  # in random order
    match task:
        case "learning_rate_factor":
            last = draw.randint(1, draw.choice((3, 60, 10 ** 6)))
            step, warmup = draw.choice((draw.randrange(last), last - 1)), draw.randint(0, last)
            return train.learning_rate_factor, dict(step=step, warmup_steps=warmup, max_steps=last)
        case "tau_rank":
            values = torch.randint(draw.choice((1, 6)), (draw.choice((s, 400)),)).double().sort(descending=True).values
            share = draw.choice(values.cumsum(0) / values.sum().clamp(min=1)).item()
            beyond = share + draw.choice((-1e-8, 5e-10, 5e-9, 5e-9))  # the rank changes at share + 1e-9
            tau = draw.choice((draw.random(), -share, share, beyond, beyond, beyond, beyond, float("nan")))
            return rank.tau_rank, dict(values=values * 10.0 ** draw.randint(-40, 40), tau=tau)
        case "effective_rank":
            N, d = ((9, 20), (300, 30), (5000, 6), (40, 300))[draw.number % 4]
            h = torch.randn(N, d).double() * torch.logspace(0, -draw.randint(0, 4), d) / 3 + draw.choice((0, 3))
            h[-N // 4:] = h[-N // 4:].flip(1) * draw.choice((0, 1, 5, 1000))  # all rows count
            h = draw.choice((h, h.float(), h.long(), h.clamp(-99, 99).to(torch.int8)))
            squares = torch.linalg.svdvals(h.double()) ** 2
            share = draw.choice(squares.cumsum(0) / squares.sum().clamp(min=1e-9)).item()
            bad = h.double().index_fill(1, torch.tensor(0), draw.choice((torch.nan, torch.inf, -torch.inf)))
            h = draw.choice((h, h.T, h.numpy(), draw.choice((h[0], h[None], h[:0], h[:, :0], bad))))
            return rank.effective_rank, dict(h=h, tau=draw.choice((draw.random(), share - 1e-8, share + 3e-9)))
        case "matthews":
            names = np.array(draw.sample(range(-200, 200), draw.choice((1, s, s, 300)))) * draw.choice((1, 256))
            true = np.array(draw.choices(names, k=draw.choice((2, 20, 3000))))
            mixed = np.where(np.arange(len(true)) % draw.randint(1, 4), true, draw.sample([*true], len(true)))
            return classification.matthews, dict(predicted=draw.choice((mixed, 0 * true)), true=true)
        case "relative_bucket":
            farthest, buckets = draw.choice((200, 5000, 70_000)), draw.randint(4, draw.choice((70, 300)))
            distance = torch.randint(-farthest, farthest, draw.choice(((2000,), (20, 30), (2, 60, 5))))
            given = dict(distance=distance, num_buckets=buckets, max_distance=draw.randint(buckets // 4 + 1, farthest))
            return maelm.relative_bucket, given
        case "attention":
            q, k, v = [torch.randn(B, n, heads, d_h, dtype=draw.dtype).transpose(1, 2) for n in (t, s, s)]
            scale = draw.choice((1, 100))  # with 100, exp(logits) would overflow, and gradients be rounding errors
            q, k, v = [x.requires_grad_(scale == 1) for x in (q * scale, k, v)]
            return maelm.attention, dict(q=q, k=k, v=v, bias=draw.bias(B, heads, t, s), p=draw.choice((0.0, 1e-12)))
        case "Attention.forward":
            layer = draw.module(maelm.Attention, heads * d_h, heads, draw.dropout)
            x, memory = [torch.randn(B, n, heads * d_h, dtype=draw.dtype).requires_grad_() for n in (t, s)]
            crossed = dict(x=x, bias=draw.bias(B, heads, t, s), memory=memory)
            return layer.forward, draw.choice((crossed, dict(x=x, bias=draw.bias(B, heads, t, t), memory=None)))
        case "RelativeBias.forward":
            config = draw.config(seq_len=draw.choice((12, 400, 2000)), rel_pos_buckets=draw.choice((8, 10, 64)),
                                 rel_pos_max_distance=draw.randint(20, 300))
            positions = torch.randint(config.seq_len, (B, t))
            positions[:, [0, -1]] *= draw.choice((0, 1))  # texts may share their first and last positions
            return draw.module(maelm.RelativeBias, config, heads).forward, dict(positions=positions)
        case "corrupt":
            one_token = dict(vocab_size=maelm.NUM_SPECIAL + 1, encoder_fill="random")  # then the fill is not random
            config = draw.config(mask_rate=draw.choice((0.02, 0.2, 0.5)), **draw.choice((dict(), one_token)))
            tokens, masked = draw.batch(config)
            masked = draw.choice((masked, masked, masked, masked[:, :0]))
            masked[0, -1:] = masked[0, draw.choice((0, -1, -1)):][:1]  # sometimes, a position twice
            real, m = tokens >= maelm.NUM_SPECIAL, draw.randint(0, 3)
            if m == 1:  # a single maskable token
                real = torch.arange(tokens.shape[1]) == tokens.argmax(1, keepdim=True)
            return draw.choice((
                (lambda x: [list(y.shape) for y in maelm.corrupt(x, config, generator(0))], dict(x=tokens)),
                (lambda real: real.gather(1, maelm.draw_masks(real, m, generator(0))), dict(real=real)),
                (lambda *given: maelm.apply_masks(*given, config, generator(0)), dict(tokens=tokens, masked=masked))))
        case "Encoder.hidden_states":
            tokens, at = draw.batch(config)
            where = torch.rand(draw.choice((1, len(tokens))), config.seq_len).topk(tokens.shape[1]).indices
            hide = torch.rand(tokens.shape) < 0.3
            hide[:, [0, -1]] = False
            given = dict(tokens=tokens, positions=where, padding=draw.choice((hide, None)), at=draw.choice((at, None)))
            return draw.module(maelm.Encoder, config).hidden_states, given
        case "MAELM.fill_gaps":
            corruption = maelm.apply_masks(*draw.batch(config), config, generator(0))
            h = torch.randn(*corruption.kept.shape, config.encoder_dim, dtype=draw.choice((torch.float32, draw.dtype)))
            return draw.module(maelm.MAELM, config).fill_gaps, dict(h=h.requires_grad_(), corruption=corruption)
        case "MAELM.forward":
            ablation = maelm.ABLATIONS[draw.choice(("mae-lm", "mlm", "random-replace"))]
            config = draw.config(**ablation | dict(dropout=draw.choice((draw.dropout, 0.3))))
            model = draw.module(maelm.MAELM, config)
            model.encoder.train(draw.training and config.dropout < 0.3)  # so that nothing is random
            model.head.bias.data *= draw.choice((1, 200))  # exp(logits) would overflow
            tokens, masked = draw.batch(config)
            corruption = maelm.apply_masks(tokens, masked, config, generator(0))
            return model.forward, dict(tokens=tokens, corruption=corruption)
        case "together":
            return lambda seed: train_tiny(seed, 20, given=True)[3], dict(seed=draw.randrange(100))


def test_random_inputs():
    torch.save([*effects(os.environ["TASK"])], "effects.pt")


if __name__ == "__main__":
    paths = Path(sys.argv[1]).iterdir()
    print(json.dumps({path.name: difference(path, effects(path.name)) for path in paths}))
