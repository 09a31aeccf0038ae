"""Quantising a plain checkpoint while converting gives what its MLX conversion gives."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import check_same_store, memory_of_conversion, raw_tensors, resident_values, rewrite
from strategies import write_checkpoint

from aegis.checkpoint.config import QuantSpec
from aegis.checkpoint.fileio import ALIGN
from aegis.checkpoint.layout import ExpertBits
from aegis.checkpoint.source import Checkpoint
from aegis.checkpoint.store import Store
from aegis.convert import source_data
from aegis.convert.convert import convert
from aegis.convert.source_data import Streams
from aegis.errors import CheckpointError, StoreError, UsageError
from aegis.kernels import formats
from aegis.kernels.base import Format, Layout
from aegis.kernels.sizes import CODE_BITS, GROUPS

DTYPES = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


@pytest.fixture(scope="module")
def mx() -> Any:
    core = pytest.importorskip("mlx.core", reason="MLX, whose quantiser is the truth, is missing")
    core.set_default_device(core.cpu)
    return core


def plain(folder: Path, **choices: Any) -> Path:
    """A small plain checkpoint in bfloat16."""
    return write_checkpoint(folder, 5, **({"dense": True, "num_experts": 3} | choices))


def in_mlx_format(mx: Any, source: Path, folder: Path, bits: int, group_size: int) -> Path:
    """What mlx_lm.convert makes of it: experts stacked, every matrix quantised."""
    tensors = raw_tensors(source)
    experts = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(\w+)\.weight")
    stacks: dict[str, dict[int, Any]] = {}
    for name in list(tensors):
        if found := experts.fullmatch(name):
            stack = stacks.setdefault(f"{found[1]}.switch_mlp.{found[3]}.weight", {})
            stack[int(found[2])] = tensors.pop(name)
    for name, stack in stacks.items():
        dtype = stack[0][0]
        tensors[name] = (dtype, np.stack([stack[expert][1] for expert in sorted(stack)]))
    out: dict[str, Any] = {}
    for name, (dtype, raw) in tensors.items():
        if not name.endswith(".weight") or raw.ndim == 1 or raw.shape[-1] % group_size:
            out[name] = (dtype, raw)
            continue
        kind = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}[dtype]
        numbers = mx.uint32 if dtype == "F32" else mx.uint16
        words, scales, biases = mx.quantize(
            mx.array(raw).view(kind), group_size=group_size, bits=bits
        )
        module = name.removesuffix(".weight")
        out[name] = ("U32", np.array(words))
        out[f"{module}.scales"] = (dtype, np.array(scales.view(numbers)))
        out[f"{module}.biases"] = (dtype, np.array(biases.view(numbers)))
    entry = {"group_size": group_size, "bits": bits, "mode": "affine"}
    return rewrite(source, folder, out, quantization=entry, quantization_config=entry)


@pytest.mark.parametrize("layout", ["il16", "row"])
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_plain_checkpoint_gives_the_store_of_its_mlx_conversion(
    mx: Any, tmp_path: Path, layout: Layout, separate: bool, dtype: str
) -> None:
    source = plain(tmp_path / "b", separate_experts=separate)
    fmt = Format("dense", DTYPES[dtype])  # type: ignore[arg-type]
    tensors = {
        name: (dtype, formats.from_f32(formats.bf16_to_f32(raw), fmt))
        for name, (_, raw) in raw_tensors(source).items()
    }
    kept = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype]
    source = rewrite(source, tmp_path / "m", tensors, torch_dtype=kept)
    quantised = in_mlx_format(mx, source, tmp_path / "q", 4, 64)
    options: dict[str, Any] = {"layout": layout, "piece_nbytes": 1 << 14}
    ours = convert(source, tmp_path / "s", quantize=QuantSpec(4, 64), **options)
    check_same_store(ours, convert(quantised, tmp_path / "t", **options))


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("group_size", GROUPS)
def test_every_width_and_group_gives_the_store_of_the_mlx_conversion(
    mx: Any, tmp_path: Path, bits: int, group_size: int
) -> None:
    """Experts have 64 columns in one matrix, which stays plain in groups of 128."""
    source = plain(tmp_path / "m", num_hidden_layers=1)
    quantised = in_mlx_format(mx, source, tmp_path / "q", bits, group_size)
    for layout in ("il16", "row"):
        ours = convert(
            source, tmp_path / f"s{layout}", layout=layout, quantize=QuantSpec(bits, group_size)
        )
        check_same_store(ours, convert(quantised, tmp_path / f"t{layout}", layout=layout))


def expert_bytes(store: Store, experts: ExpertBits = "4bit") -> list[bytes]:
    return [path.read_bytes() for path in store.expert_paths(experts)]


@pytest.mark.parametrize("layout", ["il16", "row"])
def test_3bit_experts_are_those_of_the_3bit_mlx_conversion(
    mx: Any, tmp_path: Path, layout: Layout
) -> None:
    """Made from the plain numbers, not from the 4-bit codes, at once or later."""
    source = plain(tmp_path / "m")
    three = convert(in_mlx_format(mx, source, tmp_path / "q", 3, 64), tmp_path / "t", layout=layout)
    seen: list[tuple[int, int]] = []
    options: dict[str, Any] = {"layout": layout, "quantize": QuantSpec(4, 64)}
    ours = convert(
        source, tmp_path / "s", experts3bit=True, progress=lambda *at: seen.append(at), **options
    )
    assert expert_bytes(ours, "3bit") == expert_bytes(three)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {seen[-1][0]} == {total for _, total in seen}
    first = convert(source, tmp_path / "l", **options)
    assert not first.has_3bit
    seen.clear()
    later = convert(
        source, tmp_path / "l", experts3bit=True, progress=lambda *at: seen.append(at), **options
    )
    assert seen[-1][0] == seen[-1][1]
    check_same_store(later, ours)


GOLDENS = Path(__file__).parents[1] / "goldens"
PUBLISHED = sorted(path.parent.name for path in GOLDENS.glob("*/hf_bf16"))
"""As mlx_lm.convert wrote them, and beside each what that was given, in several files. What comes
along of qwen3_5_moe is more than a text model needs."""


@pytest.mark.parametrize("layout", ["il16", "row"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_plain_checkpoint_gives_the_store_of_the_published_conversion(
    tmp_path: Path, name: str, layout: Layout
) -> None:
    published = GOLDENS / name
    source = published / "hf_bf16"
    ours = convert(source, tmp_path / "s", layout=layout, quantize=QuantSpec(4, 64))
    assert ours.layout.resident["layers.0.mlp.gate"].format.bits == 8
    theirs = convert(published, tmp_path / "t", layout=layout)
    check_same_store(ours, theirs, vision=name != "qwen3_5_moe")


def plain_golden(mx: Any, name: str) -> dict[str, Any]:
    """The numbers of a golden's tensors in bfloat16, as a plain checkpoint has them."""
    checkpoint, tensors = Checkpoint.open(GOLDENS / name), raw_tensors(GOLDENS / name)
    quantization, out = checkpoint.config.quantization, {}
    assert quantization is not None
    for tensor, (dtype, raw) in tensors.items():
        module, _, kind = tensor.rpartition(".")
        if kind in ("scales", "biases"):
            continue
        if dtype != "U32":
            out[tensor] = (dtype, raw)
            continue
        spec = quantization.of(module)
        assert spec is not None
        params = [
            mx.array(tensors[f"{module}.{p}"][1])
            for p in ("scales", "biases")
            if f"{module}.{p}" in tensors
        ]
        if spec.mode == "affine":
            params = [each.view(mx.bfloat16) for each in params]
        numbers = mx.dequantize(
            mx.array(raw), *params, group_size=spec.group_size, bits=spec.bits, mode=spec.mode
        )
        out[tensor] = ("BF16", np.array(numbers.astype(mx.bfloat16).view(mx.uint16)))
    return out


def transposed(tensors: dict[str, Any]) -> dict[str, Any]:
    """gpt_oss as those publish it who turn mxfp4 into bfloat16."""
    out, part = dict(tensors), re.compile(r"(.*\.experts)\.gate_proj\.weight")
    for found in filter(None, map(part.fullmatch, tensors)):

        def take(name: str, prefix: str = found[1]) -> np.ndarray[Any, Any]:
            raw: np.ndarray[Any, Any] = out.pop(f"{prefix}.{name}")[1]
            return raw

        experts = found[1]
        for end, name in ((".weight", ""), (".bias", "_bias")):
            both = np.stack([take(f"gate_proj{end}"), take(f"up_proj{end}")], axis=2)
            both = both.reshape(len(both), -1, *both.shape[3:])
            out[f"{experts}.gate_up_proj{name}"] = ("BF16", both.swapaxes(1, both.ndim - 1))
            down = take(f"down_proj{end}")
            out[f"{experts}.down_proj{name}"] = ("BF16", down.swapaxes(1, down.ndim - 1))
    return out


@pytest.mark.parametrize("layout", ["il16", "row"])
def test_transposed_experts_become_what_mlx_makes_of_them_the_right_way_round(
    mx: Any, tmp_path: Path, layout: Layout
) -> None:
    """Of the golden's own numbers, at 4 and at 3 bits."""
    numbers = plain_golden(mx, "gpt_oss")
    none = {"quantization": None, "quantization_config": None}
    source = rewrite(GOLDENS / "gpt_oss", tmp_path / "t", transposed(numbers), **none)
    shape = raw_tensors(source)["model.layers.0.mlp.experts.gate_up_proj"][1].shape
    assert shape == (8, 128, 2 * 64)
    usual = rewrite(GOLDENS / "gpt_oss", tmp_path / "u", numbers, **none)
    options: dict[str, Any] = {"layout": layout, "piece_nbytes": 1 << 13}
    ours = convert(source, tmp_path / "s", experts3bit=True, quantize=QuantSpec(4, 64), **options)
    coded = {bits: in_mlx_format(mx, usual, tmp_path / f"q{bits}", bits, 64) for bits in (4, 3)}
    theirs = {bits: convert(coded[bits], tmp_path / f"m{bits}", **options) for bits in coded}
    assert expert_bytes(ours) == expert_bytes(theirs[4])
    assert expert_bytes(ours, "3bit") == expert_bytes(theirs[3])
    check_same_store(*(convert(p, tmp_path / f"p{p.name}", **options) for p in (source, usual)))


@pytest.mark.parametrize("quantize", [None, QuantSpec(4, 64)])
def test_published_convolutions_and_norms_give_the_store_of_those_that_mlx_has(
    tmp_path: Path, quantize: QuantSpec | None
) -> None:
    source = plain(tmp_path / "a", model_type="qwen3_next", num_hidden_layers=2)
    ours, theirs = raw_tensors(source), raw_tensors(source)
    centred = re.compile(r".*(layernorm|[qk]_norm|model\.norm)\.weight")
    for name, (dtype, raw) in ours.items():
        if name.endswith("conv1d.weight"):
            theirs[name] = (dtype, np.moveaxis(raw, 1, 2))
        elif centred.fullmatch(name):
            # Of so few digits that neither sum rounds.
            values = np.round(formats.bf16_to_f32(raw) * 64) / 64
            ours[name] = (dtype, formats.f32_to_bf16(values.astype(np.float32)))
            theirs[name] = (dtype, formats.f32_to_bf16((values - 1).astype(np.float32)))
    assert sum(centred.fullmatch(name) is not None for name in ours) == 7
    stores = [
        convert(rewrite(source, tmp_path / word, tensors), tmp_path / f"{word}s", quantize=quantize)
        for word, tensors in (("o", ours), ("t", theirs))
    ]
    check_same_store(*stores)


def test_a_norm_less_1_is_stored_exactly_unless_the_checkpoint_is_quantised(
    tmp_path: Path,
) -> None:
    name = "layers.3.self_attn.q_norm"
    source = GOLDENS / "qwen3_5_moe" / "hf_bf16"
    raw = raw_tensors(source)[f"model.language_model.{name}.weight"][1]
    exact = formats.bf16_to_f32(raw) + np.float32(1)
    rounded = formats.bf16_to_f32(formats.f32_to_bf16(exact))
    assert (exact != rounded).any()
    for quantize, expected in ((None, exact), (QuantSpec(4, 64), rounded)):
        store = convert(source, tmp_path / str(quantize), quantize=quantize)
        assert (resident_values(store)[name] == expected).all()


@pytest.mark.parametrize("layout", ["il16", "row"])
def test_fused_experts_give_the_store_of_separate_ones(tmp_path: Path, layout: Layout) -> None:
    separate = plain(tmp_path / "m", separate_experts=True)
    tensors = raw_tensors(separate)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        each = {
            part: [tensors.pop(f"{prefix}{n}.{part}.weight")[1] for n in range(3)]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        both = [np.concatenate(p) for p in zip(each["gate_proj"], each["up_proj"], strict=True)]
        tensors[f"{prefix}gate_up_proj"] = ("BF16", np.stack(both))
        tensors[f"{prefix}down_proj"] = ("BF16", np.stack(each["down_proj"]))
    fused = rewrite(separate, tmp_path / "f", tensors)
    options: dict[str, Any] = {"layout": layout, "quantize": QuantSpec(4, 64)}
    first, second = (convert(p, tmp_path / f"{p.name}s", **options) for p in (separate, fused))
    check_same_store(first, second)


def test_numbers_are_rounded_to_the_type_that_the_config_names(tmp_path: Path) -> None:
    source = plain(tmp_path / "m")
    wide = {
        name: ("F32", formats.bf16_to_f32(raw).view(np.uint32) | np.uint32(0x1234))
        for name, (_, raw) in raw_tensors(source).items()
    }
    fmt = Format("dense", "bf16")
    narrow = {
        name: ("BF16", formats.from_f32(raw.view(np.float32), fmt))
        for name, (_, raw) in wide.items()
    }
    stores = [
        convert(rewrite(source, tmp_path / name, tensors), tmp_path / f"{name}s", quantize=spec)
        for spec in [QuantSpec(4, 64)]
        for name, tensors in (("w", wide), ("n", narrow))
    ]
    check_same_store(*stores)
    own = rewrite(source, tmp_path / "o", wide, torch_dtype=None)
    store = convert(own, tmp_path / "os", quantize=QuantSpec(4, 64))
    assert store.layout.embedding.format.dtype == "f32"


def test_scales_that_do_not_wait_in_memory_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = plain(tmp_path / "m")
    options: dict[str, Any] = {"layout": "row", "quantize": QuantSpec(4, 64)}
    kept = convert(source, tmp_path / "k", **options)
    monkeypatch.setattr(source_data, "_KEPT_NBYTES", 0)
    check_same_store(convert(source, tmp_path / "s", **options), kept)


def test_another_quantisation_of_the_same_checkpoint_is_another_store(tmp_path: Path) -> None:
    source = plain(tmp_path / "m")
    calls: list[int] = []
    convert(source, tmp_path / "s", quantize=QuantSpec(4, 64))
    spec = QuantSpec(4, 64)
    convert(source, tmp_path / "s", quantize=spec, progress=lambda done, _: calls.append(done))
    assert not calls
    for other in (QuantSpec(4, 32), QuantSpec(8, 64), None):
        with pytest.raises(StoreError, match="another checkpoint or layout"):
            convert(source, tmp_path / "s", quantize=other)


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"quantised already \(.*4-bit codes\)"):
        convert(source, tmp_path / "s", quantize=QuantSpec(4, 64))
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("spec", "words"), [(QuantSpec(7, 64), "no 7-bit codes"), (QuantSpec(4, 16), "groups of 16")]
)
def test_a_width_or_group_that_does_not_exist_is_refused(
    tmp_path: Path, spec: QuantSpec, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        convert(plain(tmp_path / "m"), tmp_path / "s", quantize=spec)


@pytest.mark.parametrize(
    ("name", "value"),
    [("lm_head.weight", 0x7FC0), ("model.layers.1.mlp.gate.weight", 0xFF80)],
)
def test_a_number_that_is_not_finite_is_refused_by_name_and_nothing_is_left(
    tmp_path: Path, name: str, value: int
) -> None:
    source = plain(tmp_path / "m")
    tensors = raw_tensors(source)
    tensors[name][1].reshape(-1)[77] = value
    damaged = rewrite(source, tmp_path / "d", tensors)
    with pytest.raises(CheckpointError, match=f"{name} in .* not finite"):
        convert(damaged, tmp_path / "out" / "s", quantize=QuantSpec(4, 64))
    assert list((tmp_path / "out").iterdir()) == []


def test_numbers_too_large_for_a_scale_or_a_type_are_refused_by_name(tmp_path: Path) -> None:
    source = plain(tmp_path / "m")
    tensors = raw_tensors(source)
    tensors["lm_head.weight"][1][0, :2] = 0x7F70, 0xFF70
    large = rewrite(source, tmp_path / "l", tensors)
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight in .* cannot be quantised: .* large"
    ):
        convert(large, tmp_path / "s", quantize=QuantSpec(4, 64))
    half = rewrite(source, tmp_path / "h", tensors, torch_dtype="float16")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight in .* not finite as f16"):
        convert(half, tmp_path / "s", quantize=QuantSpec(4, 64))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("layout", ["il16", "row"])
def test_quantising_takes_under_24_mib_beside_the_interpreter(tmp_path: Path, layout: str) -> None:
    """The table alone has 32 MiB, and an expert's matrix 1."""
    small = plain(tmp_path / "m")
    big = plain(
        tmp_path / "b",
        num_hidden_layers=1,
        hidden_size=1024,
        moe_intermediate_size=512,
        vocab_size=16384,
        tie_word_embeddings=True,
    )
    grown, peak = memory_of_conversion(small, big, tmp_path, layout)
    assert grown < 24 << 20
    assert peak < 300 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("layout", ["il16", "row"])
def test_memory_does_not_grow_with_an_expert(tmp_path: Path, layout: str) -> None:
    """Records of 32 and 25 MiB, from 113 MiB of plain numbers."""
    small = plain(tmp_path / "m")
    shape = {"num_hidden_layers": 1, "num_experts": 2, "num_experts_per_tok": 1}
    big = plain(tmp_path / "b", **shape, hidden_size=1024, moe_intermediate_size=19_200)
    grown, peak = memory_of_conversion(small, big, tmp_path, layout)
    assert grown < 24 << 20
    assert peak < 300 << 20


@pytest.mark.parametrize("borrow", [False, True])
@pytest.mark.parametrize("size", [5_000, 100_000, 1_000_000])
def test_neighbouring_experts_share_reads_that_end_with_their_tensor(
    size: int, borrow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, path, asked = 16, tmp_path / "f", list[tuple[int, int]]()
    data = np.random.default_rng(0).integers(0, 256, count * size + 1_000_000, np.uint8)
    path.write_bytes(data.tobytes())
    preadv = os.preadv

    def noted(fd: int, buffers: list[memoryview], offset: int) -> int:
        asked.append((offset, len(buffers[0])))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    with Streams(1 << 16) as streams:
        take = streams.borrow if borrow else streams.read
        for start in range(0, count * size, size):
            got = take("s", path, start, size, count * size - start - size)
            assert (got == data[start : start + size]).all()
    assert len(asked) <= max(2, count * size // (3 << 20))
    assert max(offset + nbytes for offset, nbytes in asked) < count * size + (128 << 10) + ALIGN


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60_000), st.integers(1, 20_000))))
def test_what_is_borrowed_is_what_is_read(reads: list[tuple[int, int, int]]) -> None:
    """And what was read stays what it is."""
    data = np.random.default_rng(0).integers(0, 256, 80_000, np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "f")
        path.write_bytes(data.tobytes())
        kept = []
        with Streams(4 * ALIGN) as streams:
            for stream, start, size in reads:
                wanted = data[start : start + size]
                left = data.size - start - size
                assert (streams.borrow(str(stream), path, start, size, left) == wanted).all()
                kept.append((streams.read(str(stream), path, start, size, left), wanted))
        assert all((found == wanted).all() for found, wanted in kept)


def test_a_matrix_that_is_turned_is_read_once_and_alone_in_memory(tmp_path: Path) -> None:
    size, step = 1 << 20, 1 << 12
    path = tmp_path / "f"
    path.write_bytes(bytes(range(256)) * (2 * size >> 8))
    with Streams(step) as streams:
        tracemalloc.start()
        try:
            for at in (0, size):
                first = id(streams.read_whole(path, at, size))
                assert id(streams.read_whole(path, at, size)) == first
            assert size < tracemalloc.get_traced_memory()[1] < size + (size >> 1)
        finally:
            tracemalloc.stop()
        assert streams.read_whole(path, size + 3, 2).tolist() == [3, 4]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_turning_an_expert_takes_little_more_than_its_matrix(tmp_path: Path) -> None:
    """8 MiB, the record 4, pieces less than 12."""
    spelling: dict[str, Any] = {"model_type": "gpt_oss", "blocks": True}
    small = plain(tmp_path / "m", **spelling)
    big = plain(
        tmp_path / "b",
        num_hidden_layers=1,
        hidden_size=1024,
        moe_intermediate_size=2048,
        **spelling,
    )
    grown, _ = memory_of_conversion(small, big, tmp_path, "il16")
    assert grown < 24 << 20
