"""Products by oneDNN: the same as torch's, gradients included, wherever they are used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trireme.engines.torch import linear as module
from trireme.engines.torch.linear import (
    QuickLinear,
    linear,
    multiply,
    pack,
    packs,
    quicken,
    transposed_product,
)

CHOOSES = module.is_quicker
WIDENED = module._widened
ASKS = {name: getattr(module, name) for name in ("_processor", "_is_wide")}
HAS_ONEDNN = torch.backends.mkldnn.is_available()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor where oneDNN is the quicker one."""
    if not HAS_ONEDNN:
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(module, "is_quicker", lambda: True)
    monkeypatch.setattr(module, "_is_wide", lambda: True)


@pytest.mark.parametrize(
    ("maker", "flags", "capability", "many", "packed"),
    [
        ("AuthenticAMD", "avx2 avx512f", "AVX512", True, True),
        ("AuthenticAMD", "avx2 avx512f", "AVX2", True, True),  # held to AVX2
        ("AuthenticAMD", "avx2 avx512f", "DEFAULT", False, False),
        ("AuthenticAMD", "avx2", "AVX2", False, True),
        ("GenuineIntel", "avx2 avx512f", "AVX512", False, True),
        ("GenuineIntel", "avx2", "AVX2", False, True),
        ("GenuineIntel", "sse4_2", "DEFAULT", False, False),
        ("SomeoneElse", "avx2", "AVX2", False, False),
    ],
)
def test_which_products_are_onednns_follows_from_the_processor(
    maker: str, flags: str, capability: str, many: bool, packed: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Those of many rows where it has AVX-512 to gain, and those by packed matrices."""
    processors = tmp_path / "cpuinfo"
    processors.write_text(f"vendor_id : {maker}\nflags : fpu {flags} sse\n")
    monkeypatch.setattr(module, "Path", lambda _: processors)
    monkeypatch.setattr(module, "get_cpu_capability", lambda: capability)
    for name in ("_processor", "_is_wide"):
        monkeypatch.setattr(module, name, ASKS[name].__wrapped__)
    assert (CHOOSES.__wrapped__(), packs(torch.float32)) == (many, packed)


def multiplied_by_onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the first factors of all products from here on."""
    shapes: list[tuple[int, ...]] = []
    real = module.multiply

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append(tuple(x.shape))
        return real(x, weight, bias)

    monkeypatch.setattr(module, "multiply", counted)
    return shapes


@pytest.mark.parametrize("shape", [(150,), (3, 70), (1, 200)])
@pytest.mark.parametrize(("width", "out"), [(128, 384), (384, 128), (130, 199)])
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradients_are_those_of_float64(
    shape: tuple[int, ...], width: int, out: int, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = multiplied_by_onednn(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, dy = (
        torch.randn(*size, generator=generator)
        for size in ((*shape, width), (out, width), (out,), (*shape, out))
    )
    given = [x, weight, bias] if biased else [x, weight]
    for tensor in given:
        tensor.requires_grad_()
    linear(*given).backward(dy)
    wide = [tensor.detach().double().requires_grad_() for tensor in given]
    F.linear(*wide).backward(dy.double())
    torch.testing.assert_close(linear(*given).double(), F.linear(*wide), rtol=1e-5, atol=1e-4)
    for tensor, expected in zip(given, wide, strict=True):
        assert tensor.grad is not None and expected.grad is not None
        torch.testing.assert_close(tensor.grad.double(), expected.grad, rtol=1e-5, atol=1e-4)
    assert len(shapes) == 4  # forward, dx, dW; forward


def test_what_needs_no_gradient_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = multiplied_by_onednn(monkeypatch)
    x, weight = torch.randn(150, 128, requires_grad=True), torch.randn(128, 128)
    linear(x, weight).sum().backward()
    assert x.grad is not None and weight.grad is None
    assert len(shapes) == 2
    with torch.no_grad():
        assert not linear(x, weight).requires_grad


@pytest.mark.parametrize(
    ("rows", "dtype", "why"),
    [
        (16, torch.float32, "few rows"),
        (40, torch.float64, "another dtype"),
        (40, torch.bfloat16, "another dtype"),
    ],
)
def test_everything_else_is_left_to_torch(
    rows: int, dtype: torch.dtype, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = multiplied_by_onednn(monkeypatch)
    x, weight = torch.randn(rows, 128, dtype=dtype), torch.randn(128, 128, dtype=dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight)), why
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x.float(), weight.float()).dtype == torch.bfloat16
    assert not shapes


def test_every_linear_layer_of_a_model_is_quickened_with_checkpointing_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = multiplied_by_onednn(monkeypatch)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128, bias=False))
    quick = nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128, bias=False))
    quick.load_state_dict(plain.state_dict())
    quicken(quick)
    assert [type(m) for m in quick if not isinstance(m, nn.SiLU)] == [QuickLinear] * 2
    assert quick.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(200, 128)
    plain(x).square().sum().backward()
    again: Tensor = checkpoint(quick, x, use_reentrant=False)
    again.square().sum().backward()
    for one, other in zip(quick.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-3)
    assert len(shapes) == 2 + 2 + 3  # once, once again, and backward without a dx for the input


def test_equal_products_are_equal_bit_for_bit() -> None:
    x, weight = torch.randn(300, 384), torch.randn(198, 384)
    assert torch.equal(linear(x, weight), linear(x.clone(), weight.clone()))


def test_a_slice_of_columns_is_never_a_weight_of_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take seconds: the output head's gradient is made slice by slice."""
    gradient, states = torch.randn(64, 4096), torch.randn(64, 512)
    part = gradient[:, :2048]
    shapes = multiplied_by_onednn(monkeypatch)
    product = transposed_product(part, states)
    assert shapes == [(2048, 64)]  # the slice, transposed, is the first factor
    torch.testing.assert_close(product, part.t() @ states, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear(states.t(), part.t()), states.t() @ part)
    assert len(shapes) == 1  # torch's own product


@pytest.mark.parametrize("dtype", [torch.float32, *[torch.bfloat16] * packs(torch.bfloat16)])
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize(("width", "out"), [(128, 384), (130, 199)])
@pytest.mark.parametrize("biased", [False, True])
def test_products_by_packed_weights_are_those_of_float64(
    dtype: torch.dtype, rows: int, width: int, out: int, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*size, generator=generator).to(dtype)
        for size in ((rows, width), (out, width), (out,))
    )
    copy = pack(weight)
    assert copy is not None
    given = bias if biased else None
    got = multiply(x, copy, given)
    expected = F.linear(x.double(), weight.double(), None if given is None else given.double())
    assert got.dtype == dtype
    # bfloat16 sums in float32, and rounds once
    within = 1e-4 if dtype == torch.float32 else 2**-8 * float(expected.abs().max())
    assert float((got.double() - expected).abs().max()) < within


@pytest.mark.parametrize("biased", [False, True])
def test_many_rows_of_bfloat16_are_widened_where_a_processor_cannot_multiply_them(
    biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of the matrix; with a gradient, and for few rows, the product is torch's own."""
    monkeypatch.setattr(module, "widens", lambda: True)
    monkeypatch.setattr(module, "_MOST_WIDENED", 130 * 64)
    widened: list[int] = []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        widened.append(x.numel() // x.shape[-1])
        return WIDENED(x, weight, bias)

    monkeypatch.setattr(module, "_widened", counted)
    generator = torch.Generator().manual_seed(0)
    x, weight, given = (
        torch.randn(*size, generator=generator).bfloat16()
        for size in ((2, 40, 130), (199, 130), (199,))
    )
    bias = given if biased else None
    got = linear(x, weight, bias)
    assert got.dtype == torch.bfloat16 and widened == [80]
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(got.double(), expected, rtol=2**-8, atol=1e-5)
    linear(x[0, :15], weight, bias)
    linear(x.clone().requires_grad_(), weight, bias).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        linear(x, weight, bias)
    assert len(widened) == 1


@pytest.mark.parametrize(("wide", "half"), [(True, False), (True, True), (False, False)])
def test_they_are_widened_with_avx2_alone(
    wide: bool, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_is_wide", lambda: wide)
    monkeypatch.setattr(module, "packs", lambda _: half)
    assert module.widens() == (wide and not half)


def test_only_what_gains_by_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(128, 256)
    assert pack(weight) is not None
    others = {
        "small": weight[:3], "float64": weight.double(), "with gaps": weight[:, :200],
        "transposed": weight.t(), "elsewhere": weight.to("meta"),
    }  # fmt: skip
    assert [why for why, one in others.items() if pack(one) is not None] == []
    monkeypatch.setattr(module, "_is_wide", lambda: False)
    assert pack(weight) is None
    monkeypatch.setenv("TRIREME_NATIVE", "0")
    assert not packs(torch.bfloat16)
