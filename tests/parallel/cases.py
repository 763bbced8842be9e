"""What ranks do in the tests of this folder: each function takes this rank's mesh and plain arguments."""

import math

import torch

from kernels.attention import attention_in_full
from models.errors import ModelError
from models.parallel import collectives
from models.parallel.context import SpreadAttention, TokenSplit
from models.parallel.layout import AXES
from models.parallel.mesh import Mesh


def numbers(*shape, seed=0, dtype=torch.float32):
    """Reproducible normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def membership(mesh: Mesh):
    """Each axis, and each flattened set of axes: my index, the members, and the ranks that a gather really brings."""
    seen = {}
    for names in [("tp",), ("cp",), ("cfg",), ("cp", "tp"), ("cfg", "tp"), AXES]:
        axis = mesh.axis(*names)
        blocks = collectives.gather_blocks(torch.tensor([mesh.rank]), axis)
        seen[names] = (axis.index, axis.ranks, tuple(int(block) for block in blocks))
    return mesh.rank, seen


def each_collective(mesh: Mesh):
    """All collectives over every axis, on numbers that tell who sent what."""
    out = {}
    for name in AXES:
        axis = mesh.axis(name)
        own = torch.full((2, 3), float(axis.index))
        out[name] = {
            "sum": collectives.all_reduce(own + 1, axis),
            "max": collectives.all_reduce(own, axis, "max"),
            "gather0": collectives.all_gather(own, axis, dim=0),
            "gather1": collectives.all_gather(own.bfloat16(), axis, dim=1),
            "scatter": collectives.reduce_scatter(torch.arange(axis.size * 2.0).repeat(2, 1), axis, dim=1),
            "broadcast": collectives.broadcast(own, axis, axis.size - 1),
            "first": collectives.gather_to_first(own, axis),
            "index": axis.index,
            "size": axis.size,
        }
    return out


def identity_objects(mesh: Mesh):
    """Whether collectives over trivial axes hand back the very tensor."""
    x, axis = torch.ones(4), mesh.cfg
    results = [
        collectives.all_reduce(x, axis),
        collectives.all_gather(x, axis, 0),
        collectives.reduce_scatter(x, axis, 0),
        collectives.broadcast(x, axis),
        collectives.gather_blocks(x, axis)[0],
        collectives.gather_to_first(x, axis)[0],
    ]
    return [result is x for result in results]


def gathered_by_data(mesh: Mesh):
    """By axis: whether its groups differ in order, and the ranks as a gather brings them when that order is a tensor."""
    found = {}
    for names in (("cp",), ("cfg",)):
        axis = mesh.axis(*names)
        order = collectives.order_of(axis)
        blocks = collectives.gather_blocks(torch.tensor([mesh.rank]), axis, order)
        found[names] = (order is not None, tuple(int(block) for block in blocks))
    return found


def json_of_first(mesh: Mesh, value):
    """Rank 0's value through a broadcast; the others start with nothing."""
    return collectives.broadcast_json(value if mesh.is_first else None, mesh)


def agreement(mesh: Mesh, odd_rank):
    """Check equal tensors for agreement, one of them with one bit turned."""
    x = numbers(3, 5)
    if mesh.rank == odd_rank:
        x.view(torch.int32)[1, 2] ^= 1
    collectives.check_agreement(x, mesh, "latents after step 3")


def compiled_graph(mesh: Mesh):
    """A function of three collectives through fullgraph compilation: its graphs' names of ops, and the result."""
    ops = []

    def backend(graph, _inputs):
        ops.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    def work(x):
        y = collectives.all_reduce(x, mesh.tp)
        z = collectives.all_gather(y, mesh.cp, dim=0)
        return collectives.reduce_scatter(z, mesh.cp, dim=0) * 2

    torch.compiler.reset()
    x = numbers(4, 2, seed=mesh.rank)
    compiled = torch.compile(work, backend=backend, fullgraph=True, dynamic=False)(x)
    return len(ops), ops[0], torch.equal(compiled, work(x))


def spread_attention(mesh: Mesh, kind, num_tokens, scale_up, dtype):
    """Self-attention over the context axis on inputs that every rank can make: (result of all tokens, lse)."""
    q, k, v = attention_inputs(num_tokens, scale_up, dtype)
    tokens = TokenSplit(mesh.cp)
    attend = SpreadAttention(tokens, mesh.ring_pairs("cp"), kind)
    local = [tokens.scatter(x.flatten(2)).unflatten(-1, x.shape[2:]) for x in (q, k, v)]
    out, lse = attend(*local, None, num_tokens)
    whole = tokens.gather(out.flatten(2), num_tokens).unflatten(-1, q.shape[2:])
    return whole, tokens.gather(lse.transpose(1, 2), num_tokens).transpose(1, 2)


def attention_inputs(num_tokens, scale_up, dtype=torch.float32):
    """q, k, v [2, L, 2, 16]: `scale_up` times larger queries and keys, and one key that dominates every query.

    Its norm makes the constant bound of each query far larger than the query's true maximum wherever the two do not
    point the same way.
    """
    q, k, v = (numbers(2, num_tokens, 2, 16, seed=seed, dtype=torch.float64) for seed in range(3))
    q, k = q * scale_up, k * scale_up
    if scale_up > 1:
        k[:, num_tokens // 2] = -8 * scale_up * q[:, 0] / q[:, 0].norm(dim=-1, keepdim=True)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def exact_attention(q, k, v):
    """Softmax attention in float64, [B, L, H, D]."""
    out, lse = attention_in_full(*(x.double().transpose(1, 2) for x in (q, k, v)), None)
    return out.transpose(1, 2), lse


def constant_bound_attention(q, k, v):
    """Attention as the constant-bound ring computes it in float32: exp(score - |q| max|k| scale), clamped at 1e-37."""
    scale = 1 / math.sqrt(q.shape[-1])
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    bound = scale * q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).amax(-1)[..., None, None]
    weights = torch.exp(q @ k.mT * scale - bound)
    return ((weights @ v) / weights.sum(-1, keepdim=True).clamp_min(1e-37)).transpose(1, 2)


def first_fails(mesh: Mesh, error):
    """What each rank sees when rank 0 alone fails to make a tensor, and that all can go on with the next one."""
    like = torch.zeros(2, 3)

    def make():
        if error is not None:
            raise error
        return torch.ones(3, 2)

    try:
        collectives.made_by_first(make, like, mesh)
    except ModelError as told:
        found = (told.kind, told.message)
    made = collectives.made_by_first(lambda: torch.full((2, 3), 7.0), like, mesh)
    return found, made
