"""Each component beside the one of diffusers or transformers: same weights, same inputs, relative L2."""

from dataclasses import dataclass

import torch

from models.vae.decode import decode_frames
from models.vae.model import Memory
from models.wan.model import Modulation, Stream
from models.wan.rope import rope_tables
from models.wan.text import stack_texts
from tests.parity.compare import relative
from tests.parity.float64 import float64_reference, lift_module
from tests.parity.reference import NEGATIVE, PROMPT, load_reference

COMPONENT_BOUND = 1e-5
GRID = (3, 8, 12)  # tokens: frames, rows, columns


@dataclass
class Row:
    """One line of the table: distance to the float32 reference, and both sides' error against float64."""

    component: str
    distance: float
    own_error: float
    their_error: float
    bound: float = COMPONENT_BOUND

    @property
    def ok(self):
        """Whether both bounds hold."""
        return self.distance <= self.bound and self.own_error <= 2 * self.their_error + 1e-7


def row(component, ours, theirs, exact):
    """Measure one component."""
    return Row(component, relative(ours, theirs), relative(ours, exact), relative(theirs, exact))


def component_rows(folder, pipeline):
    """The table for one checkpoint; `pipeline` is ours, in float32."""
    with torch.inference_mode():
        theirs = capture_all(load_reference(folder, "unipc", 5.0))
    exact_pipe = load_reference(folder, "unipc", 5.0, torch.float64)
    lift_module(exact_pipe.vae)
    with float64_reference():
        exact = capture_all(exact_pipe)
    with torch.inference_mode():
        ours = our_outputs(pipeline, theirs)
    return [row(name, value, theirs[name], exact[name]) for name, value in ours.items()]


def inputs(dtype):
    """Latents [1, 16, T, h, w] and a timestep, the same numbers in any dtype."""
    frames, rows, columns = GRID
    noise = torch.randn(
        (1, 16, frames, 2 * rows, 2 * columns), generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    return noise.to(torch.float32).to(dtype), torch.tensor([813])


def capture_all(pipe):
    """Outputs of diffusers' components by name; "<name> in" holds what a block was given."""
    dtype = pipe.transformer.dtype
    embeds, _ = pipe.encode_prompt([PROMPT, NEGATIVE], do_classifier_free_guidance=False, max_sequence_length=512)
    found = {"UMT5 encoder, 512 rows": embeds}
    experts = [pipe.transformer] + ([pipe.transformer_2] if pipe.transformer_2 is not None else [])
    for number, model in enumerate(experts):
        found |= capture_expert(model, embeds[:1], *inputs(dtype), f"expert {number}")
    found |= capture_vae(pipe.vae, inputs(dtype)[0][..., :6, :8])
    return found


def capture_expert(model, embeds, latents, timestep, prefix):
    """Outputs of one DiT, of its condition embedder and of each block."""
    found, hooks = {}, []

    def keep_embedder(_module, _arguments, out):
        found[f"{prefix}, timestep"] = out[1]
        found[f"{prefix}, text projection"] = out[2]

    def keep_block(name):
        def keep(_module, arguments, out):
            found[f"{name} in"] = arguments
            found[name] = out

        return keep

    hooks.append(model.condition_embedder.register_forward_hook(keep_embedder))
    for index, block in enumerate(model.blocks):
        hooks.append(block.register_forward_hook(keep_block(f"{prefix}, block {index}")))
    found[f"{prefix}, whole"] = model(latents, timestep, embeds, return_dict=False)[0]
    for hook in hooks:
        hook.remove()
    return found


def capture_vae(vae, latents):
    """Features behind the first up-block and the frames, all frames joined."""
    parts = []
    hook = vae.decoder.up_blocks[0].register_forward_hook(lambda _module, _arguments, out: parts.append(out))
    mean, std = (
        torch.tensor(v, dtype=latents.dtype).view(1, -1, 1, 1, 1)
        for v in (vae.config.latents_mean, vae.config.latents_std)
    )
    frames = vae.decode(latents * std + mean).sample
    hook.remove()
    return {"VAE decoder, first up-block": torch.cat(parts, 2), "VAE decoder, frames": frames}


def our_outputs(pipeline, theirs):
    """Our components on the same inputs; blocks get what diffusers' blocks got."""
    handles = pipeline.text([PROMPT, NEGATIVE])
    found = {"UMT5 encoder, 512 rows": torch.stack([handle.padded() for handle in handles])}
    for number, stage in enumerate(pipeline.experts.folders):
        found |= our_expert(pipeline.experts.model(stage), handles[0], theirs, f"expert {number}")
    return found | our_vae(pipeline.vae, inputs(torch.float32)[0][0, ..., :6, :8])


def our_expert(model, handle, theirs, prefix):
    """One DiT and its parts."""
    latents, timestep = inputs(torch.float32)
    rope = rope_tables(GRID, model.spec.attention_head_dim)
    _, modulation = model._embed_time(timestep.float())
    found = {
        f"{prefix}, timestep": modulation.flatten(1),
        f"{prefix}, text projection": model.text_embedder(handle.padded()[None]),
    }
    for index, block in enumerate(model.blocks):
        name = f"{prefix}, block {index}"
        x, text, modulation, _ = theirs[f"{name} in"]
        stream = block(Stream(x), Modulation(modulation), rope, x.shape[1], block.attn2.keys(text, 0))
        found[name] = stream.base + stream.gate * stream.branch
    keys = model.text_keys(*stack_texts([handle], full=False))
    found[f"{prefix}, whole"] = model(latents, timestep.float(), keys, rope)
    return found


def our_vae(vae, latents):
    """The decoder's first part, frame by frame, and the frames of the default mode."""
    raw, memory, parts = vae.raw_latents(latents), None, []
    for frame in range(raw.shape[2]):
        current = Memory(memory)
        parts.append(vae.decoder.front(raw[:, :, frame : frame + 1], current))
        memory = current.new
    frames = torch.cat(list(decode_frames(vae, latents, "exact")), 2)
    return {"VAE decoder, first up-block": torch.cat(parts, 2), "VAE decoder, frames": frames.clamp(-1, 1)}
