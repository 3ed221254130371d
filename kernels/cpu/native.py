"""The compiled kernels' structs and functions, as ctypes: field by field those of the C++ files beside this one."""

import ctypes
from ctypes import POINTER, Structure, Union, c_double, c_float, c_int, c_int32, c_int64, c_void_p

import torch

from kvrelay.kernels.base import Activation

MOST_WEIGHTS = 3

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
ACTIVATIONS: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu": 2, "gelu_tanh": 3, "relu2": 4}

# Kinds of operations.
EMBED, TURNS, NORM, LINEAR, ROTATE, ATTENTION, POINTWISE, PICK = range(8)
# What becomes of a product.
STORE, ADD, GATE, STORE_FLOAT = range(4)
# Kinds of Pointwise.
ACTIVATE, ACTIVATE_TIMES, ADD_SCALED, CLIP, SOFT_CAP = range(5)


class Pool(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("num_blocks", c_int64),
        ("block_size", c_int64),
        ("block_stride", c_int64),
        ("layer_stride", c_int64),
        ("kv_stride", c_int64),
        ("head_stride", c_int64),
    ]


class Batch(Structure):
    _fields_ = [
        ("num_rows", c_int64),
        ("num_sequences", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("query_starts", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("table_width", c_int64),
        ("num_picked", c_int64),
        ("picked", c_void_p),
        ("pool", Pool),
    ]


class Embed(Structure):
    _fields_ = [
        ("table", c_void_p),
        ("out", c_void_p),
        ("size", c_int64),
        ("out_stride", c_int64),
        ("scale", c_float),
    ]


class Pick(Structure):
    """The rows that a batch picks, of a table that is its rows so far: what follows is about those alone."""

    _fields_ = Embed._fields_


class Turns(Structure):
    _fields_ = [
        ("frequencies", c_void_p),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("num_pairs", c_int64),
        ("magnitude", c_float),
    ]


class Norm(Structure):
    _fields_ = [
        ("x", c_void_p),
        ("out", c_void_p),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("num_groups", c_int64),
        ("size", c_int64),
        ("is_layer_norm", c_int32),
        ("eps", c_float),
    ]


class Form(Structure):
    _fields_ = [
        ("bits", c_int32),
        ("group", c_int32),
        ("half", c_int32),
        ("minimums", c_int32),
        ("first_code", c_int32),
    ]


class Weight(Structure):
    _fields_ = [("packed", c_void_p), ("num_inputs", c_int64), ("num_outputs", c_int64), ("form", Form)]


class Linear(Structure):
    _fields_ = [
        ("x", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("num_weights", c_int32),
        ("epilogue", c_int32),
        ("activation", c_int32),
        ("scale", c_float),
        ("columns", c_int64 * MOST_WEIGHTS),
        ("weights", Weight * MOST_WEIGHTS),
        ("biases", c_void_p * MOST_WEIGHTS),
    ]


class Rotate(Structure):
    _fields_ = [
        ("x", c_void_p),
        ("stride", c_int64),
        ("num_heads", c_int64),
        ("head_dim", c_int64),
        ("num_pairs", c_int64),
        ("cosines", c_void_p),
        ("sines", c_void_p),
    ]


class Cache(Structure):
    _fields_ = [
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_stride", c_int64),
        ("value_stride", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("layer", c_int64),
    ]


class RotateAndCache(Structure):
    _fields_ = [("queries", Rotate), ("keys", Rotate), ("cache", Cache), ("caches", c_int32)]


class Attention(Structure):
    _fields_ = [
        ("queries", c_void_p),
        ("out", c_void_p),
        ("query_stride", c_int64),
        ("out_stride", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("layer", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
    ]


class Pointwise(Structure):
    _fields_ = [
        ("x", c_void_p),
        ("up", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("up_stride", c_int64),
        ("out_stride", c_int64),
        ("size", c_int64),
        ("kind", c_int32),
        ("activation", c_int32),
        ("scale", c_float),
    ]


class Draw(Structure):
    _fields_ = [
        ("row", c_int64),
        ("scale", c_float),
        ("min_p", c_double),
        ("top_p", c_double),
        ("top_k", c_int64),
        ("first", c_int64),
        ("count", c_int64),
    ]


class _Details(Union):
    _fields_ = [
        ("embed", Embed),
        ("turns", Turns),
        ("norm", Norm),
        ("linear", Linear),
        ("rotate", RotateAndCache),
        ("attention", Attention),
        ("pointwise", Pointwise),
        ("pick", Pick),
    ]


class Op(Structure):
    """One operation of a program. What it points to must outlive it."""

    _fields_ = [("kind", c_int32), ("dtype", c_int32), ("details", _Details)]


Details = Embed | Turns | Norm | Linear | RotateAndCache | Attention | Pointwise | Pick

_KINDS: dict[type[Details], tuple[int, str]] = {
    Embed: (EMBED, "embed"),
    Turns: (TURNS, "turns"),
    Norm: (NORM, "norm"),
    Linear: (LINEAR, "linear"),
    RotateAndCache: (ROTATE, "rotate"),
    Attention: (ATTENTION, "attention"),
    Pointwise: (POINTWISE, "pointwise"),
    Pick: (PICK, "pick"),
}


def make_op(dtype: torch.dtype, details: Details) -> Op:
    kind, name = _KINDS[type(details)]
    op = Op(kind=kind, dtype=DTYPES[dtype])
    setattr(op.details, name, details)
    return op


def declare(compiled: ctypes.CDLL) -> None:
    """Tell ctypes the functions' types."""
    signatures = (
        ("kvrelay_new", c_void_p, [c_int, c_int]),
        ("kvrelay_free", None, [c_void_p]),
        ("kvrelay_row_stride", c_int64, [c_int, c_int64]),
        ("kvrelay_packed_bytes", c_int64, [c_int, c_int64, c_int64]),
        ("kvrelay_pack", None, [c_void_p, c_int, c_void_p, c_int64, c_int64, c_void_p]),
        ("kvrelay_quantised_bytes", c_int64, [c_int, POINTER(Form), c_int64, c_int64]),
        (
            "kvrelay_pack_quantised",
            None,
            [c_void_p, c_int, POINTER(Form), c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p],
        ),
        ("kvrelay_scan", None, [c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p]),
        ("kvrelay_draw", None, [c_void_p, c_void_p, c_int64, POINTER(Draw), c_int64, POINTER(c_double), c_void_p]),
        ("kvrelay_total_weights", None, [c_void_p, c_void_p, c_int64, c_int64, c_void_p]),
        ("kvrelay_likeliest", None, [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
        ("kvrelay_run", c_int, [c_void_p, POINTER(Op), c_int64, POINTER(Batch)]),
    )
    for name, result, arguments in signatures:
        function = getattr(compiled, name)
        function.restype, function.argtypes = result, arguments
