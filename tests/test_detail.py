"""One layer under the glass: codes, scales, tails, the distance to a source."""

from __future__ import annotations

import pytest
import torch

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.detail import TAIL_BINS, layer_detail
from hswq_lab.errors import HswqError
from hswq_lab.formats import pack_nibbles
from hswq_lab.loading import save
from hswq_lab.packing import pack_weight
from hswq_lab.plots import detail_figure


def nvfp4_layer(pack):
    return next(entry.name for entry in pack.checkpoint.entries() if entry.format == "nvfp4")


def test_the_code_histogram_counts_every_logical_weight(tiny_pack):
    name = nvfp4_layer(tiny_pack)
    detail = layer_detail(tiny_pack, name)
    assert sum(detail.code_counts) == detail.shape[0] * detail.shape[1]
    assert detail.code_values == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]
    weight = tiny_pack.checkpoint[name]
    six = pack_nibbles(torch.full((1, 2), 7, dtype=torch.uint8))
    assert six.item() == 0x77
    nibbles = torch.stack([weight.codes >> 4, weight.codes & 15])
    assert detail.code_counts[-1] == int((nibbles == 7).sum())


def test_a_detail_knows_the_basis_and_the_distance_to_the_source(tiny_model, tiny_pack):
    name = nvfp4_layer(tiny_pack)
    detail = layer_detail(tiny_pack, name, tiny_model)
    assert (detail.group, detail.marker["convrot"]) == (64, True)
    assert 15 < detail.sqnr_db < 30
    assert [len(tails.counts) for tails in detail.tails] == [TAIL_BINS, TAIL_BINS]
    assert all(sum(tails.counts) == detail.shape[0] * detail.shape[1] for tails in detail.tails)
    assert detail.tails[0].crest != detail.tails[1].crest
    assert layer_detail(tiny_pack, name.removesuffix(".weight")).name == name


def test_a_16_bit_layer_has_tails_and_no_codes(tiny_model):
    detail = layer_detail(tiny_model, "x_embedder")
    assert (detail.code_values, detail.scales, detail.marker) == ([], [], {})
    assert detail.bits == 16
    figure = detail_figure(detail)
    assert [trace.type for trace in figure.data] == ["scatter", "scatter"], (
        "no axes for what it does not have"
    )


def test_one_outlier_shows_in_the_tail_and_the_rotation_spreads_it():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    weight[3, 5] = 60.0
    used, rotated = layer_detail(Checkpoint.from_mapping({"a.weight": weight}), "a").tails
    assert used.crest > 20
    assert used.kurtosis > 50
    assert rotated.crest < used.crest / 3


def test_a_source_of_another_shape_and_an_empty_tensor_are_refused_by_name():
    weights = Checkpoint.from_mapping({"a.weight": torch.ones(16, 32), "b.weight": torch.ones(0, 16)})
    other = Checkpoint.from_mapping({"a.weight": torch.ones(32, 16)})
    with pytest.raises(HswqError, match="another shape") as refused:
        layer_detail(weights, "a", other)
    assert (refused.value.tensor, refused.value.expected) == ("a.weight", [16, 32])
    with pytest.raises(HswqError, match="empty tensor"):
        layer_detail(weights, "b")


@pytest.mark.parametrize(
    ("form", "title", "columns"),
    [("nvfp4", "block scales", 8), ("mxfp8", "block scales", 4), ("int8_tensorwise", "row scales", 1),
     ("float8_e4m3fn", "tensor scale", 1)],
)  # fmt: skip
def test_the_map_of_scales_lies_over_the_rows_and_columns_of_the_weight(form, title, columns):
    weight = torch.randn(400, 128, generator=torch.Generator().manual_seed(0))
    packed = pack_weight(weight, form, 64 if form in ("nvfp4", "int8_tensorwise") else None)
    detail = layer_detail(Checkpoint.from_mapping({"a.weight": packed}), "a")
    figure = detail_figure(detail)
    heat = next(trace for trace in figure.data if trace.type == "heatmap")
    assert len(heat.z[0]) == columns
    for first, step, cells, length in (
        (heat.x0, heat.dx, columns, 128), (heat.y0, heat.dy, len(heat.z), 400)
    ):  # fmt: skip
        assert first - step / 2 == pytest.approx(-0.5)
        assert first + (cells - 0.5) * step == pytest.approx(length - 0.5)
    assert any(title in note.text for note in figure.layout.annotations)


def test_a_tensor_that_is_not_packed_says_its_dtype():
    detail = layer_detail(Checkpoint.from_mapping({"a.weight": torch.ones(16, 32)}), "a")
    assert "not packed, float32" in detail_figure(detail).layout.title.subtitle.text


def test_an_unknown_layer_is_refused(tiny_pack):
    with pytest.raises(HswqError, match="no such tensor"):
        layer_detail(tiny_pack, "layers.9.attention.qkv")


def test_a_tensor_has_a_table_too_and_a_detail_names_its_file(tiny_model, tmp_path):
    file = save(tiny_model, tmp_path / "plain.safetensors")
    detail = layer_detail(file, "x_embedder")
    table = detail.to_frame()
    assert list(table) == ["from", *(tails.basis for tails in detail.tails)]
    assert table["as it is used"].sum() == detail.shape[0] * detail.shape[1]
    assert str(detail).startswith(f"{file}: x_embedder.weight, not packed")
