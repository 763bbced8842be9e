"""Context parallelism: which rank holds which tokens, and self-attention over tokens that are spread out.

Any number of tokens works: each rank holds equally many rows; what is left over at the end is padding, whose keys no
query sees and whose results are cut off. Text is never split.
B batch, L tokens of the clip, N tokens of this rank, H heads of this rank, D head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from kernels.attention import attention
from kernels.ring_attention import ring_attention
from models.errors import ModelError
from models.parallel.collectives import all_gather, gather_blocks, order_of
from models.parallel.layout import GATHER_LIMIT_BYTES
from models.parallel.mesh import Axis

Attend = Callable[[Tensor, Tensor, Tensor, float | None, int | None], tuple[Tensor, Tensor]]
AttentionKind = Literal["ring", "gather"]
ATTENTIONS: dict[str, AttentionKind | None] = {"ring": "ring", "gather": "gather", "auto": None}


class TokenSplit(nn.Module):
    """Where a clip's tokens live.

    Context rank c holds rows c * N .. (c + 1) * N of the padded sequence. With a `sequence` axis (sequence parallelism
    inside tensor parallelism) each of its ranks holds an equal part of those N between the sublayers.
    The rank's place is data (a buffer) and no constant, so that all ranks trace the same graph; so is `order`, where
    gathered blocks arrive (see `collectives.order_of`).
    """

    place: Tensor
    part: Tensor
    order: Tensor | None

    def __init__(self, context: Axis, sequence: Axis | None = None, device: torch.device | None = None) -> None:
        super().__init__()
        self.context, self.sequence = context, sequence
        place = torch.tensor(context.index, dtype=torch.int32, device=device)
        part = torch.tensor(sequence.index if sequence else 0, dtype=torch.int32, device=device)
        self.register_buffer("place", place, persistent=False)
        self.register_buffer("part", part, persistent=False)
        self.register_buffer("order", order_of(context, device), persistent=False)

    def local_tokens(self, num_tokens: int) -> int:
        """N: rows of one context rank, padding included."""
        parts = self.sequence.size if self.sequence else 1
        return -(-num_tokens // (self.context.size * parts)) * parts

    def scatter(self, x_BLW: Tensor) -> Tensor:
        """[B, L, W] -> this rank's rows between sublayers, [B, N, W] ([B, N / tp, W] with a sequence axis)."""
        rows = self._rows(x_BLW.shape[1])
        if self.sequence:
            share = rows.shape[0] // self.sequence.size
            rows = rows.view(self.sequence.size, share).index_select(0, self.part.view(1)).view(share)
        return x_BLW.index_select(1, rows)

    def scatter_rope(self, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Cosines and sines [L, D / 2] by global position -> those of this context rank's tokens, [N, D / 2]."""
        cos_LD, sin_LD = rope
        rows = self._rows(cos_LD.shape[0])
        return cos_LD.index_select(0, rows), sin_LD.index_select(0, rows)

    def gather(self, x_BLW: Tensor, num_tokens: int) -> Tensor:
        """Each rank's rows back to [B, L, W] with L = num_tokens; the padding is cut off."""
        if self.sequence:
            x_BLW = all_gather(x_BLW, self.sequence, dim=1)
        return all_gather(x_BLW, self.context, dim=1, order=self.order)[:, :num_tokens]

    def valid_tokens(self, num_tokens: int) -> Tensor | None:
        """[1] int32: how many of this context rank's rows are no padding; None when the clip has no padding at all."""
        local = self.local_tokens(num_tokens)
        if local * self.context.size == num_tokens:
            return None
        return (num_tokens - self.place * local).clamp(0, local).view(1)

    def _rows(self, num_tokens: int) -> Tensor:
        """[N] int32: the token of each row of this context rank; padding repeats the last token, finite and unseen."""
        local = self.local_tokens(num_tokens)
        own = torch.arange(local, dtype=torch.int32, device=self.place.device) + self.place * local
        return own.clamp_max(num_tokens - 1)


@dataclass(frozen=True, slots=True)
class SpreadAttention:
    """Self-attention of a rank's queries to the keys of the whole clip, in place of `kernels.attention.attention`.

    `kind` is decided per clip size when it is None (`auto`), by the bytes of one layer's gathered keys and values: a
    rule of shapes alone, so all ranks decide alike. Both kinds are exact.
    """

    tokens: TokenSplit
    pairs: tuple[int, ...]
    kind: AttentionKind | None

    def __call__(
        self,
        q_BNHD: Tensor,
        k_BNHD: Tensor,
        v_BNHD: Tensor,
        scale: float | None = None,
        k_valid: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """[B, N, H, D] each, `k_valid` = tokens of the clip -> out [B, N, H, D] and log-sum-exp [B, H, N] float32."""
        axis = self.tokens.context
        num_tokens = k_BNHD.shape[1] * axis.size if k_valid is None else k_valid
        if axis.is_trivial:
            return attention(q_BNHD, k_BNHD, v_BNHD, scale, num_tokens)
        kind = self.kind or choose(2 * k_BNHD.numel() * k_BNHD.element_size() * axis.size)
        if kind == "gather":
            blocks = gather_blocks(torch.stack((k_BNHD, v_BNHD)), axis, self.tokens.order)
            k, v = torch.cat(blocks, dim=2).unbind()
            return attention(q_BNHD, k, v, scale, num_tokens)
        valid = self.tokens.valid_tokens(num_tokens)
        return ring_attention(q_BNHD, k_BNHD, v_BNHD, axis.group_name, self.pairs, scale, valid)


def choose(gathered_bytes: int) -> AttentionKind:
    """What `auto` means for one layer's gathered keys and values of this size."""
    return "gather" if gathered_bytes <= GATHER_LIMIT_BYTES else "ring"


def attention_kind(name: str) -> AttentionKind | None:
    """The setting `attention` as a kind, None for auto; raises ModelError("unsupported")."""
    if name not in ATTENTIONS:
        raise ModelError("unsupported", f"attention {name!r} is unknown; choose one of {', '.join(ATTENTIONS)}")
    return ATTENTIONS[name]
