"""Latents to uint8 frames, a few at a time, in one of three modes.

exact: strips with shrinking halos, the numbers of the untiled decode. reference: the untiled decode. tiled: blended
tiles as other engines make them, approximate. Nothing switches between them but the caller.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from models.errors import ModelError
from models.parallel.mesh import Mesh
from models.vae.exact import exact_slabs
from models.vae.group import AxisGroup, Serial, StripGroup, buffered
from models.vae.model import Decoder, Encoder
from models.vae.spec import VaeSpec
from models.vae.strips import Plan, make_plan, plan_strips
from models.vae.tiled import TilePlan, plan_tiles, tiled_slabs
from models.vae.weights import load_parts

MODES = ("exact", "tiled", "reference")


@dataclass(frozen=True, slots=True)
class Vae:
    """A loaded autoencoder; the encoder is there if it was asked for."""

    spec: VaeSpec
    decoder: Decoder
    encoder: Encoder | None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which it computes."""
        return self.decoder.conv_in.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.decoder.conv_in.weight.device

    def raw_latents(self, latents: Tensor) -> Tensor:
        """Normalised float32 [C, T, h, w] -> [1, C, T, h, w] on the checkpoint's scale, in the model's dtype."""
        mean, std = self._statistics(latents)
        return (latents * std + mean).unsqueeze(0).to(self.device, self.dtype)

    def normalised(self, latents: Tensor) -> Tensor:
        """The inverse of `raw_latents` for means [1, C, T, h, w]: float32 [C, T, h, w] on the CPU."""
        wide = latents[0].float().cpu()
        mean, std = self._statistics(wide)
        return (wide - mean) / std

    def plan(self, mode: str, height: int, width: int) -> Plan | TilePlan:
        """How frames of height x width latents are decoded; raises ModelError("unsupported") for an unknown mode."""
        if mode == "exact":
            return make_plan(self.spec, height, width)
        if mode == "reference":
            return replace(plan_strips(self.spec, height, width, 1), mode="reference")
        if mode == "tiled":
            return plan_tiles(self.spec, height, width)
        raise ModelError("unsupported", f"decode mode {mode!r} is unknown; choose one of {', '.join(MODES)}")

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        pair = (self.spec.latents_mean, self.spec.latents_std)
        mean, std = (torch.tensor(values, dtype=like.dtype).view(-1, 1, 1, 1) for values in pair)
        return mean, std


def load_vae(folder: Path, dtype: torch.dtype, device: torch.device | None = None, *, with_encoder: bool = True) -> Vae:
    """The autoencoder of a diffusers `vae` folder, on `device` (the CPU if none is given).

    Raises ModelError("checkpoint" or "unsupported").
    """
    spec, decoder, encoder = load_parts(folder, dtype, with_encoder=with_encoder)
    target = device or torch.device("cpu")
    return Vae(spec, decoder.to(target), None if encoder is None else encoder.to(target))


def compile_parts(vae: Vae, compile_graph: Callable[[Callable[..., Any], str], Callable[..., Any]]) -> None:
    """Let graphs stand in place of the decoder's two parts and of the encoder; (what is traced, its name) -> graph."""
    parts = [(vae.decoder, "front"), (vae.decoder, "rear"), *([(vae.encoder, "forward")] if vae.encoder else [])]
    for module, name in parts:
        traced = getattr(module, name)
        graph = compile_graph(traced, f"vae_{'encoder' if name == 'forward' else name}")
        if graph is not traced:
            setattr(module, name, graph)


def to_uint8(frames: Tensor) -> Tensor:
    """Frames [1, 3, f, H, W] in about -1..1 -> uint8 [f, H, W, 3] on the CPU: the one place where rounding is.

    As diffusers' image processor: x / 2 + 0.5 clamped to 0..1, times 255, rounded half to even, in float32.
    """
    wide = frames[0].float().mul(0.5).add_(0.5).clamp_(0.0, 1.0).mul_(255.0).round_()
    return wide.to(torch.uint8).permute(1, 2, 3, 0).contiguous().cpu()


def _unrounded(frames: Tensor) -> Tensor:
    return frames[0].permute(1, 2, 3, 0).contiguous().cpu()


def decode_stream(
    vae: Vae, latents: Tensor, mode: str = "exact", mesh: Mesh | None = None, plan: Plan | None = None
) -> Iterator[npt.NDArray[np.uint8]]:
    """Normalised latents float32 [C, T, h, w] -> slabs uint8 [f, H, W, 3] in the order of time, on rank 0 of the mesh.

    All ranks of the mesh call it with the same latents and iterate to the end; the others get no slab. Only the exact
    mode with more than one strip is shared among them. plan: an exact plan instead of the one of this size. Raises
    ModelError: "unsupported" (mode), "nonfinite".
    """
    chosen = plan or vae.plan(mode, latents.shape[2], latents.shape[3])
    if mesh is not None and isinstance(chosen, Plan) and min(mesh.world.size, len(chosen.strips)) > 1:
        group = AxisGroup(mesh.world, chosen.shares(mesh.world.size))
        slabs = buffered(_slabs(vae, latents, chosen, group, to_uint8))
    elif mesh is None or mesh.is_first:
        slabs = _slabs(vae, latents, chosen, Serial(), to_uint8)
    else:
        return
    for slab in slabs:
        array = slab.numpy()
        array.flags.writeable = False
        yield array


def decode_frames(vae: Vae, latents: Tensor, mode: str = "exact", plan: Plan | None = None) -> Iterator[Tensor]:
    """As `decode_stream` on one rank, before rounding: [1, 3, f, H, W] in the model's dtype, not clamped; for tests.

    plan: an exact plan instead of the one of this size.
    """
    chosen = plan or vae.plan(mode, latents.shape[2], latents.shape[3])
    for slab in _slabs(vae, latents, chosen, Serial(), _unrounded):
        yield slab.permute(3, 0, 1, 2).unsqueeze(0)


def _slabs(
    vae: Vae, latents: Tensor, plan: Plan | TilePlan, group: StripGroup, finish: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    raw = vae.raw_latents(latents)
    if isinstance(plan, TilePlan):
        return tiled_slabs(vae.decoder, raw, plan, finish)
    return exact_slabs(vae.decoder, raw, plan, group, finish, torch.uint8 if finish is to_uint8 else vae.dtype)
