"""A source that is not what the pack was made from: refused, warned about, or proved to be the same by its values."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hswq_lab as hl
from hswq_lab.checkpoint import Checkpoint, check
from hswq_lab.cli import main
from hswq_lab.errors import HswqError
from hswq_lab.formats import PackedWeight
from hswq_lab.lora import LayerDelta, bake_from_source
from hswq_lab.lora.parts import Full
from hswq_lab.packing import pack_weight
from hswq_lab.quantize import Plan, pack

LAYER = "layers.0.feed_forward.w1"
OTHER = "layers.1.feed_forward.w1"


def noisy(weight: torch.Tensor, share: float) -> torch.Tensor:
    """A finetune of a layer: noise of this share of its norm; all of it is new at infinity."""
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) * weight.float().std()
    return (noise if share == torch.inf else weight.float() + share * noise).to(weight.dtype)


@pytest.fixture
def finetune(tiny_tensors, tmp_path):
    """Makes a file of the tiny model in which some layers are others."""

    def make(share: float, layers=(LAYER,), prefix: str = "", dtype: torch.dtype | None = None) -> str:
        changed = {f"{layer}.weight": noisy(tiny_tensors[f"{layer}.weight"], share) for layer in layers}
        values = {
            f"{prefix}{name}": value.to(dtype or value.dtype)
            for name, value in (tiny_tensors | changed).items()
        }
        path = tmp_path / f"finetune-{share}.safetensors"
        save_file(values, path)
        return str(path)

    return make


@pytest.fixture
def lora(lora_file):
    return hl.load_lora(lora_file)


@pytest.mark.parametrize("how", ["bake", "bake_from_source"])
def test_the_own_source_in_another_container_prefix_and_dtype_is_the_source(
    pack_file, model_file, finetune, lora, how
):
    copy = finetune(0.0, prefix="model.diffusion_model.", dtype=torch.float32)
    reports = []
    for source in (model_file, copy):
        model = hl.load(pack_file)
        reports.append(model.attach(lora, how=how, source=hl.load(source)))
    assert hl.load(copy).checkpoint.sha256 != hl.load(model_file).checkpoint.sha256
    assert reports[0].remarks == reports[1].remarks == ()
    assert reports[0].rows == reports[1].rows
    elsewhere = finetune(0.5, layers=[OTHER])
    assert hl.load(pack_file).attach(lora, how=how, source=hl.load(elsewhere)).remarks == ()


@pytest.mark.parametrize("how", ["bake", "bake_from_source"])
def test_a_source_that_may_be_another_is_named_by_both_digests(pack_file, model_file, finetune, lora, how):
    source = hl.load(finetune(0.03))
    report = hl.load(pack_file).attach(lora, how=how, source=source)
    assert report.verdict == "OK"
    (remark,) = report.remarks
    assert remark in report.warnings
    assert remark in str(report)
    assert source.checkpoint.sha256 in remark
    assert hl.load(model_file).checkpoint.sha256 in remark


@pytest.mark.parametrize("how", ["bake", "bake_from_source"])
@pytest.mark.parametrize("share", [0.2, torch.inf])
def test_a_source_of_other_weights_is_refused_by_the_layer(pack_file, model_file, finetune, lora, share, how):
    model, source = hl.load(pack_file), hl.load(finetune(share))
    with pytest.raises(HswqError, match="not what the pack was made from") as told:
        model.attach(lora, how=how, source=source)
    assert told.value.tensor == LAYER
    assert hl.load(model_file).checkpoint.sha256 in str(told.value)
    assert source.checkpoint.sha256 in str(told.value)
    assert model.loras == []


def test_the_command_says_it_and_writes_nothing_of_another_model(
    pack_file, finetune, lora_file, tmp_path, capsys
):
    out = tmp_path / "x.safetensors"
    bake = ["bake", pack_file, lora_file, "-o", str(out), "--source"]
    assert main([*bake, finetune(0.2)]) == 2
    assert "not what the pack was made from" in capsys.readouterr().err
    assert not out.exists()
    result = tmp_path / "r.json"
    assert main([*bake, finetune(0.03), "--json", str(result)]) == 0
    assert "warning: the source is another file" in capsys.readouterr().out
    assert "sha256" in json.loads(result.read_text())["warnings"][0]


def test_a_pack_that_does_not_tell_its_source_still_refuses_other_weights(tiny_pack, finetune, lora):
    """20 % of noise may be what its maker did; there it is a remark."""
    with pytest.raises(HswqError, match="not what the pack was made from"):
        tiny_pack.attach(lora, how="bake_from_source", source=hl.load(finetune(torch.inf)))
    int8 = tiny_pack.checkpoint.entry(f"{LAYER}.weight").format == "int8_tensorwise"
    report = tiny_pack.attach(lora, how="bake_from_source", source=hl.load(finetune(0.2)))
    assert len(report.remarks) == int8


def test_norms_of_a_dora_are_not_taken_from_another_model(pack_file, finetune, lora_file, tmp_path):
    tensors = load_file(lora_file)
    (module,) = {key.rpartition(".lora_")[0] for key in tensors}
    path = tmp_path / "dora.safetensors"
    save_file(tensors | {f"{module}.lora_magnitude_vector": torch.ones(128)}, path)
    with pytest.raises(HswqError, match="not what the pack was made from"):
        hl.load(pack_file).attach(hl.load_lora(path), how="branch", source=hl.load(finetune(0.2)))


def test_weights_that_were_moved_to_fit_the_inputs_are_not_refused(tiny_model, tiny_tensors, lora):
    """GPTQ leaves a larger error of the weights than rounding does; nothing but the moments tells it exactly."""
    packed = pack(tiny_model, Plan({LAYER: "nvfp4"}), "gptq")
    copy = Checkpoint.from_mapping({name: value.float() for name, value in tiny_tensors.items()})
    report = packed.attach(lora, how="bake_from_source", source=copy)
    assert len(report.remarks) == 1


def test_what_is_in_the_file_already_is_not_held_against_the_source(
    pack_file, finetune, lora_file, lora, tmp_path
):
    once, values = tmp_path / "once.safetensors", load_file(lora_file)
    assert main(["bake", pack_file, lora_file, "-o", str(once)]) == 0
    other = tmp_path / "other.safetensors"
    save_file({key: value.flip(0) for key, value in values.items()}, other)
    report = hl.load(once).attach(
        hl.load_lora(other), how="bake", source=hl.load(finetune(0.0)), allow_baked=True
    )
    assert len(report.remarks) == 1


def test_the_diagnosis_of_the_evidence_names_the_source(tiny_tensors):
    weight = tiny_tensors[f"{LAYER}.weight"].float()
    delta = LayerDelta(LAYER, (128, 64), (Full("x", 0, 128, 1.0, 0.1 * noisy(weight, torch.inf)),))
    packed = pack_weight(weight, "nvfp4", 64, name=LAYER)
    assert isinstance(packed, PackedWeight)
    _, evidence = bake_from_source(noisy(weight, torch.inf).roll(1, 0), packed, [(delta, 1.0)], LAYER)
    assert evidence.verdict == "MISMATCH"
    assert "source does not fit" in evidence.warning


@pytest.mark.parametrize(
    ("share", "errors", "severity"),
    [(0.0, 0, "info"), (0.03, 0, "warning"), (0.2, 1, "warning"), (torch.inf, 1, "warning")],
)
def test_check_says_whether_the_source_is_the_packs_own(
    pack_file, model_file, finetune, share, errors, severity
):
    source = finetune(share, prefix="model.diffusion_model.")
    report = check(pack_file, source)
    found = [each for each in report.findings if each.severity == "error"]
    assert [(each.rule, each.tensor) for each in found] == [("source", f"{LAYER}.weight")] * errors
    (digest,) = [each for each in report.findings if each.rule == "source-digest"]
    assert digest.severity == severity
    assert ("; 1 of " in digest.problem) == (severity == "warning")
    assert digest.found == hl.load(source).checkpoint.sha256
    assert digest.expected == hl.load(model_file).checkpoint.sha256
    own = check(pack_file, model_file)
    assert not any(each.rule.startswith("source") for each in own.findings)


def test_check_warns_where_the_pack_does_not_tell_its_source(pack_file, finetune, tmp_path):
    untold = tmp_path / "untold.safetensors"
    with safe_open(pack_file, "pt") as file:
        metadata = {key: value for key, value in file.metadata().items() if key != "hswq.pack"}
    save_file(load_file(pack_file), untold, metadata)
    report = check(untold, finetune(0.2, layers=["final_layer.linear"]))
    assert report.ok
    assert [each.tensor for each in report.findings if each.severity == "warning" and each.rule == "source"]


def test_a_whole_finetune_of_the_shipped_model_is_not_its_source():
    """20 % of noise in sixteen layers, of which some are NVFP4 and some INT8."""
    model = hl.load("mini-zimage")
    layers = [layer for layer in model.layers() if "feed_forward" in layer][:16]
    kinds = dict(zip(layers, ["nvfp4", "int8_tensorwise"] * 8, strict=True))
    packed = pack(model, Plan(kinds))
    changed = {f"{layer}.weight": noisy(model.checkpoint[f"{layer}.weight"], 0.2) for layer in layers}
    other = model.checkpoint.with_values(changed)
    lora = hl.load_lora(model.companion.loras["outline"])
    with pytest.raises(HswqError, match="not what the pack was made from"):
        packed.attach(lora, how="bake_from_source", source=other)
