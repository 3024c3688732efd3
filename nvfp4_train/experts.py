"""Mixture-of-experts layers whose GEMMs run on quantized operands: the grouped twin of linear.py.

Every expert is a linear layer of its own that sees the tokens routed to it. Its three GEMMs are those of
``LinearFunction``: an amax of its own for each operand, blocks and Hadamard groups that start at its first token, zeros
where its token count is not a multiple of 16. Nothing of one expert can reach another through a shared scale or block.

    tokens [T, H], top_k [T, k]  ->  pairs sorted by expert [T*k, H]  ->  gate_up, activation, down  ->  [T, H]

One weight of all experts is one parameter ``[experts, N, K]``, as transformers keeps it in the models that follow its
experts interface (``use_experts_implementation``): Mixtral, Qwen3-MoE, DeepSeek-V3 and some sixty more, those with
transposed weights, biases, no gate or an interleaved one included.

The group is a loop over the experts that have tokens, and the host waits once a forward pass for the token counts.
Draws of stochastic rounding are keyed by the expert: they do not depend on who else has tokens. Splits, masks and
requantized operands (linear_mechanisms.py) are each expert's own, too; the mean of a split is over its tokens.

Why no grouped GEMM: each expert's product is ``alpha * (a @ b.T)`` with an alpha of its own, a float32 on the device
that must enter before the one rounding (gemm.py). Tried and read, torch 2.11 to 2.13:

- ``torch._grouped_mm`` (and ``nn.functional.grouped_mm``) of BF16 operands gives BF16 only: alpha would come after a
  rounding, which is a second one. ``out_dtype=float32`` is refused. Float32 operands give float32, exactly (products of
  decoded operands are exact), but by a fallback that copies the offsets to the host and loops, without tensor cores.
- ``torch.bmm(out_dtype=float32)`` is exact, and needs every expert padded to the busiest one, whose count only the host
  could tell; ``cublasGemmGroupedBatchedEx`` takes its sizes and its alphas from the host.
- The product alone would save launches and not the wait: blocks, Hadamard groups and the amax of each operand belong to
  one expert, so that ``quantize`` would have to work by groups on the device too.

What the loop costs is in ``experiments/2026-11-30_experts``.
"""

import torch
from torch import Tensor, nn

from nvfp4_train import layer_state
from nvfp4_train.quantization import INPUT_TYPES, draw_seed, layer_input
from nvfp4_train.recipe import Recipe, load_recipe
from nvfp4_train.swapping import Quantized

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
SEED_STEP = 0x9E3779B1  # odd, so that no two experts of a layer share a key


def why_not_recipe(recipe: Recipe) -> str | None:
    """Why experts cannot run a recipe, or None."""
    kept = layer_state.remembered(recipe)
    if kept is None:
        return None
    return (
        f"recipe {recipe.name} keeps {kept} from step to step, for one weight a layer; experts hold many, and not each "
        "has tokens in each step"
    )


class QuantizedExperts(Quantized):
    """Experts with quantized Fprop, Dgrad and Wgrad; parameters and state_dict are those of the module it replaces.

    ``QuantizedExperts.of(module, recipe, label)`` is the twin of an experts module of transformers;
    the constructor builds gated experts without biases.

    Args:
        num_experts, hidden_size, intermediate_size: ``gate_up_proj [E, 2 I, H]``, ``down_proj [E, H, I]``.
        activation: applied to the gate half.
        recipe: a name, a path, a dict or a Recipe.
        backend: None chooses by the device of the weights.

    Raises:
        ValueError: a recipe or backend that cannot be; inputs of a wrong shape or dtype.
    """

    products = WEIGHTS
    kind = "a group of experts"
    has_gate, has_bias, is_transposed, has_post_expert_norm = True, False, False, False

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, activation=nn.functional.silu,
        device=None, dtype=None, *, recipe: str | dict | Recipe = "nvidia_nvfp4", backend: str | None = None,
        label: str = "experts",
    ):  # fmt: skip
        super().__init__()
        self.num_experts, self.act_fn = num_experts, activation
        kind = dict(device=device, dtype=dtype)
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size, **kind))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size, **kind))
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)
        self._set_up(load_recipe(recipe), label, backend)

    def _set_up(self, recipe: Recipe, label: str, backend: str | None) -> None:
        if (reason := why_not_recipe(recipe)) is not None:
            raise ValueError(f"{label}: {reason}")
        super()._set_up(recipe, label, backend)

    @torch.compiler.disable
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """``hidden_states [T, H]``, ``top_k_index`` int64 and ``top_k_weights`` ``[T, k]`` -> ``[T, H]``.

        An index of ``num_experts`` or more stands for an expert that lives elsewhere: it contributes nothing.
        """
        self._refuse_sharded(hidden_states, top_k_index, top_k_weights)
        if hidden_states.dim() != 2 or top_k_index.shape[0] != hidden_states.shape[0]:
            raise ValueError(
                f"{self.label}: expected hidden_states [tokens, hidden] and top_k_index [tokens, k], got "
                f"{tuple(hidden_states.shape)} and {tuple(top_k_index.shape)}"
            )
        if hidden_states.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"{self.label}: a CUDA graph cannot capture experts, whose token counts the host must read"
            )
        tokens, top_k = top_k_index.shape
        experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
        counts = self._counts(experts)

        x = hidden_states[order // top_k]  # [T * k, H]
        key = "gate_up_proj" if self.has_gate else "up_proj"
        inner = self.grouped(x, counts, key)
        inner = self._gate(inner) if self.has_gate else self.act_fn(inner)
        y = self.grouped(inner, counts, "down_proj")
        if self.has_post_expert_norm:
            y = self.post_expert_norm(y)

        share = top_k_weights.reshape(-1)[order]
        if counts[self.num_experts]:
            share = share.masked_fill(experts >= self.num_experts, 0.0)
        # back to the order of the tokens, then a sum in a fixed order (index_add_ is not deterministic on CUDA)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        weighted = (y * share.unsqueeze(-1))[back]
        return weighted.view(tokens, top_k, y.shape[-1]).sum(dim=1).to(hidden_states.dtype)

    def _counts(self, experts: Tensor) -> list[int]:
        """How many of the sorted ``experts`` are 0, 1, ..., and how many live elsewhere. The one wait for the device.

        (``bincount`` would wait twice more, for the smallest and the largest of them.)
        """
        numbers = torch.arange(self.num_experts + 1, device=experts.device)
        before = torch.searchsorted(experts, numbers.to(experts.dtype)).tolist()
        if before[0]:
            raise ValueError(f"{self.label}: top_k_index has numbers below 0")
        return [end - start for start, end in zip(before, [*before[1:], len(experts)], strict=True)]

    def grouped(self, x: Tensor, counts: list[int], key: str) -> Tensor:
        """The product of each expert with its own rows.

        Args:
            x: ``[S, K]``, sorted by expert.
            counts: how many rows belong to each expert, and after them to none; any of them may be 0.
            key: the weight's name; ``[E, N, K]``, or ``[E, K, N]`` where ``is_transposed``.

        Returns:
            ``[S, N]`` in autocast's dtype or that of x; rows that belong to no expert are zero.
        """
        weight, where = getattr(self, key), self.sites[key].shape[0]
        bias = getattr(self, f"{key}_bias") if self.has_bias else None
        x = layer_input(x, self.label)
        out_dtype = x.dtype
        dtype = out_dtype if bias is None else torch.float32  # the bias joins before the one rounding
        # drawn whether or not gradients are on, so that a checkpointed layer draws the same numbers when replayed
        seeds = expert_seeds(draw_seed(x, where), len(weight)) if self.plan.stochastic else [None] * len(weight)
        main_grad = getattr(weight, "main_grad", None)
        # without any token expert 0 runs on none, so that all gradients are there, and zero
        active = [e for e in range(len(weight)) if counts[e]] or [0]
        rows, weights = x.split(counts), weight.unbind()
        outputs = []
        for e in active:
            w, into = weights[e], None if main_grad is None else main_grad[e]
            if self.is_transposed:
                w, into = w.T, None if into is None else into.T
            y = self._product(rows[e], w, into, seeds[e], where, dtype)
            outputs.append(y if bias is None else (y + bias[e].float()).to(out_dtype))
        if counts[len(weight)]:
            outputs.append(outputs[0].new_zeros(counts[len(weight)], outputs[0].shape[1]))
        return torch.cat(outputs)

    def _gate(self, x: Tensor) -> Tensor:
        own = getattr(self, "_apply_gate", None)  # the model's: some clamp, some keep gate and up interleaved
        if own is not None:
            return own(x)
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate) * up


def expert_seeds(seed: Tensor, experts: int) -> tuple[Tensor, ...]:
    """One Philox key for each expert of a module call, from the call's own; int64 scalars on its device."""
    steps = torch.arange(experts, dtype=torch.int64, device=seed.device) * SEED_STEP
    return ((seed + steps) & 0xFFFFFFFF).unbind()


def is_experts(module: nn.Module) -> bool:
    """Whether the module follows the experts interface of transformers (its class went through
    ``use_experts_implementation``), so that its weights and its gate can be driven from outside."""
    kind = type(module)
    return (
        hasattr(kind, "_apply_gate")
        and hasattr(kind.forward, "__wrapped__")
        and hasattr(module, "num_experts")
        and hasattr(module, "is_transposed")
        and any(_is_group(module, key) for key in WEIGHTS)
    )


def why_not_experts(module: nn.Module) -> str | None:
    """Why an experts module must stay as it is, or None."""
    if "forward" in module.__dict__:
        return "its forward was replaced"
    if module.__dict__.get("_compiled_call_impl") is not None:
        return "it is compiled, and would go on running the compiled code: convert first, then compile"
    keys = ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj")
    missing = [key for key in keys if not _is_group(module, key)]
    if missing:
        return f"it has no 3-D parameter {' and '.join(missing)}"
    for key in keys:
        weight = module._parameters[key]
        if weight.dtype not in INPUT_TYPES:
            return f"its {key} is {weight.dtype}; float32, bfloat16 and float16 can be quantized"
    return None


def _is_group(module: nn.Module, key: str) -> bool:
    weight = module._parameters.get(key)
    return weight is not None and weight.dim() == 3
