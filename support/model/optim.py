"""The optimizers: AdamW, and Muon for the matrices of the layers."""
import torch

from maelm import MAELM


def orthogonalize(x, dtype: torch.dtype):
    """Matrices x = U S V^T (B, rows, columns) -> about U V^T, in `dtype`, by the iteration of Jordan et al., 2024."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[1] > x.shape[2]
    y = x.mT.to(dtype) if tall else x.to(dtype)  # multiply along the shorter side
    y = y / y.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    for _ in range(5):
        gram = y @ y.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, gram, y, beta=a)  # a y + b (y y^T) y + c (y y^T)^2 y
    return y.mT if tall else y


class Muon(torch.optim.Optimizer):
    """Jordan et al., 2024. Faster than torch.optim.Muon, which always uses bf16 and updates one matrix at a time."""
    def __init__(self, matrices, lr: float, weight_decay: float, dtype: torch.dtype):
        super().__init__(matrices, dict(lr=lr, weight_decay=weight_decay, momentum=0.95))
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        """Take one step. Every matrix needs a gradient."""
        group, = self.param_groups
        by_shape = {}
        for matrix in group["params"]:
            by_shape.setdefault(matrix.shape, []).append(matrix)
            if matrix not in self.state:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        for (rows, columns), matrices in by_shape.items():
            gradients = [matrix.grad for matrix in matrices]
            momentum = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
            torch._foreach_lerp_(momentum, gradients, 1 - group["momentum"])
            nesterov = torch._foreach_lerp(gradients, momentum, group["momentum"])
            update = orthogonalize(torch.stack(nesterov), self.dtype).to(gradients[0].dtype)
            torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
            scale = max(1, rows / columns) ** 0.5  # larger steps for tall matrices
            torch._foreach_add_(matrices, list(update), alpha=-group["lr"] * scale)


def make_optimizers(model: MAELM, recipe, dtype: torch.dtype) -> list:
    """AdamW and, with recipe.optimizer "muon", Muon in `dtype` for the matrices of the layers."""
    stacks = [part.stack for part in (model.encoder, model.decoder) if part is not None]
    matrices = []
    if recipe.optimizer == "muon":
        matrices = [weight for stack in stacks for weight in stack.blocks.parameters() if weight.ndim == 2]
    chosen = set(matrices)
    rest = [parameter for parameter in model.parameters() if parameter not in chosen]
    adamw = torch.optim.AdamW(rest, lr=recipe.learning_rate, betas=(recipe.adam_beta1, recipe.adam_beta2),
                              eps=recipe.adam_epsilon, weight_decay=recipe.weight_decay, fused=True)
    if not matrices:
        return [adamw]
    return [adamw, Muon(matrices, recipe.muon_learning_rate, recipe.muon_weight_decay, dtype)]
