"""Packed products against torch's plain ones, and which layers of a model are packed."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from torch.nn.functional import linear

from smc_sglang.platform.linear import (
    Int8Matrix,
    Matrix,
    PackedLinear,
    PackedMatrix,
    int8_weights,
    pack_model,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def packed_matrix(matrix: type[Matrix], weight: torch.Tensor) -> Matrix:
    """`matrix.of(weight)`; skips the test on a CPU that packs no bfloat16."""
    if weight.dtype not in matrix.dtypes():
        pytest.skip("this CPU has no AVX-512: oneDNN packs float32 only")
    return matrix.of(weight)


@DTYPES
@pytest.mark.parametrize("n_tokens", [0, 1, 4, 36, 100])
@pytest.mark.parametrize("shape", [(64, 192), (96, 70), (7, 5)])
def test_products_are_torchs_own(shape: tuple[int, int], n_tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n_tokens)
    n_in, n_out = shape
    x = torch.randn(n_tokens, n_in, generator=generator).to(dtype)
    weight = (torch.randn(n_out, n_in, generator=generator) / n_in**0.5).to(dtype)
    bias = torch.randn(n_out, generator=generator).to(dtype)
    other = torch.randn(n_tokens, n_out, generator=generator).to(dtype)
    packed = packed_matrix(PackedMatrix, weight)
    exact = linear(x.double(), weight.double())
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for result, expected in (
        (packed.times(x), exact),
        (packed.times(x, bias), exact + bias),
        (packed.times_plus(x, None, other), exact + other),
        (packed.times_plus(x, bias, other), exact + bias + other),
    ):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, **close)


@DTYPES
@pytest.mark.parametrize("shape", [(1536, 576), (1920, 3200)])
@pytest.mark.parametrize("matrix", [PackedMatrix, Int8Matrix])
def test_a_tokens_product_does_not_depend_on_its_company(
    matrix: type[Matrix], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    n_in, n_out = shape
    x = torch.randn(200, n_in, generator=generator).to(dtype)
    other = torch.randn(200, n_out, generator=generator).to(dtype)
    packed = packed_matrix(matrix, (torch.randn(n_out, n_in, generator=generator) / n_in**0.5).to(dtype))
    times, times_plus = packed.times(x), packed.times_plus(x, None, other)
    for first, end in [(i, i + 1) for i in range(20)] + [(0, 2), (3, 7), (1, 10), (0, 36), (50, 122)]:
        assert torch.equal(packed.times(x[first:end]), times[first:end])
        assert torch.equal(packed.times_plus(x[first:end], None, other[first:end]), times_plus[first:end])


@DTYPES
@pytest.mark.parametrize("n_tokens", [1, 4, 36])
def test_products_with_eight_bits(n_tokens: int, dtype: torch.dtype) -> None:
    """Each weight is off by half a step, and the product is that of what is stored."""
    generator = torch.Generator().manual_seed(n_tokens)
    x = torch.randn(n_tokens, 576, generator=generator).to(dtype)
    weight = (torch.randn(96, 576, generator=generator) / 24).to(dtype)
    weight[5] = 0
    bias, other = (torch.randn(shape, generator=generator).to(dtype) for shape in ((96,), (n_tokens, 96)))
    rounded = Int8Matrix.of(weight)
    scales = rounded.scales.double().unsqueeze(1)
    stored = rounded.weight.double() * scales
    # A bfloat16 scale may be too small by 2^-9 for a row's largest weight: then that one is off by more.
    assert ((stored - weight.double()).abs() <= scales * 0.8).all()
    close = {"rtol": TOLERANCE[torch.bfloat16], "atol": TOLERANCE[torch.bfloat16]}
    exact = linear(x.double(), stored)
    torch.testing.assert_close(rounded.times(x).double(), exact, **close)
    torch.testing.assert_close(rounded.times_plus(x, bias, other).double(), exact + bias + other, **close)


def test_models_that_load_for_a_draft_in_eight_bits() -> None:
    model = torch.nn.Module()
    model.layer = ReplicatedLinear(64, 48, bias=True, params_dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 64)
    before = model.layer(x)[0]
    assert not hasattr(model.layer, "packed")
    with int8_weights():
        assert pack_model(model) == 1
    assert isinstance(model.layer.packed, Int8Matrix)
    assert model.layer.weight.dtype == torch.int8
    torch.testing.assert_close(model.layer(x)[0], before, rtol=0, atol=0.3)
    with int8_weights(), pytest.raises(ValueError, match="no plain linear layers"):
        pack_model(model)


def test_a_layers_weight_is_stored_once() -> None:
    model = torch.nn.Module()
    model.first = ReplicatedLinear(32, 48, bias=True, params_dtype=torch.float32)
    model.norm = torch.nn.LayerNorm(48)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 32)
    before = model.first(x)[0]
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    assert pack_model(model) == 1
    assert isinstance(model.first.quant_method, PackedLinear)
    assert model.first.weight.is_mkldnn
    assert sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) == size
    torch.testing.assert_close(model.first(x)[0], before, rtol=1e-5, atol=1e-5)
    assert pack_model(model) == 0, "nothing is packed twice"


def test_other_dtypes_stay_as_they_are() -> None:
    model = torch.nn.Module()
    model.layer = ReplicatedLinear(32, 48, bias=False, params_dtype=torch.float16)
    assert pack_model(model) == 0
    assert not model.layer.weight.is_mkldnn


def test_without_avx512_bfloat16_stays_plain_and_a_draft_is_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smc_sglang.platform.linear.multiplies_bfloat16", lambda: False)
    model = torch.nn.Module()
    model.layer = ReplicatedLinear(32, 48, bias=False, params_dtype=torch.bfloat16)
    assert pack_model(model) == 0
    assert not hasattr(model.layer, "packed")
    with int8_weights():
        assert pack_model(model) == 1
    assert model.layer.weight.dtype == torch.int8
