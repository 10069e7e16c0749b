"""hswq-lab bake, lora convert and lora merge: what arrives, what is said, and what is refused."""

from __future__ import annotations

import json
import zlib

import pytest
import torch
from safetensors.torch import load_file, save_file

import hswq_lab as hl
from hswq_lab.checkpoint import Checkpoint
from hswq_lab.cli import main


def test_bake_writes_a_pack_that_has_the_lora_and_says_so(pack_file, lora_file, tmp_path, capsys):
    out, evidence = tmp_path / "baked.safetensors", tmp_path / "e.json"
    assert main(["bake", pack_file, f"{lora_file}:0.5", "-o", str(out), "--json", str(evidence)]) == 0
    assert "nvfp4_baked=1" in capsys.readouterr().out
    assert json.loads(evidence.read_text())["loras"] == ["style ×0.5 (bake)"]
    baked = Checkpoint.open(out)
    name = "layers.0.feed_forward.w1"
    assert not baked[f"{name}.weight"].same_bits(Checkpoint.open(pack_file)[f"{name}.weight"])
    (told,) = json.loads(baked.metadata["hswq.loras"])
    assert (told["name"], told["strength"], told["how"]) == ("style", 0.5, "bake")
    assert json.loads(baked.metadata["hswq.lora_seeds"]) == {name: zlib.crc32(name.encode())}


def test_bake_takes_several_loras_and_a_source(pack_file, model_file, lora_file, tmp_path, capsys):
    other = tmp_path / "other:1.safetensors"
    values = {key: value.flip(0) for key, value in load_file(lora_file).items()}
    save_file(values, other)
    out = tmp_path / "baked.safetensors"
    arguments = ["bake", pack_file, f"{lora_file}:0.8", str(other), "-o", str(out), "--source", model_file]
    assert main(arguments) == 0
    assert "nvfp4_baked=1" in capsys.readouterr().out
    told = json.loads(Checkpoint.open(out).metadata["hswq.loras"])
    assert [(item["name"], item["strength"], item["how"]) for item in told] == [
        ("style", 0.8, "bake_from_source"),
        ("other:1", 1.0, "bake_from_source"),
    ]


def test_a_baked_file_is_not_baked_again_unawares(pack_file, model_file, lora_file, tmp_path, capsys):
    once, twice = tmp_path / "once.safetensors", tmp_path / "twice.safetensors"
    assert main(["bake", pack_file, lora_file, "-o", str(once)]) == 0
    capsys.readouterr()
    again = ["bake", str(once), f"{lora_file}:0.5", "-o", str(twice)]
    assert main(again) == 2
    message = capsys.readouterr().err
    assert "baked into this file already" in message
    assert "style ×1 (bake)" in message
    assert "--allow-baked" in message
    assert not twice.exists()
    assert main([*again, "--source", model_file, "--allow-baked"]) == 2, "the source knows no earlier bake"
    assert main([*again, "--allow-baked"]) == 0
    told = json.loads(Checkpoint.open(twice).metadata["hswq.loras"])
    assert [item["strength"] for item in told] == [1.0, 0.5]


@pytest.mark.parametrize("lora", ["nowhere.safetensors", "{lora}:strong"])
def test_a_lora_that_cannot_be_baked_leaves_nothing(pack_file, lora_file, tmp_path, lora, capsys):
    out = tmp_path / "x.safetensors"
    assert main(["bake", pack_file, lora.format(lora=lora_file), "-o", str(out)]) == 2
    assert capsys.readouterr().err.startswith("hswq-lab: ")
    assert not out.exists()


def test_lora_convert_and_merge(model_file, lora_file, tmp_path, capsys):
    kohya, merged = tmp_path / "kohya.safetensors", tmp_path / "merged.safetensors"
    model = ["--model", model_file]
    assert main(["lora", "convert", lora_file, "-o", str(kohya), "--to", "kohya", *model]) == 0
    assert "lora_unet_layers_0_feed_forward_w1.lora_down.weight" in load_file(kohya)
    assert (
        main(["lora", "merge", f"{lora_file}:0.5", f"{kohya}:0.5", "-o", str(merged), "--rank", "2", *model])
        == 0
    )
    assert "at rank 2: error 0.00%" in capsys.readouterr().out
    one, both = (hl.load_lora(path).dense_deltas(hl.load(model_file)) for path in (lora_file, merged))
    torch.testing.assert_close(both["layers.0.feed_forward.w1"], one["layers.0.feed_forward.w1"])


def test_bake_asks_whether_it_can_write_before_any_work(pack_file, lora_file, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("hswq_lab.cli.lora.load", lambda *_: pytest.fail("work was begun"))
    bake = ["bake", pack_file, f"{lora_file}:0.5", "--force", "-o"]
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    link = tmp_path / "link.safetensors"
    link.symlink_to(pack_file)
    for out, message in [
        (pack_file, "file that is being read"),
        (str(link), "file that is being read"),
        (lora_file, "file that is being read"),
        (str(folder), "is a folder"),
        (str(tmp_path / "nowhere" / "x.safetensors"), "folder does not exist"),
        ("/proc/x.safetensors", "cannot be written to"),
    ]:
        assert main([*bake, str(out)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["inspect", "bake", "convert", "lora convert", "lora merge"])
def test_every_verb_reads_a_full_lokr_as_it_is_told(verb, model_file, tmp_path, capsys):
    """ΔW = w1 ⊗ w2, or half of it: alpha / dim."""
    name = "lycoris_layers_0_feed_forward_w1"
    generator = torch.Generator().manual_seed(3)
    factors = {
        f"{name}.lokr_w1": torch.randn(4, 4, generator=generator),
        f"{name}.lokr_w2": torch.randn(32, 16, generator=generator) * 0.05,
    }
    lokr = tmp_path / "lokr.safetensors"
    save_file(factors | {f"{name}.alpha": torch.tensor(2.0)}, lokr, {"ss_network_dim": "4"})
    whole = float(torch.kron(*factors.values()).norm())
    found = []
    for told in ([], ["--full-lokr-scale", "alpha/dim"]):
        out = tmp_path / f"{len(told)}.safetensors"
        report = tmp_path / "r.json"
        arguments = {
            "inspect": ["inspect", str(lokr), "--model", model_file, "--json", str(report)],
            "bake": ["bake", model_file, str(lokr), "-o", str(out)],
            "convert": ["convert", str(lokr), "-o", str(out), "--to", "native", "--model", model_file],
            "lora convert": ["lora", "convert", str(lokr), "-o", str(out), "--model", model_file],
            "lora merge": ["lora", "merge", str(lokr), "--rank", "64", "-o", str(out), "--model", model_file],
        }[verb]
        assert main([*arguments, *told]) == 0, capsys.readouterr().err
        layer = "layers.0.feed_forward.w1"
        if verb == "inspect":
            norm = json.loads(report.read_text())["rows"][0]["norm"]
        elif verb == "bake":
            before, after = (Checkpoint.open(file)[f"{layer}.weight"].float() for file in (model_file, out))
            norm = float((after - before).norm())
        else:
            norm = float(hl.load_lora(out).dense_deltas({layer: (128, 64)})[layer].norm())
        found.append(norm)
    assert found == pytest.approx([whole, whole / 2], rel=0.02)
