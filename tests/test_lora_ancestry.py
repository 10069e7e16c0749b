"""A LoRA that was converted or merged is still the one that it was made of: it is not applied twice unawares."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import hswq_lab as hl
from hswq_lab.errors import HswqError
from hswq_lab.lora import LoraFile, convert_lora, lora_from_tensors, merge_loras, save_lora
from hswq_lab.model import Model

LAYER = "layers.0.feed_forward.w1"
LAYERS = {LAYER: (128, 64)}


def _factors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"diffusion_model.{LAYER}.lora_A.weight": torch.randn(4, 64, generator=generator),
        f"diffusion_model.{LAYER}.lora_B.weight": torch.randn(128, 4, generator=generator) * 0.2,
    }


def _style(seed: int = 1) -> LoraFile:
    return lora_from_tensors(_factors(seed), name=f"style{seed}")


def _converted(lora: LoraFile, to: hl.lora.Dialect) -> LoraFile:
    return lora_from_tensors(*convert_lora(lora, LAYERS, to), name=f"{lora.name}_{to}")


def _merged(*loras: LoraFile) -> LoraFile:
    merged = merge_loras([(lora, 0.5) for lora in loras], LAYERS, 8)
    return lora_from_tensors(merged.tensors, merged.metadata, name="merged")


def _made() -> dict[str, LoraFile]:
    """What can be made of style 1."""
    kohya = _converted(_style(), "kohya")
    merged = _merged(_style(2), _style())
    return {
        "converted": kohya,
        "converted twice": _converted(kohya, "peft"),
        "merged": merged,
        "merged, then converted": _converted(merged, "kohya"),
        "converted, then merged": _merged(kohya, _style(3)),
        "merged twice": _merged(_style(3), merged),
    }


@pytest.mark.parametrize("way", _made())
def test_a_lora_knows_what_it_was_made_of(way):
    made = _made()[way]
    assert _style().sha256 in made.made_of
    assert made.sha256 not in made.made_of
    assert not _style().made_of


@pytest.mark.parametrize("how", ["branch", "bake"])
@pytest.mark.parametrize("way", _made())
def test_what_was_made_of_a_baked_lora_is_not_added_unawares(tiny_pack: Model, tmp_path, way, how):
    made = _made()[way]
    for baked, other in [(_style(), made), (made, _style()), (made, _converted(_style(), "native"))]:
        pack = tiny_pack.without_loras()
        pack.attach(baked, 0.8, "bake")
        file = hl.load(hl.save(pack, tmp_path / "baked.safetensors"))
        with pytest.raises(HswqError, match="would apply twice") as refusal:
            file.attach(other, 0.5, how)
        assert baked.name in str(refusal.value)
        file.attach(other, 0.5, how, allow_baked=True)
        pack.detach(baked)


@pytest.mark.parametrize("way", _made())
def test_what_was_made_of_an_attached_lora_is_not_added_unawares(tiny_pack: Model, way):
    made = _made()[way]
    for first, second in [(_style(), made), (made, _style()), (made, _converted(_style(), "native"))]:
        pack = tiny_pack.without_loras()
        pack.attach(first, 0.8)
        with pytest.raises(HswqError, match="would apply twice") as refusal:
            pack.attach(second, 0.5)
        assert first.name in str(refusal.value)
        assert [item.lora for item in pack.loras] == [first]
        pack.attach(second, 0.5, allow_baked=True)
        with pytest.raises(HswqError, match="attached already"):
            pack.attach(second, 0.5, allow_baked=True)


def test_loras_of_different_origins_stand_side_by_side(tiny_pack: Model, tmp_path):
    tiny_pack.attach(_merged(_style(), _style(2)), 0.5, "bake")
    file = hl.load(hl.save(tiny_pack, tmp_path / "baked.safetensors"))
    file.attach(_converted(_style(3), "kohya"), 0.5)
    file.attach(_merged(_style(4), _style(5)), 0.5)
    assert len(file.loras) == 2


def test_a_file_whose_settings_lay_beside_it_is_known_without_them(tiny_pack: Model, tmp_path):
    file = tmp_path / "adapter_model.safetensors"
    save_file(_factors(1), file)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 2}))
    converted = save_lora(
        tmp_path / "kohya.safetensors", *convert_lora(hl.load_lora(tmp_path), LAYERS, "kohya")
    )
    tiny_pack.attach(hl.load_lora(converted))
    (tmp_path / "adapter_config.json").unlink()
    with pytest.raises(HswqError, match="would apply twice"):
        tiny_pack.attach(hl.load_lora(file))
