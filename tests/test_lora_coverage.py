"""A LoRA of which most modules match no layer: allowed where that is asked for, and told wherever it can be seen."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

import hswq_lab as hl
from hswq_lab.cli import main
from hswq_lab.errors import HswqError
from hswq_lab.lora import merge_loras

TOLD = "partly: 1 of 5 modules applied; 4 match no layer: "


@pytest.fixture
def partly(lora_file, tmp_path):
    """The LoRA of one layer, beside four modules that go nowhere."""
    tensors = load_file(lora_file)
    more = {
        key.replace("layers.0", f"other.{number}"): value.clone()
        for number in range(4)
        for key, value in tensors.items()
    }
    path = tmp_path / "partly.safetensors"
    save_file(tensors | more, path)
    return str(path)


@pytest.mark.parametrize("how", ["branch", "bake"])
def test_modules_left_out_are_in_the_report_and_in_all_its_files(tiny_pack, partly, tmp_path, how):
    lora = hl.load_lora(partly)
    with pytest.raises(HswqError, match=r"allow_unmatched=True \(--allow-unmatched"):
        tiny_pack.attach(lora, how=how)
    report = tiny_pack.attach(lora, how=how, allow_unmatched=True)
    for each in (report, tiny_pack.bake_report()):
        assert each.verdict == "OK"
        assert each.warnings[0].startswith(f"{TOLD}transformer.other.0.feed_forward.w1, ")
        assert each.warnings[0].endswith(", …")
        assert TOLD in str(each)
        assert f"partly ×1 ({how}), 1 of 5 modules: OK" in str(each)
    content = json.loads(report.save(tmp_path / "r.json").read_text())
    assert content["coverage"][0]["modules"] == 5
    assert len(content["coverage"][0]["left_out"]) == 4
    assert content["warnings"] == report.warnings
    assert TOLD in report.save(tmp_path / "r.html").read_text()
    table = pd.read_csv(report.save(tmp_path / "r.csv"))
    assert list(table["verdict"]) == ["OK", *["LEFT OUT"] * 4]
    assert table["layer"][4] == "transformer.other.3.feed_forward.w1"
    told = tiny_pack.report()
    assert any(TOLD in text for text in told.warnings)
    assert told.loras == [f"partly ×1 ({how}), 1 of 5 modules on 1 layers: OK"]
    effect = tiny_pack.effect(seeds=[1], steps=1)
    assert effect.warnings[0].startswith(TOLD)
    assert effect.to_dict()["warnings"] == effect.warnings
    assert TOLD in str(effect)


def test_a_whole_lora_has_nothing_to_tell(tiny_pack, lora_file):
    report = tiny_pack.attach(hl.load_lora(lora_file), how="bake", allow_unmatched=True)
    assert not any("modules" in text for text in report.warnings)
    assert set(report.to_frame()["verdict"]) == {"OK"}
    assert report.loras == ("style ×1 (bake)",)
    assert tiny_pack.lora_remarks == []


def test_a_baked_file_says_that_not_all_of_the_lora_is_in_it(pack_file, lora_file, partly, tmp_path, capsys):
    out, result = tmp_path / "baked.safetensors", tmp_path / "r.json"
    command = ["bake", pack_file, partly, "-o", str(out)]
    assert main(command) == 2
    capsys.readouterr()
    assert main([*command, "--allow-unmatched", "--json", str(result)]) == 0
    assert TOLD in capsys.readouterr().out
    assert json.loads(result.read_text())["warnings"][0].startswith(TOLD)
    assert hl.load(out).report().baked == ["partly ×1 (bake), 1 of 5 modules"]
    assert main(["inspect", str(out)]) == 0
    assert "partly ×1 (bake), 1 of 5 modules" in capsys.readouterr().out
    whole = tmp_path / "whole.safetensors"
    assert main(["bake", pack_file, lora_file, "-o", str(whole)]) == 0
    assert hl.load(whole).report().baked == ["style ×1 (bake)"]


def test_a_merge_leaves_out_only_what_it_is_told_to_and_says_so(model_file, partly, tmp_path, capsys):
    out, result, table = tmp_path / "m.safetensors", tmp_path / "r.json", tmp_path / "r.csv"
    command = ["lora", "merge", partly, "--rank", "2", "-o", str(out), "--model", model_file]
    assert main(command) == 2
    assert "--allow-unmatched" in capsys.readouterr().err
    assert main([*command, "--allow-unmatched", "--json", str(result), "--save", str(table)]) == 0
    assert TOLD in capsys.readouterr().out
    content = json.loads(result.read_text())
    assert content["warnings"][0].startswith(TOLD)
    assert content["error"] == pytest.approx(0, abs=1e-6)
    assert len(pd.read_csv(table)) == 5
    assert "(1 of 5 modules)" in hl.load_lora(out).metadata["hswq.merged_from"]
    whole = merge_loras([(hl.load_lora(out), 1.0)], hl.load(model_file), 2).report
    assert whole.warnings == []
    assert torch.isfinite(torch.tensor(whole.error))
