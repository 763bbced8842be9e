"""Ring attention by a constant bound, and the repetition of a forward whose rows it lost.

On Trainium the constant bound saves the passes of a running maximum (docs/kernels.md), but on late steps it can lie so
far above a row's scores that all of its probabilities underflow. Each layer counts such rows. After the forward the
host adds the counts of all layers and ranks; unless the sum is zero, the same forward runs again with the true
maximum. What comes out is right for any input; only the time differs.
B batch, N tokens of this rank, H heads of this rank, D head width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernels.ring_attention import ring_attention
from kernels.ring_attention_constmax import key_norm, ring_attention_constmax
from models.parallel.collectives import all_reduce
from models.parallel.mesh import Axis

ValidTokens = Callable[[int], Tensor | None]


class BoundedAttention(nn.Module):
    """Self-attention to the keys of a ring by the constant bound; `exact` turns on the true maximum.

    num_underflowed: [1] int32, the rows (query, head) of this rank that the last forward lost in this layer.
    """

    num_underflowed: Tensor

    def __init__(
        self, axis: Axis, pairs: tuple[int, ...], valid_tokens: ValidTokens, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.axis, self.pairs, self.valid_tokens = axis, pairs, valid_tokens
        self.exact = False
        self.register_buffer("num_underflowed", torch.zeros(1, dtype=torch.int32, device=device), persistent=False)

    def forward(
        self,
        q_BNHD: Tensor,
        k_BNHD: Tensor,
        v_BNHD: Tensor,
        scale: float | None = None,
        k_valid: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[B, N, H, D] each, `k_valid` = tokens of the clip -> out [B, N, H, D]; log-sum-exp only when exact."""
        valid = self.valid_tokens(k_BNHD.shape[1] * self.axis.size if k_valid is None else k_valid)
        if self.exact:
            return ring_attention(q_BNHD, k_BNHD, v_BNHD, self.axis.group_name, self.pairs, scale, valid)
        norm_BH = all_reduce(key_norm(k_BNHD, valid), self.axis, "max")
        out, count = ring_attention_constmax(
            q_BNHD, k_BNHD, v_BNHD, norm_BH, self.axis.group_name, self.pairs, scale, valid
        )
        self.num_underflowed.copy_(count)
        return out, None


class Repetition:
    """Runs a model's evaluation again with the true maximum where the bound lost rows on any rank.

    Args:
        layers: the bounded attentions of the model, in order.
        world: the axis of all ranks of the replica; all decide alike.
    """

    def __init__(self, layers: Sequence[BoundedAttention], world: Axis) -> None:
        self.layers, self.world = list(layers), world
        self.underflowed: list[int] = [0] * len(self.layers)  # of the last forward, per layer, over all ranks
        self.num_repeated = 0

    def run(self, evaluate: Callable[[], Any]) -> Any:
        """What `evaluate` returns, from a second run of it with the true maximum where the bound lost rows.

        It may run all layers or some of them. Host code: it stands between graphs, never inside one.
        """
        for layer in self.layers:
            layer.num_underflowed.zero_()  # of layers that do not run now
        out = evaluate()
        counts = torch.cat([layer.num_underflowed for layer in self.layers])
        self.underflowed = [int(count) for count in all_reduce(counts, self.world)]
        if not any(self.underflowed):
            return out
        self.num_repeated += 1
        self._set_exact(exact=True)
        try:
            return evaluate()
        finally:
            self._set_exact(exact=False)

    def _set_exact(self, *, exact: bool) -> None:
        for layer in self.layers:
            layer.exact = exact
