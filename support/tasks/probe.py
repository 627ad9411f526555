"""Linear probes: how well a linear model reads the labels of a task from the vectors of a frozen encoder."""
import torch
import torch.nn.functional as F
from torch import nn

from support.tasks.batches import by_length, in_order
from support.tasks.encoder import last_states
from support.tasks.results import DIVERGED, FIRST_SEED, scores, write_predictions
from support.tasks.setup import Setup
from support.tasks.types import Encoded

FOLDS = 5  # of the training split, to choose the regularization
STRENGTHS = [10.0 ** (k / 2) for k in range(-2, 7)]  # to choose from


@torch.no_grad()
def vectors_of(encoder: nn.Module, encoded: Encoded, pooling: str, batch_size: int, device: torch.device):
    """A vector for each input of a split, (N, d) float64 on the CPU: the mean over its tokens, or that at [CLS]."""
    encoder.eval()
    vectors = []
    for tokens, padding, _ in by_length(encoded, batch_size, device):
        h = last_states(encoder, tokens, padding).float()
        if pooling == "cls":
            vectors.append(h[:, 0].cpu())
        else:
            real = (~padding)[:, :, None]
            vectors.append(((h * real).sum(1) / real.sum(1)).cpu())
    return in_order(vectors, encoded).double()


def loss_of(logits, targets):
    """The sum of the cross-entropies of class indices, or of half the squared errors of numbers."""
    if targets.is_floating_point():
        return 0.5 * F.mse_loss(logits[:, 0], targets, reduction="sum")
    return F.cross_entropy(logits, targets, reduction="sum")


def fit(vectors, targets, classes: int, strength: float) -> nn.Linear:
    """The linear model of standardized vectors (N, d) float64 with the lowest loss plus strength / 2 times the squared
    length of its weights, which is also the optimum of scikit-learn's LogisticRegression(C=1 / strength)."""
    mean = vectors.mean(0)
    deviation = vectors.std(0, correction=0).clamp(min=1e-6)
    x = (vectors - mean) / deviation
    y = targets.double() if targets.is_floating_point() else targets
    linear = nn.Linear(x.shape[1], classes, dtype=torch.float64)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=1000, tolerance_grad=1e-7, tolerance_change=1e-12,
                                  history_size=20, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = (loss_of(linear(x), y) + strength / 2 * linear.weight.square().sum()) / len(x)
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():  # the same model of vectors that are not standardized
        linear.weight /= deviation
        linear.bias -= linear.weight @ mean
    return linear.requires_grad_(False)


def errors_of(logits, targets):
    """The number of wrong labels, or the sum of the squared errors of numbers."""
    if targets.is_floating_point():
        return (logits[:, 0] - targets).square().sum()
    return (logits.argmax(1) != targets).sum()


def choose_strength(vectors, targets, classes: int) -> float:
    """The strength of regularization with the fewest errors on held-out folds of the training split."""
    fold = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(0)) % FOLDS
    errors = {}
    for strength in STRENGTHS:
        models = [fit(vectors[fold != k], targets[fold != k], classes, strength) for k in range(FOLDS)]
        errors[strength] = sum(errors_of(models[k](vectors[fold == k]), targets[fold == k]) for k in range(FOLDS))
    return min(errors, key=errors.get)


def probe_once(setup: Setup, tune, seed: int) -> dict:
    """Fit a linear model to the vectors of the frozen encoder of a task; `tune` is a finetune.TuneConfig. Returns its
    value, metrics and strength of regularization. The encoder's ranks do not change, so `ranks` is None."""
    targets = setup.train.targets
    classes = len(setup.kind.labels.names) or 1
    encoder = setup.pretrained.new_encoder(seed).to(setup.worker.device)

    def vectors(encoded):
        return vectors_of(encoder, encoded, setup.frozen, tune.batch_size, setup.worker.device)

    train = vectors(setup.train)
    if not train.isfinite().all():
        return DIVERGED
    strength = tune.l2 or choose_strength(train, targets, classes)
    linear = fit(train, targets, classes, strength)
    outputs = {split: linear(vectors(encoded)) for split, encoded in setup.dev_splits.items()}
    metrics, files = scores(outputs, setup)
    if seed == FIRST_SEED:
        write_predictions(setup.out, files)
    return {"value": metrics[setup.metric], "metrics": metrics, "l2": strength, "ranks": None}
