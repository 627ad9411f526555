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
    """Jordan et al., 2024. Faster than torch.optim.Muon, which always uses bf16 and updates one matrix at a time. Each
    parameter of a group holds `parts` matrices, one above the other."""
    def __init__(self, groups: list[dict], lr: float, weight_decay: float, dtype: torch.dtype):
        super().__init__(groups, dict(lr=lr, weight_decay=weight_decay, momentum=0.95))
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        """Take one step. Every parameter needs a gradient."""
        for group in self.param_groups:
            by_shape = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
            for (rows, columns), parameters in by_shape.items():
                self.update(parameters, rows // group["parts"], columns, group)

    def update(self, parameters: list, rows: int, columns: int, group: dict):
        """Update parameters of equal shape, which hold matrices (rows, columns)."""
        gradients = [parameter.grad for parameter in parameters]
        momentum = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(momentum, gradients, 1 - group["momentum"])
        nesterov = torch.stack(torch._foreach_lerp(gradients, momentum, group["momentum"]))
        update = orthogonalize(nesterov.view(-1, rows, columns), self.dtype).to(nesterov.dtype).view_as(nesterov)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        scale = max(1, rows / columns) ** 0.5  # larger steps for tall matrices
        torch._foreach_add_(parameters, list(update), alpha=-group["lr"] * scale)


def take_step(optimizers: list[torch.optim.Optimizer], factor: float):
    """Take a step at a fraction of the rates with which the groups were made, and clear the gradients."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            peak = group.setdefault("peak", group["lr"])  # here, so that it works for every optimizer
            group["lr"] = factor * peak
        optimizer.step()
        optimizer.zero_grad()


def split_parameters(model: MAELM) -> tuple[list[dict], list]:
    """Muon's groups, which hold the matrices of the layers, and all other parameters. W^K stands above W^V."""
    single, double, rest = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim != 2 or ".blocks." not in name:
            rest.append(parameter)
        elif name.endswith("key_value.weight"):
            double.append(parameter)
        else:
            single.append(parameter)
    return [{"params": single, "parts": 1}, {"params": double, "parts": 2}], rest
