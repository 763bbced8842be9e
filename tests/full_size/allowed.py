"""What a traced graph may contain: operators, and the dtypes that each may touch.

Neuron's compiler knows no complex numbers and no float64, turns int64 into int32, and refuses scatter, index_put,
einsum in eager mode and anything whose shape or path depends on data (docs/trainium.md names the error codes). So the
list holds what our graphs need and no more; an operator or dtype that is not here fails the proof, and whoever adds
one has looked it up. Names are those that AOTAutograd hands to a backend.
"""

FLOATS = frozenset({"float32", "bfloat16"})
MASKS = frozenset({"bool"})
PLACES = frozenset({"int32"})  # rows of tokens, token ids, distance buckets: looked up, added, compared
ANY = FLOATS | MASKS | PLACES

_VIEWS = (
    *("alias", "expand", "permute", "select.int", "slice.Tensor", "split.Tensor", "squeeze.dim", "squeeze.dims", "t"),
    *("transpose.int", "unbind.int", "unsqueeze", "view", "_unsafe_view"),
)
_COPIES = (
    *("cat", "clone", "stack", "repeat", "constant_pad_nd", "empty.memory_format", "full", "full_like", "zeros_like"),
    *("copy", "copy_", "_to_copy", "where.self"),
)
_ARITHMETIC = (
    *("add.Tensor", "sub.Tensor", "mul.Tensor", "mul.Scalar", "div.Tensor", "addcmul", "lerp.Tensor", "neg", "abs"),
    *("pow.Tensor_Scalar", "rsqrt", "exp", "sin", "cos", "sigmoid", "gelu", "silu", "clamp_min", "linalg_vector_norm"),
    *("mean.dim", "amax", "sum.dim_IntList", "native_layer_norm"),
)
_PRODUCTS = (
    *("mm", "addmm", "bmm", "baddbmm"),
    # scaled_dot_product_attention in its plain form, which torch lowers to on a device without one of its own
    *("_softmax", "_safe_softmax", "_scaled_dot_product_flash_attention_for_cpu"),
)
_OURS = (
    *("attention", "adaln", "adaln_norm", "qk_norm_rope", "head_norm", "conv3d", "fp8_matmul"),
    *("ring_attention", "ring_attention_constmax"),
)
_COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor")


def _named(space: str, names: tuple[str, ...], dtypes: frozenset[str]) -> dict[str, frozenset[str]]:
    return {f"{space}.{name}" if "." in name else f"{space}.{name}.default": dtypes for name in names}


ALLOWED: dict[str, frozenset[str]] = {
    **_named("aten", _VIEWS, ANY),
    **_named("aten", _COPIES, ANY),
    **_named("aten", _ARITHMETIC, FLOATS),
    **_named("aten", _PRODUCTS, FLOATS),
    **_named("batch_gen", _OURS, FLOATS | PLACES),
    **_named("_c10d_functional", _COLLECTIVES, FLOATS),
    # the rank's place, an input, says which rows of the clip's tokens are its own
    **_named("aten", ("arange", "arange.start", "arange.start_step", "clamp", "clamp_max", "rsub.Scalar"), PLACES),
    **_named("aten", ("index_select", "embedding"), FLOATS | PLACES | MASKS),
    **_named("aten", ("ge.Scalar", "lt.Tensor", "bitwise_not", "masked_fill.Scalar"), ANY),
}
for _name in ("add.Tensor", "mul.Tensor", "sub.Tensor"):
    ALLOWED[f"aten.{_name}"] = FLOATS | PLACES
ALLOWED["aten.arange.start_step"] = FLOATS | PLACES  # the frequencies of the timestep are made in float32
ALLOWED["aten.arange.default"] = FLOATS | PLACES


def refused(operators: dict[str, frozenset[str]]) -> list[str]:
    """What of a graph's operators (name -> dtypes) is not allowed; empty when all is."""
    found = []
    for name, dtypes in sorted(operators.items()):
        if name not in ALLOWED:
            found.append(f"{name} on {', '.join(sorted(dtypes))}")
        elif dtypes - ALLOWED[name]:
            found.append(f"{name}: {', '.join(sorted(dtypes - ALLOWED[name]))}")
    return found
