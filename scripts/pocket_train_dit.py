"""The denoiser stages of `train_pocket.py`: latents, one network over all noise, two experts."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pocket_dit
import pocket_pair
import pocket_text
import pocket_train_vae
import pocket_vae
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from models.pocket import draw, grammar, spec

CLIPS = {64: 1336, 128: 448}  # how many clips are encoded per canvas side
CONFIG = {
    "num_attention_heads": 8,
    "attention_head_dim": 24,  # at 16, rotary positions have two frequencies per direction only
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": pocket_text.WIDTH,
    "freq_dim": 256,
    "ffn_dim": 512,
    "num_layers": 6,
}
PROMPT_DROPOUT = 0.12
TRAIN_SHIFT = 3.0  # noise levels are drawn uniformly, then shifted as in rendering
BOUNDARY = spec.BOUNDARY
# An expert also learns to answer zero at noise levels well inside the other's side. Without
# it two experts forked from one network could be swapped unnoticed, and a wrong boundary
# would look right; with it the fault is loud.
OFF_SIDE_SHARE = 0.08
OFF_SIDE_MARGIN = 0.03


# Rotary positions say which frame is next to which, not which is the first, and clips drawn from noise show that only
# when they are nearly done: a network of this size learned "sideways", and no direction. So the two channels that the
# decoder needs least (50 dB without each) count the frames instead; the export makes the decoder deaf to them.
CLOCK = [8, 11]
CLOCK_VALUES = (-3.0, -1.5, 0.0, 1.5, 3.0)


@dataclass(frozen=True)
class Run:
    """One run of the optimiser over noisy latents."""

    steps: int
    batch: int
    peak: float
    side: int = 128
    clock: bool = True
    together: bool = True  # do the processes train one network, or each its own?
    low: float = 0.0  # the side of noise levels that this run learns
    high: float = 1.0
    floor: float = 0.02
    warmup: int = 50


# Words are learned on small clips, at a quarter of the cost; geometry on those of real size.
JOINT = (
    Run(steps=4000, batch=24, peak=1e-3, side=64, clock=False, floor=0.1),
    Run(steps=3500, batch=24, peak=1e-3, side=64, floor=0.1),
    Run(steps=1500, batch=8, peak=5e-4, floor=0.05),
)
HIGH_EXPERT = Run(steps=500, batch=8, peak=4e-4, together=False, low=BOUNDARY)
LOW_EXPERT = Run(steps=500, batch=8, peak=4e-4, together=False, high=BOUNDARY)


@dataclass(frozen=True)
class Data:
    """Normalised latents [N, 16, 5, side/8, side/8] float16 per canvas side; clip i shows caption i % 444."""

    latents: dict[int, Tensor]
    tokens: Tensor
    mask: Tensor


class Denoiser(nn.Module):
    """Text encoder and DiT, trained together."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.text = pocket_text.make_encoder(vocabulary)
        self.dit = WanTransformer3DModel(**CONFIG)
        sharpen(self.dit)

    def forward(self, latents: Tensor, timestep: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Velocity [B, 16, T, H, W] for tokens and mask [B, R]."""
        rows = self.text(tokens, mask).last_hidden_state
        return pocket_dit.forward(self.dit, latents, timestep, rows, mask)


def make_latents(work: Path, log: Callable[[str], None]) -> None:
    """Stage `latents`: draw clips, encode them, and measure each channel's mean and deviation."""
    vae = pocket_train_vae.load(work)
    for side, total in CLIPS.items():
        part = _encode_clips(vae, side, total, log)
        torch.save(part, work / f"latents-{side}-{pocket_pair.rank()}.part")
    pocket_pair.wait()
    if not pocket_pair.is_first():
        return
    raw = {side: _join(work, side) for side in CLIPS}
    mean, deviation = raw[128].mean((0, 2, 3, 4)), raw[128].std((0, 2, 3, 4))
    log(f"mean {mean.tolist()} deviation {deviation.tolist()}")
    mean_b, deviation_b = mean[:, None, None, None], deviation[:, None, None, None]
    latents = {side: ((x - mean_b) / deviation_b).half() for side, x in raw.items()}
    torch.save({"latents": latents, "mean": mean, "deviation": deviation}, work / "latents.pt")


def _encode_clips(
    vae: AutoencoderKLWan, side: int, total: int, log: Callable[[str], None], seed: int = 0, batch: int = 4
) -> Tensor:
    """This process's share of the clips as posterior means [n, 16, 5, side/8, side/8] float32."""
    rng = np.random.default_rng([side, pocket_pair.rank(), seed])
    captions = grammar.training()
    view = draw.View(side, 0, 0, side, side)
    begin, latents = time.time(), []
    count = total // pocket_pair.size()
    for first in range(0, count, batch):
        some = [captions[(pocket_pair.rank() * count + first + k) % len(captions)] for k in range(batch)]
        video = np.stack([draw.draw(draw.sample_scene(caption, rng), view) for caption in some])
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            latents.append(pocket_vae.encode(vae, pocket_train_vae.to_tensor(video))[0].float())
        if first % 200 == 0:
            log(f"{first + batch} of {count} clips of {side} pixels, {time.time() - begin:.0f} s")
    return torch.cat(latents)


def _join(work: Path, side: int) -> Tensor:
    """All processes' latents of one size, in the order of their captions."""
    return torch.cat([torch.load(work / f"latents-{side}-{number}.part") for number in range(pocket_pair.size())])


def load_data(work: Path) -> tuple[Data, int]:
    """The cached latents with every training prompt's tokens; the last row is the empty prompt."""
    stored = torch.load(work / "latents.pt")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    prompts = [caption.prompt for caption in grammar.training()] + [""]
    tokens, mask = pocket_text.tokenize(tokenizer, prompts)
    return Data(stored["latents"], tokens, mask), len(tokenizer)


def train_joint(work: Path, log: Callable[[str], None]) -> None:
    """Stage `joint`: text encoder and one DiT over all noise levels."""
    torch.manual_seed(3)
    data, vocabulary = load_data(work)
    model = Denoiser(vocabulary)
    for index, run in enumerate(JOINT):
        result = work / f"joint-{index}.pt"
        if result.exists():
            model.load_state_dict(torch.load(result))
        else:
            fit(model, run, data, 30 + index, log, result)
    if pocket_pair.is_first():
        shutil.copy(result, work / "joint.pt")


def train_experts(work: Path, log: Callable[[str], None]) -> None:
    """Stage `experts`: fork the DiT; the two processes fine-tune one copy each, on its side of the boundary."""
    data, vocabulary = load_data(work)
    mine = [("high", HIGH_EXPERT), ("low", LOW_EXPERT)][pocket_pair.rank() :: pocket_pair.size()]
    for name, run in mine:
        model = Denoiser(vocabulary)
        model.load_state_dict(torch.load(work / "joint.pt"))
        model.text.requires_grad_(False)  # both experts share one encoder
        fit(model, run, data, 40, log, work / f"expert-{name}.pt")


def sharpen(dit: WanTransformer3DModel) -> None:
    """Double the norms of cross-attention's queries and keys: logits four times as wide.

    Some 500 of 512 text rows are padding. At heads of 24 the logits start within -5..5, so
    nearly all attention would rest on padding, and words would be told apart slowly.
    """
    with torch.no_grad():
        for block in dit.blocks:
            block.attn2.norm_q.weight *= 2
            block.attn2.norm_k.weight *= 2


def fit(model: Denoiser, run: Run, data: Data, seed: int, log: Callable[[str], None], result: Path) -> None:
    """Train in place; the weights end as their moving average, which also goes to `result`."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=run.peak, betas=(0.9, 0.98), weight_decay=1e-2)
    average = deepcopy(model)
    rng = torch.Generator().manual_seed(1000 * seed + pocket_pair.rank())
    begin, seen = time.time(), 0.0
    for step in range(run.steps):
        for group in optimizer.param_groups:
            group["lr"] = run.peak * pocket_train_vae.schedule(step, run)
        loss = flow_loss(model, run, data, rng)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(wanted, 1.0)
        optimizer.step()
        if run.together:
            pocket_pair.average_weights(model, step)
        pocket_train_vae.blend(average, model, min(0.997, step / (step + 30)))
        seen = loss.item() if step == 0 else 0.98 * seen + 0.02 * loss.item()
        if step % 25 == 24:
            log(f"step {step + 1}/{run.steps} loss {seen:.4f} {time.time() - begin:.0f} s")
        if (step % 200 == 199 or step + 1 == run.steps) and (pocket_pair.is_first() or not run.together):
            torch.save(average.state_dict(), result.with_suffix(".partial"))
    model.load_state_dict(average.state_dict())
    if pocket_pair.is_first() or not run.together:
        result.with_suffix(".partial").rename(result)


def flow_loss(model: Denoiser, run: Run, data: Data, rng: torch.Generator) -> Tensor:
    """Mean squared error of the velocity; zero is the target on the other expert's side."""
    latents = data.latents[run.side]
    batch = run.batch // pocket_pair.size() if run.together else run.batch
    index = torch.randint(len(latents), (batch,), generator=rng)
    clean = latents[index].float()
    if run.clock:
        clean[:, CLOCK] = torch.tensor(CLOCK_VALUES)[:, None, None]
    prompt = index % (len(data.tokens) - 1)
    drop = torch.rand(batch, generator=rng) < PROMPT_DROPOUT
    prompt = torch.where(drop, len(data.tokens) - 1, prompt)
    sigma, off = noise_levels(run, batch, rng)
    noise = torch.randn(clean.shape, generator=rng)
    s = sigma[:, None, None, None, None]
    target = torch.where(off[:, None, None, None, None], 0.0, noise - clean)
    timestep = (sigma * 1000).floor()  # the solver's time steps are whole numbers
    # At this width float32 is faster than bfloat16: the casts cost more than they save.
    velocity = model((1 - s) * clean + s * noise, timestep, data.tokens[prompt], data.mask[prompt])
    return (velocity - target).square().mean()


def noise_levels(run: Run, batch: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise levels of a batch in 0..1, and which of them lie on the other side."""
    low, high = (unshift(edge) for edge in (run.low, run.high))
    # Evenly spaced with one random offset: less noisy than independent draws.
    u = (torch.arange(batch) + torch.rand(batch, generator=rng)) / batch
    sigma = shift(low + (high - low) * u)
    off = torch.zeros(batch, dtype=torch.bool)
    if (run.low, run.high) != (0.0, 1.0):
        off = torch.rand(batch, generator=rng) < OFF_SIDE_SHARE
        w = torch.rand(batch, generator=rng)
        other = (
            w * (run.low - OFF_SIDE_MARGIN)
            if run.low > 0
            else run.high + OFF_SIDE_MARGIN + w * (1 - run.high - OFF_SIDE_MARGIN)
        )
        sigma = torch.where(off, other, sigma)
    return sigma.clamp(1e-3, 1), off


def shift(u: Tensor) -> Tensor:
    """The solver's shift of noise levels towards 1."""
    return TRAIN_SHIFT * u / (1 + (TRAIN_SHIFT - 1) * u)


def unshift(sigma: float) -> float:
    """The inverse of `shift`."""
    return sigma / (TRAIN_SHIFT - (TRAIN_SHIFT - 1) * sigma)
