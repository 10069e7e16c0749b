"""inspect, check (with the format doctor) and diff: what they say is true of the file."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_files import COMFY, fp8, int8, marker, metadata, nvfp4, parts, random_matrix, raw_file, save

from hswq_lab.checkpoint import Checkpoint, check, convert, diff, inspect, write
from hswq_lab.checkpoint.opening import open_files
from hswq_lab.formats import Nvfp4Weight, swap_nibbles, unswizzle


def structured(n, k, seed=0):
    """A weight as trained ones are: rows of different size, a few large columns."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=generator) * torch.exp(0.3 * torch.randn(n, 1, generator=generator))
    w[:, ::37] *= 4
    return (0.02 * w).bfloat16()


def as_modelopt(packed):
    """The tensors of an unrotated NVFP4 weight as ModelOpt stores them: low nibble first, linear scales."""
    tensors = packed.disk_tensors()
    linear = unswizzle(packed.scales, packed.codes.shape[0], packed.codes.shape[1] // 8)
    return tensors | {"weight": swap_nibbles(packed.codes), "weight_scale": linear.contiguous()}


@pytest.fixture
def pack(tmp_path):
    values = {
        "a.weight": nvfp4(structured(256, 256), 256, torch.tensor(0.25)),
        "b.weight": int8(structured(64, 256, 1), 256),
        "c.weight": fp8(structured(32, 64, 2)),
        "d.weight": structured(32, 64, 3),
        "d.bias": torch.zeros(32),
    }
    return write(tmp_path / "pack.safetensors", values.items(), {"who": "me"})


@pytest.fixture
def source(tmp_path):
    names = {"a": (256, 256, 0), "b": (64, 256, 1), "c": (32, 64, 2), "d": (32, 64, 3)}
    return save(
        tmp_path / "source.safetensors", {f"{n}.weight": structured(*args) for n, args in names.items()}
    )


def rules(report, severity="error"):
    return sorted({finding.rule for finding in report.findings if finding.severity == severity})


class TestInspect:
    def test_every_name_has_a_row_that_is_right(self, pack):
        report = inspect(pack)
        rows = {row.name: row for row in report.rows}
        assert list(rows) == list(Checkpoint.open(pack))
        a = rows["a.weight"]
        assert (a.format, a.group, a.calibrated, a.shape) == ("nvfp4", 256, True, (256, 256))
        assert a.bits == pytest.approx(4.5, abs=0.01)
        assert a.scales.input_scale == 0.25
        loaded = Checkpoint.open(pack)["a.weight"]
        assert a.scales.tensor == float(loaded.scale)
        assert a.scales.largest == 448
        assert 0 < a.scales.saturated_share < 0.1
        assert rows["b.weight"].scales.smallest == float(Checkpoint.open(pack)["b.weight"].scale.min())
        assert rows["c.weight"].scales.tensor == float(Checkpoint.open(pack)["c.weight"].scale)
        assert rows["d.weight"].scales is None
        assert report.bytes_by_format()["bfloat16"] == 2 * 32 * 64
        assert (report.matched, report.unmatched, report.prefix) == (3, [], COMFY)

    def test_codes_are_not_read(self, pack, monkeypatch):
        opened = Checkpoint.open(pack)
        monkeypatch.setattr("hswq_lab.formats.Nvfp4Weight.validate", None)
        read = []
        fill = opened.sources[0]._fill
        monkeypatch.setattr(
            opened.sources[0], "_fill", lambda view, *rest: read.append(len(view)) or fill(view, *rest)
        )
        inspect(opened)
        assert sum(read) < 256 * 256 // 2

    def test_tables_and_files(self, pack, tmp_path):
        report = inspect(pack)
        frame = report.to_frame()
        assert len(frame) == 5
        assert frame.set_index("name").loc["a.weight", "scale_input_scale"] == 0.25
        assert "<img" not in report.save(tmp_path / "r.html").read_text()
        report.save(tmp_path / "r.csv")
        assert json.loads(report.save(tmp_path / "r.json").read_text())["rows"][0]["name"] == "a.weight"
        assert "1 layers nvfp4, rotated by 256, calibrated" in str(report)

    def test_names_from_a_file_are_text_in_html(self, tmp_path):
        file = save(tmp_path / "x.safetensors", {"<img onerror=alert(1)>": torch.zeros(2)})
        for report in (inspect(file), check(file), diff(file, file)):
            assert "<img" not in report.save(tmp_path / "r.html").read_text()

    def test_values_in_memory_are_inspected_too(self, pack):
        opened = Checkpoint.open(pack)
        in_memory = inspect(Checkpoint.from_mapping(dict(opened.items())))
        assert in_memory.rows == inspect(pack).rows


class TestCheck:
    def test_a_good_pack_passes_and_its_layout_is_found(self, pack, source):
        report = check(pack, source)
        assert report.ok, str(report)
        assert report.to_dict()["ok"] is True
        assert {layer.name for layer in report.layers} == {"a.weight", "b.weight", "c.weight", "d.weight"}
        assert all(layer.cosine > 0.98 for layer in report.layers)
        (layout,) = report.layout.layers
        assert (layout.even, layout.scales, layout.factor, layout.group) == (
            "high",
            "swizzled",
            "multiplier",
            256,
        )
        assert "the layout of comfy" in str(report)
        alone = check(pack)
        assert alone.ok
        (layout,) = alone.layout.layers
        assert (layout.even, layout.scales, layout.factor) == ("undetermined", "swizzled", "multiplier")

    def test_damage_is_a_finding_not_an_exception(self, pack, tmp_path):
        content = pack.read_bytes()
        (tmp_path / "cut.safetensors").write_bytes(content[:-100])
        report = check(tmp_path / "cut.safetensors")
        assert not report.ok
        assert "truncated" in report.findings[0].problem
        assert not check(tmp_path / "nothing.safetensors").ok
        assert not check(raw_file(tmp_path / "x.safetensors", b"<html>")).ok

    def test_all_faults_are_named_not_only_the_first(self, tmp_path):
        bad_scale = nvfp4(structured(32, 64))
        bad_scale.scales.view(torch.uint8)[0, 0] = 0x7F
        tensors = parts("nan", bad_scale) | {"nan.comfy_quant": marker(bad_scale.marker())}
        tensors |= parts("zero", nvfp4(structured(32, 64), None, torch.tensor(0.0)))
        tensors |= {"half.weight": torch.zeros(32, 32, dtype=torch.uint8)}
        tensors |= {"inf.weight": torch.full((2, 2), float("inf"))}
        report = check(save(tmp_path / "x.safetensors", tensors, metadata(gone="nvfp4")))
        assert rules(report) == ["header-marker", "layer", "not-finite", "values"]
        assert {finding.tensor for finding in report.findings if finding.severity == "error"} == {
            "gone", "half.weight", "inf.weight", "nan.weight_scale", "zero.input_scale",
        }  # fmt: skip
        assert len(report.to_frame()) == len(report.findings)
        assert "half.weight" not in open_files(tmp_path / "x.safetensors").index.slots

    def test_a_layer_that_is_not_its_source_is_an_error(self, pack, tmp_path):
        wrong = {"a.weight": structured(256, 256, 9), "b.weight": structured(64, 256, 1)}
        report = check(pack, save(tmp_path / "wrong.safetensors", wrong))
        assert rules(report) == ["source"]
        assert next(finding.tensor for finding in report.findings if finding.rule == "source") == "a.weight"
        assert rules(report, "warning") == ["source"]  # c and d are missing there

    @pytest.mark.parametrize("name", ["a.bias", "norm.weight", "x_pad_token"])
    def test_what_is_not_packed_is_the_sources_own_too(self, tmp_path, name):
        source = {
            "a.weight": structured(256, 256),
            "a.bias": random_matrix(1, 256, 1)[0],
            "norm.weight": random_matrix(1, 256, 2)[0],
            "x_pad_token": random_matrix(1, 256, 3),
        }
        values = source | {
            "a.weight": nvfp4(source["a.weight"], 256),
            "x_pad_token": source["x_pad_token"][0],
            "norm.weight": source["norm.weight"].float(),  # another dtype, and another rounding of one
            "a.bias": (source["a.bias"].float() * (1 + 1e-4)).half(),
        }
        file = write(tmp_path / "x.safetensors", values.items())
        assert check(file, Checkpoint.from_mapping(source)).ok
        changed = values[name].clone()
        changed[3] *= 1.125
        file = write(tmp_path / "y.safetensors", (values | {name: changed}).items())
        (finding,) = (
            each for each in check(file, Checkpoint.from_mapping(source)).findings if each.severity == "error"
        )
        assert (finding.rule, finding.tensor) == ("source", name)
        assert "not packed" in finding.problem
        more = write(tmp_path / "z.safetensors", (values | {"note": torch.zeros(1)}).items())
        report = check(more, Checkpoint.from_mapping(source))
        assert report.ok
        assert any(each.tensor == "note" and each.severity == "info" for each in report.findings)

    def test_a_bias_that_a_lora_changed_is_explained(self, tmp_path):
        source = {"a.weight": structured(64, 64), "a.bias": torch.zeros(64), "b.bias": torch.zeros(64)}
        header = {
            "hswq.loras": json.dumps([{"name": "style", "strength": 0.8, "how": "bake"}]),
            "hswq.lora_seeds": '{"a": 1}',
        }
        for layer in "ab":
            file = write(
                tmp_path / "x.safetensors", (source | {f"{layer}.bias": torch.ones(64)}).items(), header
            )
            assert check(file, Checkpoint.from_mapping(source)).ok == (layer == "a")

    @pytest.mark.parametrize("told", [True, False], ids=["layers told", "layers not told"])
    def test_loras_in_a_file_explain_what_they_change_and_nothing_else(self, tmp_path, told):
        names = ("lora", "noise", "scaled", "untouched")
        source = {f"{name}.weight": structured(256, 256, seed) for seed, name in enumerate(names)}
        change = random_matrix(256, 4, 5).float() @ random_matrix(4, 256, 6).float()
        values = {name: value.float() for name, value in source.items()}
        for name in ("lora.weight", "untouched.weight"):
            values[name] += 0.6 * change * (values[name].norm() / change.norm())
        values["noise.weight"] = structured(256, 256, 9).float()
        values["scaled.weight"] *= 4
        header = {"hswq.loras": json.dumps([{"name": "style", "strength": 0.8, "how": "bake"}])}
        if told:
            header["hswq.lora_seeds"] = json.dumps(dict.fromkeys(("lora", "noise", "scaled"), 1))
        packed = {name: nvfp4(value.bfloat16(), 256) for name, value in values.items()}
        report = check(
            write(tmp_path / "baked.safetensors", packed.items(), header), Checkpoint.from_mapping(source)
        )
        assert next(layer.cosine for layer in report.layers if layer.name == "lora.weight") < 0.9
        wrong = [finding.tensor for finding in report.findings if finding.rule == "source"]
        assert wrong == [f"{name}.weight" for name in ("noise", "scaled", *(["untouched"] if told else []))]
        (info,) = [finding for finding in report.findings if finding.rule == "loras"]
        assert (info.severity, info.found) == ("info", "style ×0.8 (bake)")
        assert f"so {3 if told else 4} layers differ" in info.problem
        with_the_lora = Checkpoint.from_mapping(source, header)
        strict = check(tmp_path / "baked.safetensors", with_the_lora).findings
        assert sum(finding.rule == "source" for finding in strict) == 4

    @pytest.mark.parametrize("swapped", ["nibbles", "scales", "both"])
    @pytest.mark.parametrize("group", [None, 256])
    def test_another_layout_is_recognised_by_its_source(self, tmp_path, swapped, group):
        w = structured(256, 256)
        packed = nvfp4(w, group)
        tensors = packed.disk_tensors()
        foreign = as_modelopt(packed)
        tensors |= {key: foreign[key] for key in ("weight",) if swapped != "scales"}
        tensors |= {key: foreign[key] for key in ("weight_scale",) if swapped != "nibbles"}
        file = save(tmp_path / "x.safetensors", {f"a.{key}": value for key, value in tensors.items()})
        report = check(file, Checkpoint.from_mapping({"a.weight": w}))
        (layout,) = report.layout.layers
        assert layout.how == "source"
        assert layout.even == ("high" if swapped == "scales" else "low")
        assert layout.scales == ("swizzled" if swapped == "nibbles" else "linear")
        assert (layout.factor, layout.group) == ("multiplier", group)
        assert "layout" in rules(report)
        assert ("rotation" in rules(report)) == (group is not None)  # there is no marker that says so

    def test_what_makes_no_difference_is_not_told(self, tmp_path):
        w = torch.ones(256, 256).bfloat16()  # one scale for all blocks: their order does not show
        w[torch.rand(256, 256, generator=torch.Generator().manual_seed(0)) < 0.5] *= -1
        file = save(tmp_path / "x.safetensors", parts("a", nvfp4(w)))
        (layout,) = check(file, Checkpoint.from_mapping({"a.weight": w})).layout.layers
        assert (layout.even, layout.scales, layout.how) == ("high", "undetermined", "source")

    def test_a_rotation_that_the_marker_hides_is_found(self, tmp_path):
        w = structured(256, 256)
        file = save(tmp_path / "x.safetensors", parts("a", nvfp4(w, 256)), metadata(a="nvfp4"))
        report = check(file, Checkpoint.from_mapping({"a.weight": w}))
        assert rules(report) == ["rotation", "source"]
        assert "another basis" in str(report)

    @pytest.mark.parametrize(("factor", "stored"), [("divisor", 1 / 3e-5), ("multiplier", 3e-5)])
    def test_a_divisor_is_told_from_a_multiplier(self, tmp_path, factor, stored):
        w = structured(256, 256)
        packed = nvfp4(w)
        tensors = parts("a", packed)
        tensors["a.weight_scale_2"] = packed.scale if factor == "multiplier" else 1 / packed.scale
        file = save(tmp_path / "x.safetensors", tensors, metadata(a="nvfp4"))
        for source in (None, Checkpoint.from_mapping({"a.weight": w})):
            report = check(file, source)
            assert report.layout.layers[0].factor == factor
            assert ("layout" in rules(report, "warning" if source is None else "error")) == (
                factor == "divisor"
            )
        if factor == "divisor":
            assert any("not its size" in finding.problem for finding in report.findings)

    @pytest.mark.parametrize("kind", ["comfy", "modelopt"])
    def test_scale_order_without_a_source(self, tmp_path, kind):
        for name, w in {"rows": structured(256, 256), "noise": random_matrix(256, 256)}.items():
            packed = nvfp4(w)
            tensors = packed.disk_tensors() if kind == "comfy" else as_modelopt(packed)
            file = save(
                tmp_path / f"{name}.safetensors", {f"a.{key}": value for key, value in tensors.items()}
            )
            (layout,) = check(file).layout.layers
            order = "swizzled" if kind == "comfy" else "linear"
            assert layout.scales == (order if name == "rows" else "undetermined")
            assert layout.even == "undetermined"

    @pytest.mark.parametrize("group", [None, 256])
    @pytest.mark.parametrize("told", ["source", "statistics"])
    def test_split_and_renamed_layers_are_examined_too(self, tmp_path, group, told):
        """diffusers' names: q, k and v apart, each with a scale of its own; out and the embedder renamed."""
        stem = "layers.0.attention"
        weights = {f"to_{part}": (i + 1) * structured(256, 256, i) for i, part in enumerate("qkv")}
        weights["to_out.0"] = structured(256, 256, 7)
        tensors, source = {}, {f"{stem}.qkv.weight": torch.cat([weights[f"to_{p}"] for p in "qkv"])}
        source[f"{stem}.out.weight"] = weights["to_out.0"]
        for layer, w in weights.items():
            tensors |= {f"{stem}.{layer}.{key}": t for key, t in as_modelopt(nvfp4(w, group)).items()}
        file = save(tmp_path / "x.safetensors", tensors)
        report = check(file, Checkpoint.from_mapping(source) if told == "source" else None)
        rows = {row.part or row.layer: row for row in report.layout.layers}
        assert list(rows) == [*(f"{stem}.to_{p}.weight" for p in "qkv"), f"{stem}.out.weight"]
        assert {row.scales for row in rows.values()} == {"linear"}
        assert {row.how for row in rows.values()} == {told}
        assert {row.even for row in rows.values()} == {"low" if told == "source" else "undetermined"}
        if told == "source":
            assert report.layout.bases() == dict.fromkeys(source, group)
            assert "layout" in rules(report)
            done = convert(file, tmp_path / "ours.safetensors", source=Checkpoint.from_mapping(source))
            assert not rules(check(done.path, Checkpoint.from_mapping(source)))

    def test_scale_order_by_shape(self, tmp_path):
        packed = nvfp4(structured(144, 96))
        foreign = {f"a.{key}": value for key, value in as_modelopt(packed).items()}
        (layout,) = check(save(tmp_path / "x.safetensors", foreign)).layout.layers
        assert (layout.scales, layout.how) == ("linear", "shape")
        (layout,) = check(save(tmp_path / "y.safetensors", parts("a", packed))).layout.layers
        assert (layout.scales, layout.how) == ("swizzled", "shape")


class TestCompleteness:
    def test_a_whole_model_is_complete_whatever_the_shape_of_its_pad_tokens(self, tiny_tensors, tmp_path):
        assert not rules(check(save(tmp_path / "x.safetensors", tiny_tensors)))
        flat = tiny_tensors | {"x_pad_token": tiny_tensors["x_pad_token"].reshape(-1)}
        report = check(save(tmp_path / "y.safetensors", flat | {"more": torch.zeros(1)}))
        assert report.ok
        (finding,) = (each for each in report.findings if each.rule == "family")
        assert (finding.severity, finding.tensor) == ("info", "more")

    def test_what_is_missing_or_misshapen_is_named(self, tiny_tensors, tmp_path):
        tensors = dict(tiny_tensors)
        del tensors["layers.1.attention.out.weight"]
        tensors["layers.1.attention.k_norm.weight"] = torch.ones(8)
        report = check(save(tmp_path / "x.safetensors", tensors))
        named = {finding.tensor for finding in report.findings if finding.severity == "error"}
        assert named == {"layers.1.attention.out.weight", "layers.1.attention.k_norm.weight"}

    @pytest.mark.parametrize(
        ("name", "shape"),
        [
            ("layers.0.attention.q_norm.weight", ()),
            ("layers.0.attention.q_norm.weight", (0,)),
            ("layers.0.feed_forward.w1.weight", (0, 64)),
            ("x_embedder.weight", (64, 0)),
            (f"layers.{'9' * 5000}.x", (1,)),
            ("layers.\u0664.x", (1,)),
        ],
    )
    def test_hostile_sizes_are_no_known_model_or_wrong_shapes(self, tiny_tensors, tmp_path, name, shape):
        report = check(save(tmp_path / "x.safetensors", tiny_tensors | {name: torch.zeros(shape)}))
        assert "family" in rules(report) + rules(report, "info")

    def test_another_model_is_said_to_be_unknown(self, pack):
        assert "family" in rules(check(pack), "info")


class TestDiff:
    def test_the_same_file_is_the_same(self, pack):
        report = diff(pack, pack)
        assert report.same
        assert {row.status for row in report.rows} == {"same"}
        assert all(row.sqnr_db == float("inf") and row.cosine == 1 for row in report.rows)
        assert all(row.changed_codes == 0 for row in report.rows)
        assert report.metadata == {}

    def test_changes_are_counted(self, pack):
        one = Checkpoint.open(pack)
        a = one["a.weight"]
        codes = a.codes.clone()
        codes[5, 7] ^= 0x11  # both nibbles
        changed = type(a)(codes, a.scales, a.scale, a.shape, a.group, a.input_scale)
        other = one.with_values(
            {
                "a.weight": changed,
                "b.weight": nvfp4(structured(64, 256, 1)),
                "d.bias": torch.ones(32),
                "c.weight": fp8(structured(16, 64)),
                "e": torch.ones(1),
            },
            {"who": "you"},
        )
        rows = {row.name: row for row in diff(one, other).rows}
        assert (rows["a.weight"].status, rows["a.weight"].changed_codes) == ("changed", 2)
        assert rows["a.weight"].codes == 256 * 256
        assert 0.99 < rows["a.weight"].cosine < 1
        assert rows["b.weight"].status == "other format"
        assert (rows["b.weight"].format_a, rows["b.weight"].format_b) == ("int8_tensorwise/256", "nvfp4")
        assert 15 < rows["b.weight"].sqnr_db < 30
        assert rows["b.weight"].changed_codes is None
        assert rows["c.weight"].status == "other shape"
        assert (rows["d.bias"].status, rows["d.bias"].changed_codes) == ("changed", 32)
        assert rows["d.weight"].status == "same"
        assert (rows["e"].status, rows["e"].format_a, rows["e"].bytes_b) == ("only in b", None, 4)
        report = diff(one, other)
        assert report.metadata == {"who": ("me", "you")}
        assert not report.same
        assert json.loads(json.dumps(report.to_dict()))["result"] == "DiffReport"
        assert report.to_dict()["same"] is False
        assert len(report.to_frame()) == len(rows)

    def test_the_sign_of_a_zero_is_no_changed_value(self):
        a = nvfp4(structured(32, 64))
        zeros = (a.codes & 0x70) == 0  # the even column's code is a zero
        assert zeros.any()
        flipped = Nvfp4Weight(a.codes ^ (zeros.byte() * 0x80), a.scales, a.scale, a.shape, a.group)
        bias = torch.tensor([0.0, 1.0])
        one = Checkpoint.from_mapping({"a.weight": a, "a.bias": bias})
        other = Checkpoint.from_mapping({"a.weight": flipped, "a.bias": bias * torch.tensor([-1.0, 1.0])})
        rows = diff(one, other).rows
        assert [(row.status, row.changed_codes) for row in rows] == [("changed", 0), ("changed", 0)]

    def test_a_model_stands_for_its_checkpoint(self, pack):
        class Holder:
            checkpoint = Checkpoint.open(pack)

        assert diff(Holder(), pack).same

    def test_rotation_alone_is_a_small_difference_in_the_unrotated_basis(self):
        w = structured(64, 256)
        a, b = (Checkpoint.from_mapping({"a.weight": int8(w, group)}) for group in (None, 256))
        (row,) = diff(a, b).rows
        assert row.status == "other format"
        assert row.cosine > 0.9995


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_values_beyond_all_bounds_are_findings_beside_a_source(tmp_path, value):
    right = torch.ones(64, 64)
    source = save(tmp_path / "source.safetensors", {f"a.{leaf}": right for leaf in ("weight", "other")})
    wrong = right.clone()
    wrong[3, 3] = value
    file = save(tmp_path / "file.safetensors", {f"a.{leaf}": wrong for leaf in ("weight", "other")})
    for first, second in ((file, source), (source, file)):
        wrong_ones = [found.tensor for found in check(first, second).findings if found.severity == "error"]
        assert {"a.weight", "a.other"} <= set(wrong_ones)
