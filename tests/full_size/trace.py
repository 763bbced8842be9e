"""Graphs of full-size models without weights or devices: fake tensors, a fake process group, a backend that records.

A component is captured by `torch.compile(fullgraph=True, dynamic=False)` and lowered by AOTAutograd, which is what a
compiler backend is handed; nothing is computed. A graph break raises. Fake tensors are on the device `meta`, so that
code which treats the CPU in a way of its own takes the way of accelerators.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.flop_counter import flop_registry

from models.checkpoint import Shard
from models.device import MAX_GRAPHS
from models.parallel.layout import AXES, Layout
from models.parallel.mesh import Mesh, build_mesh, single

DEVICE = torch.device("meta")
RING_OPS = {"batch_gen.ring_attention.default", "batch_gen.ring_attention_constmax.default"}
WAIT = "_c10d_functional.wait_tensor.default"


@dataclass(frozen=True, slots=True)
class Collective:
    """One communication of a graph. kind: all_reduce, all_gather, reduce_scatter or ring; axis: of the mesh.

    shape, dtype: of what one rank puts in (keys of a ring, which travel with their values). group: the ranks of this
    rank's group, sorted. sent_bytes: what one rank sends, by the volumes of ring algorithms.
    """

    kind: str
    axis: str
    group: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    sent_bytes: float
    pairs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Graph:
    """What was recorded of one graph.

    structure: digest of its operators, arguments, shapes and dtypes, with groups by axis; equal on ranks that share a
    program. operators: name -> dtypes of its tensor inputs and outputs. peak_bytes: of tensors that it makes, alive at
    once; inputs_bytes: of those that it is given, weights included.
    """

    name: str
    structure: str
    num_nodes: int
    operators: dict[str, frozenset[str]]
    collectives: tuple[Collective, ...]
    flops: int
    peak_bytes: int
    inputs_bytes: int
    dynamic: tuple[str, ...]


@dataclass
class Recorder:
    """Compiles by recording; `graphs` grows by one for each graph that torch captures.

    lower: read what AOTAutograd makes of it; else only the structure as captured, which takes half the time.
    """

    mesh: Mesh
    lower: bool = True
    graphs: list[Graph] = field(default_factory=list)
    name: str = ""

    def compile(self, module: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A `CompileGraph` (models/wan/graphs.py)."""
        compiled = torch.compile(module, backend=self._backend(), fullgraph=True, dynamic=False)

        def call(*args: Any) -> Any:
            self.name = name
            return compiled(*args)

        return call

    def _backend(self) -> Callable[..., Any]:
        def record(graph: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
            self.graphs.append((read_graph if self.lower else read_structure)(self.name, graph, self.mesh))
            return graph.forward

        return aot_autograd(fw_compiler=record) if self.lower else record


@contextmanager
def fake_rank(layout: Layout | None, rank: int = 0) -> Iterator[Mesh]:
    """This process as one rank of a fake process group of the layout's size; None: one rank and no group."""
    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = MAX_GRAPHS  # one function is captured for many shapes, as on a device
    if layout is None:
        yield single()
        return
    dist.init_process_group("fake", rank=rank, world_size=layout.degrees.size, store=FakeStore())
    try:
        yield build_mesh(layout)
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors have shapes and dtypes and nothing else."""
    with FakeTensorMode(), torch.no_grad():
        yield


def empty_weights(
    module: nn.Module, dtype_of: Callable[[str], torch.dtype], shard_of: Callable[[str], Shard | None]
) -> nn.Module:
    """Give a module (made on `meta`) fake weights: of each parameter the part that `shard_of` names."""
    for name, parameter in list(module.named_parameters()):
        shape = list(parameter.shape)
        shard = shard_of(name)
        if shard is not None:
            shape[shard.dim] //= shard.count
        owner, _, attribute = name.rpartition(".")
        made = torch.empty(shape, dtype=dtype_of(name), device=DEVICE)
        setattr(module.get_submodule(owner), attribute, nn.Parameter(made, requires_grad=False))
    return module.eval()


def fake_buffers(module: nn.Module) -> None:
    """The same for a module's buffers, which hold a rank's place: data, so that all ranks have one program."""
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=DEVICE))


def read_graph(name: str, module: torch.fx.GraphModule, mesh: Mesh) -> Graph:
    """What there is to know of one graph."""
    groups = {axis.group_name: axis for axis in _axes(mesh)}
    nodes = [node for node in module.graph.nodes if node.op != "output"]
    calls = [node for node in nodes if node.op == "call_function"]
    inputs = [node.meta["val"] for node in nodes if node.op == "placeholder" and isinstance(node.meta["val"], Tensor)]
    return Graph(
        name=name,
        structure=_digest(module, {group: axis.name for group, axis in groups.items()}),
        num_nodes=len(nodes),
        operators=_operators(calls),
        collectives=tuple(_collectives(calls, groups)),
        flops=sum(_flops(node) for node in calls),
        peak_bytes=_peak_bytes(module),
        inputs_bytes=sum(tensor.numel() * tensor.element_size() for tensor in inputs),
        dynamic=tuple(str(node) for node in nodes if _is_dynamic(node)),
    )


def read_structure(name: str, module: torch.fx.GraphModule, mesh: Mesh) -> Graph:
    """The structure of a captured graph alone."""
    groups = {axis.group_name: axis.name for axis in _axes(mesh)}
    return Graph(name, _digest(module, groups), len(module.graph.nodes), {}, (), 0, 0, 0, ())


def _axes(mesh: Mesh) -> list[Any]:
    names = [tuple(axis for bit, axis in enumerate(AXES) if mask >> bit & 1) for mask in range(1, 1 << len(AXES))]
    found = [mesh.axis(*subset) for subset in names]
    # several subsets may be one group where an axis has degree 1: the one with the fewest names speaks for all
    return sorted((axis for axis in found if not axis.is_trivial), key=lambda axis: -axis.name.count("_"))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _values(node: torch.fx.Node) -> tuple[Any, Any]:
    """A node's arguments with tensors in place of nodes."""
    return torch.fx.map_arg((node.args, node.kwargs), lambda other: other.meta.get("val"))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digest(module: torch.fx.GraphModule, groups: dict[str, str]) -> str:
    places: dict[torch.fx.Node, str] = {}
    digest = hashlib.sha256()

    def plain(value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            return places[value]
        if isinstance(value, str) and value in groups:
            return f"<{groups[value]}>"
        return repr(value)

    for index, node in enumerate(module.graph.nodes):
        places[node] = f"%{index}"
        target = "" if node.op == "placeholder" else str(node.target)  # names of inputs are no part of a program
        arguments = tree_map(plain, (list(node.args), dict(node.kwargs)))
        value = node.meta.get("val", node.meta.get("example_value"))
        made = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in _tensors(value)]
        digest.update(f"{node.op} {target} {arguments} {made}\n".encode())
    return digest.hexdigest()[:16]


def _operators(calls: list[torch.fx.Node]) -> dict[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for node in calls:
        name = str(node.target)
        if "getitem" in name:
            continue
        tensors = _tensors(_values(node)) + _tensors(node.meta.get("val"))
        found.setdefault(name, set()).update(_short(tensor.dtype) for tensor in tensors)
    return {name: frozenset(dtypes) for name, dtypes in found.items()}


def _collectives(calls: list[torch.fx.Node], groups: dict[str, Any]) -> Iterator[Collective]:
    for node in calls:
        name = str(node.target)
        if name == WAIT or not (name.startswith("_c10d_functional") or name in RING_OPS):
            continue
        named = [arg for arg in node.args if isinstance(arg, str) and arg in groups]
        if name in RING_OPS and not named:
            continue  # a ring of one
        axis, size = groups[named[0]], groups[named[0]].size
        ranks = tuple(dist.get_process_group_ranks(axis.process_group))
        values = _values(node)[0]
        given = values[1] if name in RING_OPS else values[0]
        num_bytes = given.numel() * given.element_size()
        kind = name.split(".")[1].replace("_into_tensor", "").replace("_tensor", "")
        pairs: tuple[int, ...] = ()
        if name in RING_OPS:
            kind, pairs = "ring", next(tuple(arg) for arg in node.args if isinstance(arg, (list, tuple)))
            num_bytes += values[2].numel() * values[2].element_size()
        yield Collective(
            kind, axis.name, ranks, tuple(given.shape), _short(given.dtype), num_bytes * share(kind, size), pairs
        )


def share(kind: str, size: int) -> float:
    """What one of `size` ranks sends, as a multiple of what it puts in."""
    return {
        "all_reduce": 2 * (size - 1) / size,
        "all_gather": size - 1,
        "reduce_scatter": (size - 1) / size,
        "ring": size - 1,
    }[kind]


def _flops(node: torch.fx.Node) -> int:
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = _values(node)
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _is_dynamic(node: torch.fx.Node) -> bool:
    values = tree_flatten(node.meta.get("val"))[0]
    sizes = [size for tensor in values if isinstance(tensor, Tensor) for size in tensor.shape]
    return any(not isinstance(size, int) for size in sizes) or any(
        isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) for value in values
    )


def _peak_bytes(module: torch.fx.GraphModule) -> int:
    """Bytes of storages that the graph makes, each alive from the node that makes it to the last that sees it."""
    nodes = list(module.graph.nodes)
    storages = [
        {tensor.untyped_storage()._cdata: tensor for tensor in _tensors(node.meta.get("val"))} for node in nodes
    ]
    given = {key for node, found in zip(nodes, storages, strict=True) if node.op == "placeholder" for key in found}
    place = {node: index for index, node in enumerate(nodes)}
    last: dict[int, int] = {}
    first: dict[int, tuple[int, int]] = {}
    for index, node in enumerate(nodes):
        for key, tensor in storages[index].items():
            first.setdefault(key, (index, tensor.untyped_storage().nbytes()))
            last[key] = index
        for used in node.all_input_nodes:
            for key in storages[place[used]]:
                last[key] = index
    changes: dict[int, int] = {}
    for key, (start, num_bytes) in first.items():
        if key not in given:
            changes[start] = changes.get(start, 0) + num_bytes
            changes[last[key] + 1] = changes.get(last[key] + 1, 0) - num_bytes
    alive = peak = 0
    for index in sorted(changes):
        alive += changes[index]
        peak = max(peak, alive)
    return peak
