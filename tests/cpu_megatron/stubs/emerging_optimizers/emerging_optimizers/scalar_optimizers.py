import torch


class Lion(torch.optim.Optimizer):
    """The state layout of NVIDIA's package: one `exp_avg` per parameter, no step."""

    def __init__(self, params, lr, betas, weight_decay):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(state["exp_avg"].lerp(p.grad, 1 - b1).sign_(), alpha=-group["lr"])
                state["exp_avg"].lerp_(p.grad, 1 - b2)
