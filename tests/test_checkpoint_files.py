"""Files that belong together: parts with and without index, diffusers folders, split q, k, v."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from checkpoint_files import COMFY, fp8, int8, marker, nvfp4, parts, random_matrix, save

from hswq_lab import ops, packing
from hswq_lab.checkpoint import Checkpoint
from hswq_lab.errors import HswqError
from hswq_lab.formats import rotate_fp32, unswizzle


def index_file(folder, weight_map, name="model.safetensors.index.json"):
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder / name


@pytest.fixture
def shards(tmp_path):
    save(tmp_path / "m-00001-of-00002.safetensors", {"a": torch.zeros(2), "b": torch.ones(2)}, {"k": "v"})
    save(tmp_path / "m-00002-of-00002.safetensors", {"c": torch.full((2,), 2.0)}, {"k": "v", "l": "w"})
    names = {"a": 1, "b": 1, "c": 2}
    return index_file(tmp_path, {name: f"m-0000{n}-of-00002.safetensors" for name, n in names.items()})


class TestParts:
    def test_an_index_and_its_folder_open_alike(self, shards):
        for path in (shards, shards.parent):
            checkpoint = Checkpoint.open(path)
            assert [float(checkpoint[name][0]) for name in "abc"] == [0, 1, 2]
            assert checkpoint.metadata == {"k": "v", "l": "w"}
            assert checkpoint.path == path

    def test_parts_without_an_index(self, shards):
        shards.unlink()
        assert set(Checkpoint.open(shards.parent)) == {"a", "b", "c"}
        (shards.parent / "m-00001-of-00002.safetensors").unlink()
        with pytest.raises(HswqError, match="parts of the checkpoint are missing"):
            Checkpoint.open(shards.parent)

    def test_one_part_alone_opens_with_a_warning(self, shards):
        checkpoint = Checkpoint.open(shards.parent / "m-00002-of-00002.safetensors")
        assert set(checkpoint) == {"c"}
        assert "one of 00002 parts" in checkpoint.warnings[0]

    @pytest.mark.parametrize(
        "name",
        ["../evil.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b", "x\0y"],
    )
    def test_an_index_never_leads_out_of_its_folder(self, shards, name):
        (shards.parent / "sub").mkdir()
        for place in ("sub/x.safetensors", "../evil.safetensors"):
            save(shards.parent / place, {"a": torch.zeros(2)})
        index_file(shards.parent, {"a": name})
        with pytest.raises(HswqError, match="index leads out"):
            Checkpoint.open(shards)

    def test_links_lead_out_only_into_a_hub_cache(self, tmp_path):
        outside = save(tmp_path / "secret.safetensors", {"a": torch.zeros(2)})
        snapshot = tmp_path / "hub" / "snapshots" / "rev"
        blobs = tmp_path / "hub" / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        (snapshot / "m.safetensors").symlink_to(outside)
        index = index_file(snapshot, {"a": "m.safetensors"})
        with pytest.raises(HswqError, match="a link that leads out"):
            Checkpoint.open(index)
        outside.rename(blobs / "0123")
        (snapshot / "m.safetensors").unlink()
        (snapshot / "m.safetensors").symlink_to(blobs / "0123")
        assert set(Checkpoint.open(index)) == {"a"}

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ("{", "not valid JSON"),
            ("[]", "no weight_map"),
            ('{"weight_map": {}}', "no weight_map"),
            ('{"weight_map": {"a": 3}}', "no file name"),
            ('{"weight_map": {"a": ["m"]}}', "no file name"),
            ("[" * 100_000, "not valid JSON"),
            ('{"weight_map": {"a": "m-00001-of-00002.safetensors", "a": "n"}}', "'a' is there twice"),
            (json.dumps({"weight_map": {"a": 300 * "x" + ".safetensors"}}), "does not exist"),
            ('{"weight_map": {"a": "\\ud800.safetensors"}}', "does not exist"),
        ],
    )
    def test_an_index_that_is_none_is_refused(self, shards, content, words):
        shards.write_text(content)
        with pytest.raises(HswqError, match=words) as refusal:
            Checkpoint.open(shards)
        assert str(refusal.value).encode()

    def test_index_and_parts_must_agree(self, shards):
        both = json.loads(shards.read_text())["weight_map"]
        index_file(shards.parent, both | {"d": both["a"]})
        with pytest.raises(HswqError, match="names a tensor that its part does not hold"):
            Checkpoint.open(shards)
        index_file(shards.parent, {name: file for name, file in both.items() if name != "b"})
        with pytest.raises(HswqError, match="does not name"):
            Checkpoint.open(shards)
        index_file(shards.parent, both | {"d": "gone.safetensors"})
        with pytest.raises(HswqError, match="does not exist"):
            Checkpoint.open(shards)

    def test_parts_must_not_overlap_or_disagree(self, shards):
        shards.unlink()
        save(shards.parent / "m-00002-of-00002.safetensors", {"c": torch.zeros(2)}, {"k": "other"})
        with pytest.raises(HswqError, match="disagree in their metadata"):
            Checkpoint.open(shards.parent)
        save(shards.parent / "m-00002-of-00002.safetensors", {"a": torch.zeros(2)})
        with pytest.raises(HswqError, match="hold the same tensor"):
            Checkpoint.open(shards.parent)

    def test_the_parts_of_a_layer_may_lie_in_different_files(self, tmp_path):
        packed = nvfp4(random_matrix(32, 64), 64)
        tensors = parts("a", packed) | {"a.comfy_quant": marker(packed.marker())}
        for number, (name, tensor) in enumerate(tensors.items(), start=1):
            save(tmp_path / f"m-{number}-of-{len(tensors)}.safetensors", {name: tensor})
        assert Checkpoint.open(tmp_path)["a.weight"].same_bits(packed)

    def test_a_folder_with_none_or_several_candidates_is_refused(self, tmp_path):
        with pytest.raises(HswqError, match=r"no \.safetensors file"):
            Checkpoint.open(tmp_path)
        save(tmp_path / "x.safetensors", {"a": torch.zeros(2)})
        assert set(Checkpoint.open(tmp_path)) == {"a"}
        save(tmp_path / "y.safetensors", {"a": torch.zeros(2)})
        with pytest.raises(HswqError, match=r"x\.safetensors, y\.safetensors"):
            Checkpoint.open(tmp_path)


def block(split):
    """A layer's tensors in diffusers' or in native names."""
    q, k, v, out = (random_matrix(32, 64, seed) for seed in range(4))
    norm = random_matrix(1, 16, 5)[0]
    if split:
        return {
            "layers.0.attention.to_q.weight": q,
            "layers.0.attention.norm_q.weight": norm,
            "layers.0.attention.to_v.weight": v,
            "layers.0.attention.to_k.weight": k,
            "layers.0.attention.to_out.0.weight": out,
            "all_x_embedder.2-1.bias": norm,
            "all_final_layer.2-1.adaLN_modulation.1.weight": out,
            "cap_pad_token": norm,
        }
    return {
        "layers.0.attention.qkv.weight": torch.cat([q, k, v]),
        "layers.0.attention.q_norm.weight": norm,
        "layers.0.attention.out.weight": out,
        "x_embedder.bias": norm,
        "final_layer.adaLN_modulation.1.weight": out,
        "cap_pad_token": norm,
    }


class TestDiffusers:
    def test_a_folder_reads_as_the_native_layout(self, tmp_path):
        folder = tmp_path / "pipe"
        (folder / "transformer").mkdir(parents=True)
        (folder / "vae").mkdir()
        save(folder / "transformer" / "diffusion_pytorch_model.safetensors", block(split=True))
        for path in (folder, folder / "transformer"):
            checkpoint = Checkpoint.open(path)
            assert set(checkpoint) == set(block(split=False))
            for name, tensor in block(split=False).items():
                assert torch.equal(checkpoint[name], tensor), name
                assert checkpoint.entry(name).shape == tuple(tensor.shape)
                assert checkpoint.entry(name).name == name
            assert checkpoint.prefix == COMFY
        native = Checkpoint.from_mapping(block(split=False)).save(tmp_path / "native.safetensors")
        again = Checkpoint.open(checkpoint.save(tmp_path / "again.safetensors"))
        assert all(torch.equal(again[name], Checkpoint.open(native)[name]) for name in again)

    @pytest.mark.parametrize("missing", ["to_q", "to_k", "to_v"])
    def test_an_incomplete_set_of_parts_is_refused(self, tmp_path, missing):
        tensors = block(split=True)
        del tensors[f"layers.0.attention.{missing}.weight"]
        with pytest.raises(HswqError, match="not exactly in q, k and v") as caught:
            Checkpoint.open(save(tmp_path / "x.safetensors", tensors))
        assert caught.value.tensor == "layers.0.attention.qkv.weight"

    def test_both_layouts_at_once_are_refused(self, tmp_path):
        for native in ("layers.0.attention.qkv.weight", "layers.0.attention.out.weight"):
            tensors = block(split=True) | {native: block(split=False)[native]}
            with pytest.raises(HswqError, match=r"native|not exactly"):
                Checkpoint.open(save(tmp_path / "x.safetensors", tensors))

    def test_parts_of_different_kinds_are_refused(self, tmp_path):
        tensors = block(split=True)
        tensors["layers.0.attention.to_k.weight"] = tensors["layers.0.attention.to_k.weight"].float()
        with pytest.raises(HswqError, match="stored differently"):
            Checkpoint.open(save(tmp_path / "x.safetensors", tensors))

    def test_other_tensors_below_a_split_layer_are_left_alone(self, tmp_path):
        tensors = {f"layers.0.attention.to_{part}.extra.weight": random_matrix(4, 8) for part in "qkv"}
        assert set(Checkpoint.open(save(tmp_path / "x.safetensors", tensors))) == set(tensors)


def split_pack(tmp_path, make, source):
    """q, k, v packed apart, as a file in diffusers' names."""
    tensors = {}
    for part, w in zip("qkv", source, strict=True):
        packed = make(w)
        name = f"layers.0.attention.to_{part}"
        tensors |= parts(name, packed) | {f"{name}.comfy_quant": marker(packed.marker())}
    return Checkpoint.open(save(tmp_path / "split.safetensors", tensors))


def error(values, source):
    return float((values - source.float()).norm() / source.float().norm())


class TestPackedParts:
    source = tuple(amplitude * random_matrix(96, 256, seed) for seed, amplitude in enumerate((1, 0.05, 0.2)))

    @pytest.mark.parametrize("group", [None, 256])
    def test_nvfp4_parts_are_repacked_with_a_common_scale(self, tmp_path, group):
        checkpoint = split_pack(tmp_path, lambda w: nvfp4(w, group, torch.tensor(0.5)), self.source)
        fused = checkpoint["layers.0.attention.qkv.weight"]
        together = packing.pack_weight(torch.cat(self.source), "nvfp4", group)
        assert (fused.shape, fused.group) == ((288, 256), group)
        assert float(fused.scale) == pytest.approx(float(together.scale), rel=1e-2)
        assert float(fused.input_scale) == 0.5
        values = packing.dequantize(fused).split(96)
        wanted = packing.dequantize(together).split(96)
        for part, value, right in zip(self.source, values, wanted, strict=True):
            assert error(value, part) < 1.1 * error(right, part)
        assert "joined with one common tensor scale" in checkpoint.warnings[0]

    def test_taking_one_of_the_three_scales_would_be_noticed(self, tmp_path):
        checkpoint = split_pack(tmp_path, nvfp4, self.source)
        fused = checkpoint["layers.0.attention.qkv.weight"]
        wrong = type(fused)(fused.codes, fused.scales, nvfp4(self.source[1]).scale, fused.shape, fused.group)
        assert error(packing.dequantize(wrong), torch.cat(self.source)) > 0.5

    @pytest.mark.parametrize("group", [None, 256])
    def test_int8_parts_keep_every_byte(self, tmp_path, group):
        checkpoint = split_pack(tmp_path, lambda w: int8(w, group), self.source)
        together = packing.pack_weight(torch.cat(self.source), "int8_tensorwise", group)
        assert checkpoint["layers.0.attention.qkv.weight"].same_bits(together)

    def test_fp8_parts_get_the_largest_scale(self, tmp_path):
        fused = split_pack(tmp_path, fp8, self.source)["layers.0.attention.qkv.weight"]
        assert float(fused.scale) == float(fp8(self.source[0]).scale)
        for value, part in zip(packing.dequantize(fused).split(96), self.source, strict=True):
            assert error(value, part) < 0.06

    def test_a_partly_calibrated_set_is_not_calibrated(self, tmp_path):
        inputs = iter([torch.tensor(0.5), None, torch.tensor(0.25)])
        checkpoint = split_pack(tmp_path, lambda w: nvfp4(w, None, next(inputs)), self.source)
        assert not checkpoint.entry("layers.0.attention.qkv.weight").calibrated
        assert checkpoint["layers.0.attention.qkv.weight"].input_scale is None
        assert any("only some of q, k and v" in text for text in checkpoint.warnings)

    @pytest.mark.parametrize("rows", [96, 40])
    def test_parts_with_one_tensor_scale_keep_every_byte(self, tmp_path, rows):
        together = nvfp4(torch.cat([w[:rows] for w in self.source]), 256)

        def same_scale(w):
            codes, scales = ops.quantize_nvfp4(rotate_fp32(w[:rows].float(), 256), together.scale, "rtn")
            return replace(together, codes=codes, scales=scales, shape=(rows, 256))

        checkpoint = split_pack(tmp_path, same_scale, self.source)
        assert checkpoint["layers.0.attention.qkv.weight"].same_bits(together)
        assert checkpoint.warnings == [], "nothing is packed again"

    def test_only_parts_with_a_smaller_tensor_scale_are_packed_again(self, tmp_path):
        fused = split_pack(tmp_path, nvfp4, self.source)["layers.0.attention.qkv.weight"]
        first = nvfp4(self.source[0])
        assert torch.equal(fused.codes[:96], first.codes)
        wanted = unswizzle(first.scales, 96, 16).view(torch.uint8)
        assert torch.equal(unswizzle(fused.scales, 288, 16)[:96].view(torch.uint8), wanted)

    def test_what_parts_say_about_activations_is_kept(self, tmp_path):
        basis = random_matrix(4, 256, 9).to(torch.float8_e4m3fn)
        inputs = iter([0.5, 0.25, 0.75])

        def made(w):
            scale = torch.tensor(next(inputs))
            return replace(nvfp4(w, None, scale), basis=basis, activation_scales="sweep")

        checkpoint = split_pack(tmp_path, made, self.source)
        fused, entry = (read("layers.0.attention.qkv.weight") for read in (checkpoint.get, checkpoint.entry))
        assert (float(fused.input_scale), fused.activation_scales) == (0.75, "sweep")
        assert torch.equal(fused.basis.view(torch.uint8), basis.view(torch.uint8))
        assert (entry.rank, entry.activation_scales) == (4, "sweep")
        again = Checkpoint.open(checkpoint.save(tmp_path / "native.safetensors"))
        assert again["layers.0.attention.qkv.weight"].same_bits(fused)

    @pytest.mark.parametrize("what", ["rank", "basis", "activation_scales"])
    def test_what_parts_say_differently_about_activations_is_refused(self, tmp_path, what):
        bases = [random_matrix(4, 256, 9 if what == "activation_scales" else seed) for seed in range(3)]
        ranks, methods = [4, 4, 4], ["sweep", "sweep", "sweep"]
        if what == "rank":
            ranks[1] = 3
        if what == "activation_scales":
            methods[1] = "rtn"
        said = iter(zip(bases, ranks, methods, strict=True))

        def made(w):
            basis, rank, method = next(said)
            return replace(nvfp4(w), basis=basis[:rank].to(torch.float8_e4m3fn), activation_scales=method)

        with pytest.raises(
            HswqError, match="different input bases" if what == "basis" else "stored differently"
        ):
            split_pack(tmp_path, made, self.source)["layers.0.attention.qkv.weight"]

    def test_different_formats_are_refused(self, tmp_path):
        weights = zip((nvfp4, int8, nvfp4), self.source, strict=True)
        tensors = {}
        for part, (make, w) in zip("qkv", weights, strict=True):
            tensors |= parts(f"layers.0.attention.to_{part}", make(w))
        with pytest.raises(HswqError, match="stored differently"):
            Checkpoint.open(save(tmp_path / "x.safetensors", tensors))

    def test_a_fused_pack_is_saved_native_and_stays(self, tmp_path):
        checkpoint = split_pack(tmp_path, nvfp4, self.source)
        again = Checkpoint.open(checkpoint.save(tmp_path / "native.safetensors"))
        name = "layers.0.attention.qkv.weight"
        assert again[name].same_bits(checkpoint[name])
        assert again.warnings == []
