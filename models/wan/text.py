"""Prompts to embeddings, each once per run; and embeddings to what cross-attention takes."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.checkpoint_files import read_json
from models.device import Device
from models.parallel.mesh import Mesh
from models.parallel.tensor import sharding
from models.umt5.model import Umt5Encoder
from models.umt5.parallelize import PLAN, largest_axis, parallelize
from models.umt5.spec import MAX_TOKENS, umt5_spec
from models.umt5.tokenizer import PromptTokenizer
from models.umt5.weights import load_umt5


@dataclass(frozen=True, slots=True, eq=False)
class TextHandle:
    """One encoded prompt.

    id: hex digest of its token ids. num_tokens: before truncation, the end mark included. rows: [n, E] embeddings of
    the n <= 512 tokens that were read, in the model's dtype, on its device; the zero padding after them is not stored.
    """

    id: str
    num_tokens: int
    truncated: bool
    rows: Tensor

    @property
    def num_bytes(self) -> int:
        """Memory of the embeddings."""
        return self.rows.numel() * self.rows.element_size()

    def padded(self) -> Tensor:
        """[512, E]: the embeddings, then zeros."""
        padded = self.rows.new_zeros(MAX_TOKENS, self.rows.shape[1])
        padded[: self.rows.shape[0]] = self.rows
        return padded


class TextEncoder:
    """The text encoder with a cache of its results, least recently used first out, bounded in bytes."""

    def __init__(self, tokenizer: PromptTokenizer, model: Umt5Encoder, device: Device, cache_bytes: int) -> None:
        self.model = model
        self._encode = device.compile(model, "encoder", "text")
        self._tokenizer = tokenizer
        self._device = device
        self._cache_bytes = cache_bytes
        self._cached: OrderedDict[str, TextHandle] = OrderedDict()

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype, device: Device, cache_bytes: int, mesh: Mesh) -> "TextEncoder":
        """Tokenizer and encoder of a checkpoint folder; raises ModelError("checkpoint" or "unsupported")."""
        axis = largest_axis(umt5_spec(read_json(folder / "text_encoder" / "config.json")), mesh)
        model = load_umt5(folder / "text_encoder", dtype, sharding(PLAN, axis)).to(device.torch_device)
        parallelize(model, axis)
        return cls(PromptTokenizer.load(folder / "tokenizer"), model, device, cache_bytes)

    def encode(self, prompt: str, long_prompt: str) -> TextHandle:
        """The prompt's embeddings, new or from the cache; raises ModelError("input") for a long one with "fail".

        Each prompt is encoded alone, so its numbers do not depend on its neighbours.
        """
        tokens = self._tokenizer.encode(prompt, long_prompt)
        key = hashlib.sha256(",".join(map(str, tokens.ids)).encode()).hexdigest()
        cached = self._cached.get(key)
        if cached is None or cached.num_tokens != tokens.num_tokens:
            rows = self._rows(tokens.ids)
            cached = TextHandle(key, tokens.num_tokens, tokens.truncated, rows)
            self._cached[key] = cached
        self._cached.move_to_end(key)
        self._evict()
        return cached

    def _evict(self) -> None:
        total_bytes = sum(handle.num_bytes for handle in self._cached.values())
        while total_bytes > self._cache_bytes and len(self._cached) > 1:
            total_bytes -= self._cached.popitem(last=False)[1].num_bytes

    @torch.inference_mode()
    def _rows(self, ids: tuple[int, ...]) -> Tensor:
        """[n, E]: only the tokens run where shapes are free; all 512, masked, where a shape costs a compilation."""
        num_tokens = len(ids)
        length = MAX_TOKENS if self._device.static_shapes else num_tokens
        padded = torch.zeros(1, length, dtype=torch.int32)
        padded[0, :num_tokens] = torch.tensor(ids)
        mask = None
        if self._device.static_shapes:
            mask = (torch.arange(length) < num_tokens).unsqueeze(0).to(self._device.torch_device)
        buckets = self.model.buckets(length).to(self._device.torch_device)
        out: Tensor = self._encode(padded.to(self._device.torch_device), mask, buckets)
        return out[0, :num_tokens].clone()


def text_rows(handles: Sequence[TextHandle], full: bool) -> int:
    """How many rows `stack_texts` makes of each of these texts: what clips must share to go together."""
    longest = max(handle.rows.shape[0] for handle in handles)
    return MAX_TOKENS if full or longest == MAX_TOKENS else longest + 1


def stack_texts(handles: Sequence[TextHandle], full: bool) -> tuple[Tensor, int]:
    """A batch of texts as (rows [B, S, E], repeats) for `WanTransformer.text_keys`.

    Cross-attention sees 512 rows, those behind the prompt all zero. With `full` they are all there (repeats = 0). Else
    S is the longest text plus one zero row, which stands for the 512 - (S - 1) rows left out.
    """
    longest = max(handle.rows.shape[0] for handle in handles)
    full = full or longest == MAX_TOKENS
    length = MAX_TOKENS if full else longest + 1
    rows = handles[0].rows.new_zeros(len(handles), length, handles[0].rows.shape[1])
    for row, handle in zip(rows, handles, strict=True):
        row[: handle.rows.shape[0]] = handle.rows
    return rows, 0 if full else MAX_TOKENS - longest
