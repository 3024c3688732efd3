"""The signed Hadamard transform: order of operations, inverse, layout."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4_kernels.reference.hadamard import rotate, signs
from nvfp4_kernels.scheme import SIGN_MASK


def sylvester(size: int) -> np.ndarray:
    return np.ones((1, 1)) if size == 1 else np.kron([[1, 1], [1, -1]], sylvester(size // 2))


def butterflies(x: np.ndarray, mask: int) -> np.ndarray:
    """One group, element by element in float32: signs, strides 1, 2, 4, ..., then the factor."""
    size = len(x)
    x = [np.float32(-value if mask >> i & 1 else value) for i, value in enumerate(x)]
    stride = 1
    while stride < size:
        for i in range(size):
            if not i & stride:
                x[i], x[i + stride] = x[i] + x[i + stride], x[i] - x[i + stride]
        stride *= 2
    return np.array(x, dtype=np.float32) * np.float32(1 / np.sqrt(size))


@pytest.mark.parametrize("size", [1, 2, 16, 32, 128])
def test_order_of_operations_bitwise(size):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(3, size, generator=generator) * torch.logspace(-4, 4, size)  # spread: the order of sums shows
    mask = SIGN_MASK * 0x100010001 % 2**63
    want = torch.stack([torch.from_numpy(butterflies(row.numpy(), mask)) for row in x]).to(torch.bfloat16)
    assert torch.equal(rotate(x, size, mask, 1), want)
    assert torch.equal(rotate(x.t().contiguous(), size, mask, 0).t(), want)


@given(rows=st.integers(0, 5), groups=st.integers(0, 4), seed=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_both_dims_agree_and_groups_are_apart(rows, groups, seed):
    x = torch.randn(rows, 16 * groups, generator=torch.Generator().manual_seed(seed))
    along_columns = rotate(x, 16, SIGN_MASK, 1)
    assert torch.equal(along_columns, rotate(x.t().contiguous(), 16, SIGN_MASK, 0).t())
    for group in range(groups):
        part = slice(16 * group, 16 * group + 16)
        assert torch.equal(along_columns[:, part], rotate(x[:, part].contiguous(), 16, SIGN_MASK, 1))


def test_matrix_and_inverse():
    """y = x @ (diag(signs) @ H / 4): exact on small integers, whose sums BF16 holds; twice (signs last) is identity."""
    x = torch.randint(-2, 3, (8, 16), generator=torch.Generator().manual_seed(0)).to(torch.float32)
    matrix = signs(SIGN_MASK, 16).diag() @ torch.from_numpy(sylvester(16)).to(torch.float32) / 4
    y = rotate(x, 16, SIGN_MASK, 1).to(torch.float32)
    assert torch.equal(y, x @ matrix)
    assert torch.equal(rotate(y, 16, 0, 1).to(torch.float32) * signs(SIGN_MASK, 16), x)


def test_default_signs():
    assert signs(SIGN_MASK, 16).tolist() == [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


def test_non_finite_spreads_over_its_group_only():
    x = torch.ones(1, 32)
    x[0, 3] = float("inf")
    y = rotate(x, 16, SIGN_MASK, 1)
    assert not y[0, :16].isfinite().any() and y[0, 16:].isfinite().all()
