"""What ranks do in test_vae_strips: decode one clip together."""

import hashlib

import torch

from models.errors import ModelError
from models.parallel.collectives import barrier
from models.parallel.mesh import Mesh
from models.vae.decode import decode_stream
from models.vae.strips import plan_strips
from tests.models.vae.vaes import latents, ours


def stream(mesh: Mesh, family, size, count, dtype=torch.float32, spoil=False):
    """The slabs of a clip of (frames, height, width) latents in `count` strips."""
    vae, values = ours(family, dtype), latents(family, *size)
    if spoil:
        values[:, 1, -1, -1] = torch.nan
    return decode_stream(vae, values, "exact", mesh, plan_strips(vae.spec, *size[1:], count))


def digests(mesh: Mesh, family, size, count, dtype=torch.float32):
    """The SHA-256 of each slab that arrives here."""
    return [hashlib.sha256(slab.tobytes()).hexdigest() for slab in stream(mesh, family, size, count, dtype)]


def patient(mesh: Mesh, family, size, count):
    """Rank 0 takes one slab, and the rest only after all other ranks are through."""
    slabs = stream(mesh, family, size, count)
    taken = [len(next(slabs))] if mesh.is_first else []
    if not mesh.is_first:
        taken += [len(slab) for slab in slabs]
    return taken


def spoiled(mesh: Mesh, family, size, count):
    """What each rank sees of a clip with NaN in one corner of a later latent frame, and that it can go on."""
    try:
        list(stream(mesh, family, size, count, spoil=True))
    except ModelError as error:
        barrier(mesh)
        return error.kind, error.message
    return None
