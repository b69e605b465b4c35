"""Muon: momentum whose update of a matrix is brought near the closest orthogonal one (Jordan et al., 2024).

torch.optim.Muon iterates in bf16 always, which CPUs without bf16 units emulate at a small part of fp32's speed; here the
caller says what the device is fast at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

#: the quintic of the reference implementation: singular values end between about 0.7 and 1.2 after five iterations
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalised(matrix: Tensor, bf16: bool = False) -> Tensor:
    """U V^T of matrix = U S V^T, nearly, in fp32, by Newton-Schulz iterations. matrix: (rows, columns). bf16: of the
    iterations' products, which is precise enough for them (Jordan et al.)."""
    a, b, c = _COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = (x / x.norm().clamp_min(1e-7)).to(torch.bfloat16 if bf16 else torch.float32)
    for _ in range(_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x if wide else x.T).float()


class Muon(torch.optim.Optimizer):
    """For matrices only. rate: of an update whose root mean square is 0.2, as AdamW's is (Liu et al., arXiv 2502.16982)."""

    def __init__(
        self, matrices: Iterable[Tensor], rate: float, weight_decay: float, momentum: float = 0.95, bf16: bool = False
    ) -> None:
        self.bf16 = bf16
        super().__init__(matrices, {"lr": rate, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update from the gradients there are."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state: dict[str, Any] = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                moving = state["momentum"].lerp_(matrix.grad, 1 - group["momentum"])
                update = orthogonalised(matrix.grad.lerp(moving, group["momentum"]), self.bf16)  # Nesterov
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-0.2 * group["lr"] * max(matrix.shape) ** 0.5)
