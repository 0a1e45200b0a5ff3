"""Packed products against torch's plain ones, and which layers of a model are packed."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.linear import ReplicatedLinear
from torch.nn.functional import linear

from smc_sglang.platform.linear import PackedLinear, pack, pack_model, product, product_plus

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_tokens", [0, 1, 4, 36, 100])
@pytest.mark.parametrize("shape", [(64, 192), (96, 70), (7, 5)])
def test_products_are_torchs_own(shape: tuple[int, int], n_tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n_tokens)
    n_in, n_out = shape
    x = torch.randn(n_tokens, n_in, generator=generator).to(dtype)
    weight = (torch.randn(n_out, n_in, generator=generator) / n_in**0.5).to(dtype)
    bias = torch.randn(n_out, generator=generator).to(dtype)
    other = torch.randn(n_tokens, n_out, generator=generator).to(dtype)
    packed = pack(weight)
    exact = linear(x.double(), weight.double())
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    for result, expected in (
        (product(x, packed), exact),
        (product(x, packed, bias), exact + bias),
        (product_plus(x, packed, None, other), exact + other),
        (product_plus(x, packed, bias, other), exact + bias + other),
    ):
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, **close)


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
