"""PEFT's settings: read as PEFT and diffusers mean them, and refused by name where they mean no plain delta."""

from __future__ import annotations

import json
import math

import pytest
import torch
from lora_dialects import DIALECTS, LAYERS, logical
from safetensors.torch import save_file
from torch import nn

from hswq_lab.errors import HswqError
from hswq_lab.lora import load_lora, lora_from_tensors

OUT = "layers.2.attention.out"
NAME = "layers.2.attention.to_out.0"


def _tensors(prefix: str = "transformer."):
    (module,) = logical([OUT], lambda _: 4, lambda _: 4.0)
    return {f"{prefix}{NAME}.lora_A.weight": module.down, f"{prefix}{NAME}.lora_B.weight": module.up}


def _in_header(prefix: str = "transformer.", **settings):
    told = {f"transformer.{key}": value for key, value in settings.items()}
    return lora_from_tensors(_tensors(prefix), {"lora_adapter_metadata": json.dumps(told)})


def _folder(path, text: str):
    save_file(_tensors("base_model.model."), path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(text)
    return load_lora(path)


# -- patterns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "transformer.", "base_model.model.", "transformer.base_model.model."])
@pytest.mark.parametrize("pattern", [f"^{NAME}", NAME, "to_out.0", r"^layers\.\d+\.attention\.to_out\.0$"])
def test_a_pattern_meets_the_name_without_prefixes(prefix, pattern):
    lora = _in_header(prefix, r=4, lora_alpha=4, alpha_pattern={pattern: 16}, rank_pattern={pattern: 4})
    assert lora.entries[0].scale.value == 4.0


def test_the_first_pattern_that_matches_counts():
    lora = _in_header(r=4, lora_alpha=4, alpha_pattern={"to_q": 40, "^layers": 40, "to_out.0": 16, NAME: 8})
    assert lora.entries[0].scale.value == 4.0


def test_a_pattern_that_matches_no_module_is_told():
    lora = _in_header(r=4, lora_alpha=4, alpha_pattern={"^attention.to_out.0": 16}, rank_pattern={NAME: 4})
    assert lora.entries[0].scale.value == 1.0
    (warning,) = lora.warnings
    assert "^attention.to_out.0" in warning
    assert NAME not in warning


def test_what_diffusers_saves_has_diffusers_scales(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    peft = pytest.importorskip("peft")
    ranks = {f"layers.{index}.attention.to_out.0": rank for index, rank in enumerate((16, 16, 8, 8, 16))}
    modules = logical(
        [f"layers.{index}.attention.out" for index in range(5)],
        ranks.__getitem__,
        lambda name: ranks[name] / 2,
    )
    net = _tree(modules)
    settings = {f"^{name}": rank for name, rank in ranks.items() if rank == 8}
    config = peft.LoraConfig(
        r=16,
        lora_alpha=8,
        rank_pattern=settings,
        alpha_pattern=dict.fromkeys(settings, 4),
        target_modules=[*ranks],
    )
    peft.inject_adapter_in_model(config, net)
    tensors = {}
    for module in modules:
        tensors |= {f"{module.name}.lora_A.weight": module.down, f"{module.name}.lora_B.weight": module.up}
        assert net.get_submodule(module.name).scaling["default"] == 0.5
    diffusers.ZImagePipeline.save_lora_weights(
        tmp_path, transformer_lora_layers=tensors, transformer_lora_adapter_metadata=config.to_dict()
    )
    lora = load_lora(tmp_path / "pytorch_lora_weights.safetensors")
    assert [entry.scale.value for entry in lora.entries] == [0.5] * 5
    assert not lora.warnings


def _tree(modules) -> nn.Module:
    """A network with a Linear at each of these names, as diffusers names them."""
    root = nn.Module()
    for module in modules:
        at = root
        *path, last = module.name.split(".")
        for name in path:
            if name not in dict(at.named_children()):
                at.add_module(name, nn.Module())
            at = at.get_submodule(name)
        at.add_module(last, nn.Linear(module.down.shape[1], module.up.shape[0], bias=False))
    return root


@pytest.mark.parametrize("kind", ["LoraConfig", "LoHaConfig", "LoKrConfig"])
@pytest.mark.parametrize("pattern", [f"^{NAME}", NAME])
def test_what_peft_saves_does_what_it_does_in_peft(tmp_path, kind, pattern):
    peft = pytest.importorskip("peft")
    alpha = {"lora_alpha" if kind == "LoraConfig" else "alpha": 4}
    start = {"init_lora_weights" if kind == "LoraConfig" else "init_weights": False}
    config = getattr(peft, kind)(
        r=4,
        target_modules=["to_out.0"],
        alpha_pattern={pattern: 32},
        rank_pattern={pattern: 2},
        **alpha,
        **start,
    )
    net = _tree(logical([OUT], lambda _: 1, lambda _: 1.0))
    before = net.get_submodule(NAME).weight.detach().clone()
    model = peft.get_peft_model(net, config)
    model.save_pretrained(tmp_path)
    after = model.merge_and_unload().get_submodule(NAME).weight
    torch.testing.assert_close(load_lora(tmp_path).dense_deltas(LAYERS)[OUT], after.detach() - before)


# -- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start",
    ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "a method of tomorrow"],
)
def test_a_lora_on_changed_base_weights_is_refused(start, tmp_path):
    with pytest.raises(HswqError, match="base weights") as refusal:
        _folder(
            tmp_path, json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "init_lora_weights": start})
        )
    assert refusal.value.tensor.startswith("init_lora_weights")
    assert refusal.value.fix
    assert refusal.value.file.endswith("adapter_config.json")
    with pytest.raises(HswqError, match="base weights"):
        _in_header(r=4, lora_alpha=8, init_lora_weights=start)


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_other_initialisations_are_read(start):
    assert _in_header(r=4, lora_alpha=8, init_lora_weights=start).entries[0].scale.value == 2.0


@pytest.mark.parametrize(
    "setting",
    [
        {"layer_replication": [[0, 4], [2, 5]]},
        {"use_qalora": True, "qalora_group_size": 16},
        {"use_bdlora": {"nblocks": 2}},
        {"kasa_config": {"beta": 1e-4}},
        {"alora_invocation_tokens": [1, 2]},
        {"arrow_config": {"top_k": 2}},
        {"monteclora_config": {}, "peft_type": "VERA"},
        {"peft_type": "ADALORA"},
        {"peft_type": 3},
        {"use_rslora": 1},
        {"use_rslora": "true"},
        {"use_dora": "no"},
        {"lora_alpha": int("4" * 401)},
        {"lora_alpha": math.inf},
        {"lora_alpha": True},
        {"lora_alpha": "8"},
        {"lora_alpha": [8]},
        {"r": 0},
        {"r": 2.5},
        {"r": int("4" * 401)},
        {"alpha_pattern": {NAME: int("4" * 401)}},
        {"alpha_pattern": {"([a-z0-9._]+)+!": 1}},
        {"rank_pattern": {NAME: -1}},
        {"rank_pattern": {f"^layers.{index}": 4 for index in range(10_000)}},
    ],
    ids=lambda setting: str(setting)[:40],
)
def test_settings_that_cannot_be_read_rightly_are_refused_by_name(setting):
    with pytest.raises(HswqError) as refusal:
        _in_header(**{"r": 4, "lora_alpha": 8} | setting)
    assert any((refusal.value.tensor or "").startswith(key) for key in setting)


def test_settings_that_are_off_are_read():
    off = {"layer_replication": None, "use_qalora": False, "alora_invocation_tokens": [], "use_rslora": False}
    assert _in_header(peft_type="LORA", r=4, lora_alpha=8, **off).entries[0].scale.value == 2.0


def test_a_setting_that_is_there_twice_is_refused(tmp_path):
    text = '{"r": 4, "lora_alpha": 8, "lora_alpha": 400}'
    with pytest.raises(HswqError, match="there twice"):
        _folder(tmp_path, text)
    with pytest.raises(HswqError, match="there twice"):
        lora_from_tensors(_tensors(), {"lora_adapter_metadata": text})


def test_a_setting_with_and_without_prefix_is_refused():
    told = {"r": 4, "lora_alpha": 8, "transformer.lora_alpha": 80}
    with pytest.raises(HswqError, match="twice") as refusal:
        lora_from_tensors(_tensors(), {"lora_adapter_metadata": json.dumps(told)})
    assert refusal.value.found == "lora_alpha"


@pytest.mark.parametrize("digits", ["9" * 400, "1" * 400 + ".0"])
def test_a_rank_of_hundreds_of_digits_in_the_header_is_none(digits):
    tensors, _ = DIALECTS["10 LoKr, both full"](logical([OUT], lambda _: 2, lambda _: 2.0))
    assert lora_from_tensors(tensors, {"ss_network_dim": digits}).entries[0].scale.value == 1.0
