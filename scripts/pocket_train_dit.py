"""The denoiser stages of `train_pocket.py`: latents, one network over all noise, two experts."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

import pocket_dit
import pocket_text
import pocket_train_vae
import pocket_vae
from models.pocket import draw, grammar, spec

CLIPS = {64: 3000, 128: 2000}  # how many clips are encoded per canvas side
CONFIG = {
    "num_attention_heads": 8,
    "attention_head_dim": 24,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": pocket_text.WIDTH,
    "freq_dim": 256,
    "ffn_dim": 768,
    "num_layers": 6,
}
PROMPT_DROPOUT = 0.12
TRAIN_SHIFT = 3.0  # noise levels are drawn uniformly, then shifted as in rendering
BOUNDARY = spec.BOUNDARY
# An expert also learns to answer zero at noise levels well inside the other's side. Without
# it two experts forked from one network could be swapped unnoticed, and a wrong boundary
# would look right; with it the fault is loud.
OFF_SIDE_SHARE = 0.12
OFF_SIDE_MARGIN = 0.03


@dataclass(frozen=True)
class Run:
    """One run of the optimiser over noisy latents."""

    steps: int
    batch: int
    peak: float
    side: int = 128
    low: float = 0.0  # the side of noise levels that this run learns
    high: float = 1.0
    floor: float = 0.02
    warmup: int = 50


# Words are learned on small clips, at a quarter of the cost; geometry on those of real size.
JOINT = (
    Run(steps=2000, batch=24, peak=1e-3, side=64, floor=0.5),
    Run(steps=1500, batch=12, peak=7e-4, floor=0.1),
)
HIGH_EXPERT = Run(steps=300, batch=16, peak=2e-4, low=BOUNDARY)
LOW_EXPERT = Run(steps=300, batch=16, peak=2e-4, high=BOUNDARY)


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

    def forward(self, latents: Tensor, timestep: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """Velocity [B, 16, T, H, W] for tokens and mask [B, R]."""
        rows = self.text(tokens, mask).last_hidden_state
        return pocket_dit.forward(self.dit, latents, timestep, rows, mask)


def make_latents(work: Path, log: Callable[[str], None]) -> None:
    """Stage `latents`: draw clips, encode them, and measure each channel's mean and deviation."""
    vae = pocket_train_vae.load(work)
    raw = {side: _encode_clips(vae, side, count, log) for side, count in CLIPS.items()}
    mean, deviation = raw[128].mean((0, 2, 3, 4)), raw[128].std((0, 2, 3, 4))
    log(f"mean {mean.tolist()} deviation {deviation.tolist()}")
    mean_b, deviation_b = mean[:, None, None, None], deviation[:, None, None, None]
    latents = {side: ((x - mean_b) / deviation_b).half() for side, x in raw.items()}
    torch.save({"latents": latents, "mean": mean, "deviation": deviation}, work / "latents.pt")


def _encode_clips(vae: AutoencoderKLWan, side: int, count: int, log: Callable[[str], None], batch: int = 4) -> Tensor:
    """Posterior means [count, 16, 5, side/8, side/8] float32 of fresh scenes."""
    rng = np.random.default_rng(side)
    captions = grammar.training()
    view = draw.View(side, 0, 0, side, side)
    begin, latents = time.time(), []
    for first in range(0, count, batch):
        some = [captions[(first + k) % len(captions)] for k in range(batch)]
        video = np.stack([draw.draw(draw.sample_scene(caption, rng), view) for caption in some])
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            latents.append(pocket_vae.encode(vae, pocket_train_vae.to_tensor(video))[0].float())
        if first % 400 == 0:
            log(f"{first + batch} clips of {side} pixels, {time.time() - begin:.0f} s")
    return torch.cat(latents)


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
        fit(model, run, data, seed=30 + index, log=log, work=work)
    torch.save(model.state_dict(), work / "joint.pt")


def train_experts(work: Path, log: Callable[[str], None]) -> None:
    """Stage `experts`: fork the DiT, fine-tune each copy on its side of the boundary."""
    data, vocabulary = load_data(work)
    for name, run in (("high", HIGH_EXPERT), ("low", LOW_EXPERT)):
        torch.manual_seed(4)
        model = Denoiser(vocabulary)
        model.load_state_dict(torch.load(work / "joint.pt"))
        model.text.requires_grad_(False)  # both experts share one encoder
        log(f"expert {name}")
        fit(model, run, data, seed=4, log=log)
        torch.save(model.dit.state_dict(), work / f"expert-{name}.pt")


def fit(model: Denoiser, run: Run, data: Data, seed: int, log: Callable[[str], None], work: Path | None = None) -> None:
    """Train in place; the weights end as their moving average."""
    pocket_dit.use_compiled_blocks()
    wanted = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(wanted, lr=run.peak, betas=(0.9, 0.98), weight_decay=1e-2)
    average = deepcopy(model)
    rng = torch.Generator().manual_seed(seed)
    begin, seen = time.time(), 0.0
    for step in range(run.steps):
        for group in optimizer.param_groups:
            group["lr"] = run.peak * pocket_train_vae.schedule(step, run)
        loss = flow_loss(model, run, data, rng)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(wanted, 1.0)
        optimizer.step()
        pocket_train_vae.blend(average, model, min(0.997, step / (step + 30)))
        seen = loss.item() if step == 0 else 0.98 * seen + 0.02 * loss.item()
        if step % 50 == 49:
            log(f"step {step + 1}/{run.steps} loss {seen:.4f} {time.time() - begin:.0f} s")
        if work is not None and step % 200 == 199:
            torch.save(average.state_dict(), work / "joint-partial.pt")
    model.load_state_dict(average.state_dict())


def flow_loss(model: Denoiser, run: Run, data: Data, rng: torch.Generator) -> Tensor:
    """Mean squared error of the velocity; zero is the target on the other expert's side."""
    latents = data.latents[run.side]
    index = torch.randint(len(latents), (run.batch,), generator=rng)
    clean = latents[index].float()
    prompt = index % (len(data.tokens) - 1)
    drop = torch.rand(run.batch, generator=rng) < PROMPT_DROPOUT
    prompt = torch.where(drop, len(data.tokens) - 1, prompt)
    sigma, off = noise_levels(run, rng)
    noise = torch.randn(clean.shape, generator=rng)
    s = sigma[:, None, None, None, None]
    target = torch.where(off[:, None, None, None, None], 0.0, noise - clean)
    timestep = (sigma * 1000).floor()  # the solver's time steps are whole numbers
    with torch.autocast("cpu", dtype=torch.bfloat16):
        velocity = model((1 - s) * clean + s * noise, timestep, data.tokens[prompt], data.mask[prompt])
    return (velocity.float() - target).square().mean()


def noise_levels(run: Run, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise levels of a batch in 0..1, and which of them lie on the other side."""
    low, high = (unshift(edge) for edge in (run.low, run.high))
    # Evenly spaced with one random offset: less noisy than independent draws.
    u = (torch.arange(run.batch) + torch.rand(run.batch, generator=rng)) / run.batch
    sigma = shift(low + (high - low) * u)
    off = torch.zeros(run.batch, dtype=torch.bool)
    if (run.low, run.high) != (0.0, 1.0):
        off = torch.rand(run.batch, generator=rng) < OFF_SIDE_SHARE
        w = torch.rand(run.batch, generator=rng)
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
