import torch


def get_muon_scale_factor(rows, columns, mode="spectral"):
    return max(rows, columns) ** 0.5


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """The state layout of NVIDIA's package: one `momentum_buffer` per parameter, no step."""

    def __init__(self, params, lr, momentum, *, nesterov, weight_decay, weight_decay_method,
                 fp32_matmul_prec, scaled_orthogonalize_fn):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(self.orthogonalize(p, state["momentum_buffer"]), alpha=-group["lr"])
