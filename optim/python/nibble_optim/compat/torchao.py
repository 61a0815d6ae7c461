"""Optimizers of torchao.optim: Adam and AdamW with states of 8 bits, 4 bits and fp8. As there, tensors of less than
4096 elements or of cut blocks have no codes; their states are fp32. CPUOffloadOptimizer steps on the CPU."""
import torch

from . import _attribute as __getattr__, drop_in  # noqa: F401


def _settings(m, v):
    def settings(optimizer, values):
        optimizer._bf16_weights = "bf16:sr" if values.pop("bf16_stochastic_round") else "bf16"
        size = values.pop("block_size", None)
        return dict(m=f"{m}/{size}", v=f"{v}/{size}", min_quantized=(4096, size)) if size else dict(m=m, v=v)
    return settings


_FORMATS = {"8bit": ("dyn8", "udyn8", "block_size=256, "), "4bit": ("de4", "lin4", "block_size=128, "),
            "Fp8": ("e4m3", "e4m3", "block_size=256, "), "": ("fp32", "fp32", "")}
for _base, _rule, _decay in (("Adam", "adam", 0), ("AdamW", "adamw", 1e-2)):
    for _suffix, (_m, _v, _block) in _FORMATS.items():
        _name = _base + _suffix if _suffix else f"_{_base}"
        globals()[_name] = drop_in(
            _name, f"params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay={_decay}, amsgrad=False, *, "
            f"{_block}bf16_stochastic_round=False", _settings(_m, _v), rule=_rule)


class CPUOffloadOptimizer(torch.optim.Optimizer):
    """Keeps copies of the parameters and all states in host memory, pinned, and steps them there."""

    def __init__(self, params, optimizer_class=torch.optim.AdamW, *, offload_gradients=False, minimal_size=4096,
                 **kwargs) -> None:
        super().__init__(params, {})
        hosts = {p: self._host(p) if p.numel() >= minimal_size else p
                 for group in self.param_groups for p in group["params"]}
        self.pairs, self.offloads = [(p, host) for p, host in hosts.items() if p is not host], offload_gradients
        groups = [{**group, "params": [hosts[p] for p in group["params"]]} for group in self.param_groups]
        self.optimizer = optimizer_class(groups, **kwargs)
        self.param_groups = self.optimizer.param_groups
        self.state_dict, self.load_state_dict = self.optimizer.state_dict, self.optimizer.load_state_dict

    @staticmethod
    def _host(p):
        host = torch.empty(p.shape, dtype=p.dtype, pin_memory=p.is_cuda)
        return torch.nn.Parameter(host.copy_(p.detach()), requires_grad=p.requires_grad)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p, host in self.pairs:
            host.grad = None if p.grad is None else p.grad.to("cpu", non_blocking=True)
            p.grad = None if self.offloads else p.grad
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.optimizer.step()
        for p, host in self.pairs:
            p.copy_(host, non_blocking=True)
        return loss

    def zero_grad(self, set_to_none=True):
        for p, _ in self.pairs:
            p.grad = None
        self.optimizer.zero_grad(set_to_none)
