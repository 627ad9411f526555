"""A bank of mistakes that no training run shows, each of which costs points. For an exam, print the functions:

    python -m tests.test_mistakes corrupt attention      # of these tasks
"""
import importlib
import sys
import textwrap

import pytest

import test_maelm
from course.grade import claims_of
from course.homework import HOMEWORK, PARTS, SOLUTIONS
from tests import test_homework

CLAIMS = vars(test_maelm) | vars(test_homework)

MISTAKES = [  # function, correct code, mistake
    ("attention", "d_h ** -0.5", "d_h ** -1"),
    ("attention", "F.dropout(weights, p) @ v", "F.dropout(weights @ v, p)"),
    ("attention", "logits.float().softmax(dim=-1)", "logits.float().softmax(dim=-2)"),
    ("Attention.forward", "self.p if self.training else 0.0", "self.p"),
    ("Attention.forward", "self.output(z.transpose(1, 2).flatten(2))", "self.output(z.flatten(1, 2).view_as(x))"),
    ("Attention.forward", "(self.heads, -1)).transpose(1, 2)", "(-1, self.heads)).permute(0, 3, 1, 2)"),
    ("relative_bucket", "distance > 0", "distance >= 0"),
    ("RelativeBias.forward", "positions[:, None, :] - positions[:, :, None]",
     "positions[:, :, None] - positions[:, None, :]"),
    ("RelativeBias.forward", "positions[:, None, :] - positions[:, :, None]",
     "positions[:1, None, :] - positions[:1, :, None]"),
    ("draw_masks", "torch.rand(maskable.shape, generator=generator, device=maskable.device)",
     "torch.rand(maskable.shape[1:], generator=generator, device=maskable.device).expand(maskable.shape)"),
    ("draw_masks", "torch.rand(maskable.shape, generator=generator, device=maskable.device)",
     "torch.randint(1000, maskable.shape, generator=generator, device=maskable.device) / 1000"),
    ("draw_masks", "largest=False).indices", "largest=False).indices.sort(1).values"),
    ("apply_masks", "m == 0 or ", ""),
    ("apply_masks", "NUM_SPECIAL, config.vocab_size", "0, config.vocab_size"),
    ("apply_masks", "masked[:, :round(config.mask_in_encoder * m)]", "masked[:, :int(config.mask_in_encoder * m)]"),
    ("apply_masks", "tokens.scatter(1, masked", "tokens.scatter_(1, masked"),
    ("corrupt", "tokens >= NUM_SPECIAL", "tokens > NUM_SPECIAL"),
    ("Encoder.hidden_states", "self.dropout(self.norm(h))", "self.norm(self.dropout(h))"),
    ("Encoder.hidden_states", "self.stack(h, positions, padding, at)", "self.stack(h, positions, None, at)"),
    ("Encoder.hidden_states", "self.position_embedding(positions)", "self.position_embedding(positions[:1])"),
    ("MAELM.fill_gaps", "weight[MASK]", "weight[MASK].detach()"),
    ("MAELM.forward", "tokens.gather(1, corruption.masked)", "tokens.gather(1, corruption.masked.sort(1).values)"),
    ("MAELM.forward", "tokens.gather(1, corruption.masked)", "corruption.corrupted.gather(1, corruption.masked)"),
    ("tau_rank", "(tau - 1e-9)", "tau"),
    ("effective_rank", "svdvals(x) ** 2", "svdvals(x)"),
    ("effective_rank", "torch.as_tensor(h).double()", "torch.as_tensor(h).float()"),
    ("learning_rate_factor", "step + 1", "step"),
    ("matthews", "p - p.mean(0)", "p"),
]


def task_of(part):
    """The task of a function."""
    return next(task for task in HOMEWORK if part in PARTS[task])


def replaced(part, old, new):
    """Our function with a mistake."""
    assert old in SOLUTIONS[part], f"{part} has no {old}"
    return SOLUTIONS[part].replace(old, new)


@pytest.mark.parametrize("part, old, new", MISTAKES)
def test_a_mistake_costs_points(part, old, new, monkeypatch):
    task = task_of(part)
    module = importlib.import_module(HOMEWORK[task].removesuffix(".py").replace("/", "."))
    owner, _, name = part.rpartition(".")
    scope = dict(vars(module))
    exec(textwrap.dedent(replaced(part, old, new)), scope)
    monkeypatch.setattr(getattr(module, owner) if owner else module, name, scope[name])
    with pytest.raises((Exception, pytest.fail.Exception)):
        for claim in claims_of(task):
            CLAIMS[claim]()


if __name__ == "__main__":
    for part, old, new in MISTAKES:
        if task_of(part) in (sys.argv[1:] or HOMEWORK):
            print(f"{replaced(part, old, new)}\n\n")
