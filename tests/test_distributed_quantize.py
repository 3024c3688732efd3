"""A tensor cut over ranks has the codes, scales and amax that one process gives the whole of it."""

import pytest
import torch
import torch.distributed as dist

import nvfp4_train as nt
from nvfp4_train.quantization import quantize_both
from nvfp4_train.sharding import Part, part_of, piece_of, shared_maximum, shared_seed
from tests.distributed_harness import on_ranks, returned

RECIPE = nt.load_recipe("nvidia_nvfp4").plan(0.0)
ROWS, COLUMNS = RECIPE.dgrad_grad_output, RECIPE.wgrad_grad_output  # stochastic; stochastic with Hadamard
OTHERS = {name: nt.load_recipe(name).plan(0.0) for name in ("ladder_tensor", "four_over_six", "ufp4")}
SCHEMES = {"sr": (ROWS, COLUMNS), "tile": (RECIPE.fprop_weight, None)}
SCHEMES |= {name: (plan.dgrad_grad_output, plan.wgrad_grad_output) for name, plan in OTHERS.items()}
SEED = 12345


def matrix(dtype=torch.float32):
    """[96, 96] whose parts differ 100-fold, so that a local amax would show."""
    x = torch.randn(96, 96, generator=torch.Generator().manual_seed(5), dtype=torch.float32)
    x[48:] *= 100
    x[:, 32:] *= 0.01
    return x.to(dtype)


def pieces(pair):
    return [None if q is None else (q.codes.clone(), q.scale_bytes.clone(), q.global_amax) for q in pair]


def quantize_part(dimension, dtype, scheme):
    group = dist.group.WORLD
    x = matrix(dtype)
    rows, columns = SCHEMES[scheme]
    part = part_of("x", dimension, tuple(x.shape), group, {0: [columns or "bf16"], 1: [rows or "bf16"]})
    size = -(-x.shape[dimension] // group.size())
    start = part.row + part.column
    mine = x.narrow(dimension, start, max(0, min(size, x.shape[dimension] - start)))
    seed = torch.tensor(SEED + dist.get_rank())  # only the first rank's counts
    return pieces(quantize_both(mine, rows, columns, seed=shared_seed(seed, part.group), stream=2, part=part))


def nan_wins():
    values = [torch.tensor([3.0, 1.0, -0.0]), torch.tensor([-float("nan"), float("inf"), 0.0])]
    mine = values[dist.get_rank() % 2]
    return shared_maximum(mine.view(torch.int32), dist.group.WORLD.group_name)


def refuse(size):
    with pytest.raises(ValueError) as told:
        part_of("layers.0.up", 0, (size, 64), dist.group.WORLD, {0: [], 1: [RECIPE.fprop_weight]})
    return str(told.value)


@pytest.fixture(scope="module")
def two():
    cases = {
        f"{scheme}-{dimension}-{dtype}": (quantize_part, (dimension, dtype, scheme))
        for scheme in SCHEMES for dimension in (0, 1) for dtype in (torch.float32, torch.bfloat16)
    }  # fmt: skip
    return on_ranks(2, cases | {"nan": (nan_wins, ()), "refuse": (refuse, (40,))})


def whole(scheme, dtype):
    rows, columns = SCHEMES[scheme]
    return pieces(quantize_both(matrix(dtype), rows, columns, seed=torch.tensor(SEED), stream=2))


def assert_equals_whole(outcomes, scheme, dimension, dtype):
    """Row forms stand under each other or side by side as their matrix does, column forms the other way."""
    for form, expected in enumerate(whole(scheme, dtype)):
        if expected is None:
            continue
        parts = [rank[form] for rank in outcomes]
        along = dimension if form == 0 else 1 - dimension
        assert torch.equal(torch.cat([p[0] for p in parts], along), expected[0])
        assert all((p[2] is None) == (expected[2] is None) for p in parts)
        assert expected[2] is None or all(torch.equal(p[2], expected[2]) for p in parts)
        if scheme == "ladder_tensor":  # one scale for all of it
            assert all(torch.equal(p[1], expected[1]) for p in parts)
        else:
            assert torch.equal(torch.cat([p[1] for p in parts], along), expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_shards_have_the_codes_of_one_process(two, scheme, dimension, dtype):
    assert_equals_whole(returned(two[f"{scheme}-{dimension}-{dtype}"]), scheme, dimension, dtype)


def test_nan_wins_the_all_reduce_on_every_rank(two):
    for found in returned(two["nan"]):
        assert found[0].isnan() and found[1] == float("inf") and found[2] == 0


def test_a_cut_inside_a_block_is_refused_on_every_rank(two):
    told = returned(two["refuse"])
    assert told[0] == told[1]
    assert "layers.0.up" in told[0] and "a multiple of 32" in told[0]


def test_a_part_says_where_it_begins():
    assert Part("g", 16, 0, 80).origin == [16, 0, 80]


def test_a_scale_that_spans_a_dimension_allows_no_cut_of_it():
    rows = nt.load_recipe("ladder_channel").plan(0.0).fprop_input
    with pytest.raises(ValueError, match="up.weight: dimension 1 of size 96 over 2 ranks .* spans all of it"):
        piece_of("up.weight", 1, 96, 2, {1: [rows]})
    assert piece_of("up.weight", 0, 97, 2, {1: [rows]}) == 49
