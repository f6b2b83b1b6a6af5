"""One spelling for the Gluon names that moved between Triton 3.6 and 3.9; kernels never look at the version.

Names that Triton keeps private come through `_private.triton`; methods of its builder and semantic that are used here
(`_convert_to_ir_values`, `memdesc_reinterpret`, `create_async_tma_reduce`) are watched by the compile tests in tests/hopper.
"""

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait as _whole_wait

from backlight._private.triton import aggregate, base_value, builtin, compiler_options, ir, unwrap_if_constexpr

# options of every launch; multiply-adds are fused by name, because Triton's default changes with 3.10
COMPILER: dict[str, Any] = {"enable_fp_fusion": True}
# Triton 3.9 works out the addresses of all operands of a loop ahead of its first product, which leaves too few registers for
# anything else; this option of the same version puts them where they are used, and `ptx.py` makes them shorter
LATE_ADDRESSES: dict[str, Any] = {"sched4reg": True, "lean_ptx": True} if "sched4reg" in compiler_options else {}
# it also asks ptxas for a poorer allocation of registers than ptxas makes by itself (the last word counts)
OWN_REGISTERS: dict[str, Any] = {"ptx_options": "--regAllocOptLevel=4"} if LATE_ADDRESSES else {}

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

if hasattr(tma, "async_atomic_add"):
    tma_reduce_add = tma.async_atomic_add
else:

    @builtin
    def tma_reduce_add(tensor_desc: Any, coord: Any, src: Any, _semantic: Any = None) -> None:
        """Shared-to-global TMA with fp32 add; the builder's operation has no Python name before 3.8."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


barrier = getattr(gl, "barrier", None) or gl.thread_barrier

# a field of `arguments` that may be None: then it is a constant, and nothing is captured for it
Maybe = base_value


@builtin
def smem_reinterpret(mem: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """The same bytes of shared memory with another shape and layout."""
    unwrap = unwrap_if_constexpr
    return _semantic.memdesc_reinterpret(mem, unwrap(dtype), [unwrap(size) for size in unwrap(shape)], unwrap(layout))


@builtin
def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Any = None, _semantic: Any = None) -> Any:
    """Gluon's, for the calling warpgroup alone, as before Triton 3.9.

    Since then a wait in a partition of two warpgroups ends with a barrier of both, in case one overwrites what the other still
    reads. The kernels have barriers of their own for that, where it can happen at all.
    """
    tokens = _whole_wait(num_outstanding, deps, _semantic=_semantic)
    first = tokens[0] if isinstance(tokens, tuple) else tokens
    first.handle.set_attr("warpGroupLocal", _semantic.builder.get_unit_attr())
    return tokens


def arguments(cls: type) -> Any:
    """Class decorator: what partitions share, one field per annotation, built by position or by name inside a kernel.

    Fields of base classes come first.
    """
    fields = {name: kind for base in reversed(cls.__mro__[:-1]) for name, kind in base.__annotations__.items()}

    def __init__(self: Any, *values: Any, _semantic: Any = None, **named: Any) -> None:
        given = dict(zip(fields, values, strict=False)) | named
        if given.keys() != fields.keys():
            raise TypeError(f"{cls.__name__} takes {sorted(fields)}, got {sorted(given)}")
        for name, kind in fields.items():
            value = given[name]
            if kind is gl.constexpr:
                value = gl.constexpr(unwrap_if_constexpr(value))
            elif kind is gl.tensor:
                value = _semantic.to_tensor(value)
            elif kind is Maybe and not isinstance(value, base_value):
                value = gl.constexpr(value)
            setattr(self, name, value)

    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]
    # Triton lets aggregates inherit from aggregates only
    members = {"__annotations__": fields, "__doc__": cls.__doc__, "__module__": cls.__module__, "__init__": __init__}
    value = aggregate(type(cls.__name__, (), members))
    value.field_names = tuple(fields)
    return value
