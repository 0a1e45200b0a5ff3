"""The compiled loops against torch's operators in float64."""

from __future__ import annotations

import pytest
import torch

from smc_sglang.platform import kernels
from smc_sglang.platform.kernels import array

DTYPES = pytest.mark.parametrize("dtype", kernels.DTYPES)
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 4e-3}  # half a unit in the last place of bfloat16 is 2^-9


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance / 4)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 576), (36, 65), (3, 2048)])
def test_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = normal(*shape, dtype=dtype), normal(shape[1], dtype=dtype, seed=1)
    out = torch.empty_like(x)
    kernels.norm(array(x), array(weight), 1e-5, array(out))
    check(out, torch.nn.functional.rms_norm(x.double(), shape[1:], weight.double(), 1e-5))


@DTYPES
def test_gate(dtype: torch.dtype) -> None:
    gate_up = normal(5, 2 * 77, dtype=dtype) * 8
    gate_up[0, :4] = torch.tensor([300.0, -300.0, 88.5, -88.5])  # where e^x ends
    out = gate_up.new_empty(5, 77)
    kernels.gate(array(gate_up), array(out))
    gate, up = gate_up.double().chunk(2, -1)
    check(out, torch.nn.functional.silu(gate) * up)


@DTYPES
def test_what_is_not_a_number_stays_so(dtype: torch.dtype) -> None:
    """A broken weight has to show in the logits."""
    x = normal(2, 64, dtype=dtype)
    x[1, 5] = float("nan")
    out = torch.empty_like(x)
    kernels.norm(array(x), array(x[0].contiguous()), 1e-5, array(out))
    assert not out[0].isnan().any()
    assert out[1].isnan().all()
    gated = x.new_empty(2, 32)
    kernels.gate(array(x), array(gated))
    assert gated.isnan().nonzero().tolist() == [[1, 5]]
    pool, whole = x.view(2, 1, 64), torch.zeros(1, dtype=torch.int64)
    slots, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([2])
    kernels.attend(*map(array, (pool, pool, pool, slots, lengths, whole)), 1.0, array(out))
    assert out[0].isnan().all()


@DTYPES
def test_turn(dtype: torch.dtype) -> None:
    """Rotary embedding in halves, as complex numbers; the KV lands in its slots and nowhere else."""
    n_heads, n_kv_heads, head_dim, half = 3, 2, 8, 4
    qkv = normal(3, (n_heads + 2 * n_kv_heads) * head_dim, dtype=dtype)
    angles = normal(20, half, dtype=torch.float32, seed=1)
    positions, slots = torch.tensor([7, 0, 19]), torch.tensor([5, 1, 4])
    queries = qkv.new_empty(2, n_heads, head_dim)
    keys, values = qkv.new_zeros(6, n_kv_heads, head_dim), qkv.new_zeros(6, n_kv_heads, head_dim)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    arrays = map(array, (qkv, cos_sin, positions[:2], slots[:2], queries, keys, values))
    kernels.turn(*arrays)

    heads = qkv.double().view(3, -1, head_dim)
    first, second = heads[..., :half], heads[..., half:]
    turned = torch.complex(first, second) * torch.polar(torch.ones(3, 1, half), angles[positions][:, None])
    turned = torch.cat([turned.real, turned.imag], -1)
    check(queries, turned[:2, :n_heads])
    check(keys[slots[:2]], turned[:2, n_heads : n_heads + n_kv_heads])
    assert torch.equal(values[slots[:2]].double(), heads[:2, -n_kv_heads:])
    for pool in (keys, values):
        assert not pool[[0, 2, 3, 4]].any()


@DTYPES
@pytest.mark.parametrize("heads", [(6, 2), (4, 4)])
def test_attend(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows of any length, wherever their token is; other tokens are left alone."""
    (n_heads, n_kv_heads), head_dim = heads, 64
    queries = normal(5, n_heads, head_dim, dtype=dtype) * 3
    keys, values = (normal(200, n_kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    lengths, tokens = torch.tensor([1, 33, 150]), torch.tensor([4, 0, 2])
    slots = torch.randint(200, (184,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    out = queries.new_full((5, n_heads * head_dim), 7)
    kernels.attend(*map(array, (queries, keys, values, slots, lengths, tokens)), 0.125, array(out))
    for own, token in zip(slots.split(lengths.tolist()), tokens.tolist(), strict=True):
        key, value = (pool[own].double().repeat_interleave(n_heads // n_kv_heads, 1) for pool in (keys, values))
        weights = torch.einsum("hd,jhd->hj", queries[token].double(), key).mul(0.125).softmax(-1)
        check(out[token], torch.einsum("hj,jhd->hd", weights, value).flatten())
    assert (out[[1, 3]] == 7).all()


def test_bfloat16_is_rounded_as_torch_does() -> None:
    """To the nearest, ties to even: norms of two numbers that need more bits than there are."""
    x, weight = normal(4096, 2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    kernels.norm(array(x), array(weight), 0.0, array(out))
    wide = torch.empty_like(x, dtype=torch.float32)
    kernels.norm(array(x.float()), array(weight.float()), 0.0, array(wide))
    assert torch.equal(out, wide.to(torch.bfloat16))
