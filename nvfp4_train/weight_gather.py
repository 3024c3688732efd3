"""All-gather of weights in FP4 under FSDP2: packed codes and block scales travel, not BF16 or float32.

    nt.convert(model, "nvidia_nvfp4")
    nt.gather_in_fp4(model, ranks=mesh.size())      # before fully_shard
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

Each rank quantizes its own rows with the amax of the whole weight; 16x16 tiles do not cross a shard whose rows are a
multiple of 16, so the gathered codes are those that every rank would make from the gathered weight, bit for bit, at
0.504 bytes an element against 2 or 4. Each rank also quantizes only its share. FSDP frees the gathered codes after
forward and gathers them again for backward, like any weight.

How: FSDP2 asks a parameter's local tensor for ``fsdp_pre_all_gather`` (what to send) and ``fsdp_post_all_gather`` (what
the layer gets). ``ShardedWeight`` is the float32 or BF16 shard with these two methods, ``GatheredWeight`` what comes
out: a tensor that has the shape, dtype and gradient of the weight, and of its values only the quantized ones.
"""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from nvfp4_kernels.scheme import Scheme
from nvfp4_train.quantization import BF16, QuantizedTensor, quantize
from nvfp4_train.recipe import Recipe
from nvfp4_train.sharding import Part, is_sharded

aten = torch.ops.aten
# What makes the shard another view, place or copy of itself; all else computes with values and gives plain tensors.
_STAYS_SHARDED = {
    aten.detach.default, aten.clone.default, aten.view.default, aten.as_strided.default, aten.slice.Tensor,
    aten.split.Tensor, aten.new_zeros.default, aten.empty_like.default, aten._to_copy.default, aten._pin_memory.default,
    aten.alias.default, aten.narrow.default, aten.chunk.default, aten.unsqueeze.default,
}  # fmt: skip


class ShardedWeight(Tensor):
    """A weight, or one rank's rows of it, that FSDP2 gathers in FP4. ``plain``: the same memory as a plain tensor."""

    plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor):
        return Tensor._make_wrapper_subclass(
            cls, plain.size(), strides=plain.stride(), storage_offset=plain.storage_offset(), dtype=plain.dtype,
            device=plain.device, requires_grad=plain.requires_grad,
        )  # fmt: skip

    def __init__(self, plain: Tensor):
        self.plain = plain

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain_args, plain_kwargs = tree_map_only(ShardedWeight, lambda t: t.plain, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func in _STAYS_SHARDED:
            return tree_map_only(Tensor, ShardedWeight, out)
        if out is not None and plain_args and out is plain_args[0]:  # written in place
            return args[0]
        return out

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"ShardedWeight({self.plain})"

    def __reduce_ex__(self, protocol):
        return self.plain.__reduce_ex__(protocol)  # a file holds a weight like any other

    def __tensor_flatten__(self):
        return ["plain"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        return ShardedWeight(inner["plain"])

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """((codes, scale bytes) of this rank's rows, what belongs to the whole)."""
        if tuple(outer_size) != (module.out_features, module.in_features):
            raise ValueError(
                f"gather_in_fp4: {module.label} is cut by tensor parallelism too, and its amax would be that of one "
                "cut: gather it unquantized (leave gather_in_fp4 out)"
            )
        _require_even(module.label, outer_size[0], mesh.size())
        scheme = _one_scheme(module.label, module.recipe)
        plain = self.plain if mp_policy.param_dtype is None else self.plain.to(mp_policy.param_dtype)
        part = Part(mesh.get_group().group_name, mesh.get_local_rank() * len(plain), 0, outer_size[1])
        q = quantize(
            plain, scheme, form="packed", backend=module.backend.quantize, where=module.site.shape[0],
            name="fprop.weight", part=part,
        )  # fmt: skip
        return (q.codes, q.scale_bytes), (scheme, q.global_amax, q.quantize_backend, outer_size, part.group)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        codes, scales = all_gather_outputs
        scheme, amax, backend, shape, group = metadata
        if out is None:
            source = (self.plain, group, shape[0] // len(self.plain))
            whole = GatheredWeight(codes, scales, amax.clone(), scheme, backend, shape, param_dtype, source)
            return whole, (codes, scales)
        whole = out.to_local() if is_sharded(out) else out
        # FSDP gathers into the same memory each time; only the amax comes on its own
        assert whole.codes.untyped_storage().data_ptr() == codes.untyped_storage().data_ptr()
        whole.source = (self.plain, *whole.source[1:])
        whole.amax.data.copy_(amax)  # the same value as in forward, so no new version of it


class GatheredWeight(Tensor):
    """A whole weight ``[N, K]`` of which only the quantized form is there: what FSDP hands to the layer.

    ``source``: (this rank's shard, name of the group that shards it, its size).
    """

    @staticmethod
    def __new__(cls, codes, scales, amax, scheme, backend, shape, dtype, source):
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)

    def __init__(self, codes, scales, amax, scheme, backend, shape, dtype, source):
        self.codes, self.scales, self.amax = codes, scales, amax
        self.scheme, self.backend, self.source = scheme, backend, source

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (aten.detach.default, aten.as_strided.default, aten.alias.default):  # a Parameter of it
            w = args[0]
            return GatheredWeight(w.codes, w.scales, w.amax, w.scheme, w.backend, w.shape, w.dtype, w.source)
        if func in (aten.zeros_like.default, aten.empty_like.default):
            return func(torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device), **(kwargs or {}))
        raise NotImplementedError(f"{func}: a weight gathered in FP4 has only its layer's three GEMMs")

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"GatheredWeight({tuple(self.shape)}, {self.scheme})"

    def operand(self, scheme: str, transpose: bool) -> QuantizedTensor:
        """What ``quantize`` of the weight would give, packed; a GEMM in BF16 has its weight gathered in BF16, now."""
        rows, columns = self.shape
        if scheme == BF16:
            shard, group, ranks = self.source
            whole = torch.ops._c10d_functional.all_gather_into_tensor(shard.to(torch.bfloat16), ranks, group)
            whole = torch.ops._c10d_functional.wait_tensor(whole)
            q = QuantizedTensor(BF16, rows, columns, operand=whole)
            return q.T if transpose else q
        assert scheme == self.scheme, "gather_in_fp4 checked that all GEMMs read one quantized weight"
        q = QuantizedTensor(scheme, rows, columns, self.amax, self.codes, self.scales, None, False, self.backend)
        return q.T if transpose else q


def gather_in_fp4(model: nn.Module, ranks: int | None = None) -> list[str]:
    """Makes FSDP2 gather the weights of converted layers as packed codes and scales; the names of these layers.

    Call it between ``convert`` and ``fully_shard``. ``ranks``: over how many ranks a weight will be sharded (the size
    of the mesh's shard dimension); by default all of the process group.

    Where a schedule turns a GEMM to BF16, or ``bf16_forward`` does, its weight is gathered in BF16 as well.

    Raises ValueError, on every rank alike, with the model as it was: a weight whose rows are no multiple of 16 x ranks;
    a recipe whose Fprop and Dgrad do not read one weight in 16x16 tiles, rounded to nearest; a weight that is sharded
    already, or shared with a module that is not converted; a model without converted layers.
    """
    ranks = torch.distributed.get_world_size() if ranks is None else ranks
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "weight_cache")}
    if not layers:
        raise ValueError("the model has no converted layer: call convert(model, recipe) first")
    for name, layer in layers.items():
        if is_sharded(layer.weight):
            raise ValueError(f"gather_in_fp4: {name} is sharded already: call it before fully_shard, without DTensors")
        _one_scheme(name, layer.recipe)
        _require_even(name, layer.weight.shape[0], ranks)
    converted = {id(layer.weight) for layer in layers.values()}
    for name, module in model.named_modules():
        shared = [p for p in module.parameters(recurse=False) if id(p) in converted]
        if shared and name not in layers:
            raise ValueError(f"gather_in_fp4: {name} shares its weight with a converted layer: leave gather_in_fp4 out")
    wrapped: dict[int, nn.Parameter] = {}  # a tied weight stays tied
    for layer in layers.values():
        weight = layer.weight
        if id(weight) not in wrapped:
            wrapped[id(weight)] = nn.Parameter(ShardedWeight(weight.detach()), requires_grad=weight.requires_grad)
        layer.register_parameter("weight", wrapped[id(weight)])
    return list(layers)


def _one_scheme(name: str, recipe: Recipe) -> str:
    """The one scheme in which all GEMMs of a recipe read the weight, where they do not read it in BF16."""
    plans = [recipe.plan(start) for start in recipe.starts]
    simple = all(plan.simple for plan in plans)
    texts = {text for plan in plans for text in (plan.fprop_weight, plan.dgrad_weight)} - {BF16}
    scheme = Scheme.parse(next(iter(texts))) if len(texts) == 1 else None
    if not simple or scheme is None or scheme.stochastic or scheme.block != (16, 16):
        raise ValueError(
            f"gather_in_fp4: {name} runs recipe {recipe.name}, whose Fprop and Dgrad do not read one weight in 16x16 "
            "tiles, rounded to nearest: gather it unquantized (leave gather_in_fp4 out)"
        )
    return texts.pop()


def _require_even(name: str, rows: int, ranks: int) -> None:
    if rows % (16 * ranks):
        raise ValueError(
            f"gather_in_fp4: {name} has {rows} rows, and a shard over {ranks} ranks would not be a multiple of 16 of "
            f"them: make them a multiple of {16 * ranks}, use fewer ranks, or leave gather_in_fp4 out"
        )
