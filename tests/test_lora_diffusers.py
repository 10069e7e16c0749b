"""Files that `lora convert` and `lora merge` write in PEFT's dialect do in diffusers what they do here."""

from __future__ import annotations

import json

import pytest
import torch
from lora_dialects import DIALECTS, LAYERS, D, logical
from torch import nn

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.errors import HswqError
from hswq_lab.lora import convert_lora, load_lora, lora_from_tensors, merge_loras, save_lora
from hswq_lab.models.names import diffusers_names

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("peft")
from diffusers.loaders import PeftAdapterMixin  # noqa: E402

QKV, OUT, LAST = "layers.1.attention.qkv", "layers.11.attention.out", "final_layer.linear"


class _Weights:
    """A model of three layers, for norms of DoRA."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self._shapes = {name: LAYERS[name] for name in (QKV, OUT, LAST)}
        self.checkpoint = Checkpoint.from_mapping(
            {
                f"{name}.weight": torch.randn(shape, generator=generator)
                for name, shape in self._shapes.items()
            }
        )

    def layers(self):
        return self._shapes


class _Network(nn.Module, PeftAdapterMixin):
    """The same layers as diffusers names them, with biases."""

    def __init__(self, weights: _Weights) -> None:
        super().__init__()
        for layer in weights.layers():
            names = diffusers_names(layer)
            for name, weight in zip(
                names, weights.checkpoint[f"{layer}.weight"].chunk(len(names)), strict=True
            ):
                linear = nn.Linear(weight.shape[1], weight.shape[0])
                linear.weight.data.copy_(weight)
                self._put(name, linear)

    def _put(self, name: str, linear: nn.Linear) -> None:
        at: nn.Module = self
        *path, last = name.split(".")
        for step in path:
            if step not in dict(at.named_children()):
                at.add_module(step, nn.Module())
            at = at.get_submodule(step)
        at.add_module(last, linear)

    @property
    def dtype(self):
        return torch.float32


def _done_by_diffusers(path, weights: _Weights):
    """Layer → (ΔW, Δb) that diffusers and PEFT make of a file, its metadata included."""
    network = _Network(weights)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state, settings = diffusers.ZImagePipeline.lora_state_dict(path, return_lora_metadata=True)
    assert settings is not None
    network.load_lora_adapter(state, metadata=settings, prefix="transformer", adapter_name="x")
    found = {}
    for layer in weights.layers():
        changes = []
        for name in diffusers_names(layer):
            module = network.get_submodule(name)
            if hasattr(module, "merge"):
                module.merge()
                module = module.base_layer
            changes.append((module.weight - before[f"{name}.weight"], module.bias - before[f"{name}.bias"]))
        found[layer] = tuple(torch.cat(each).detach() for each in zip(*changes, strict=True))
    return found


def _compare(path, weights: _Weights) -> None:
    lora = load_lora(path)
    deltas, dense = lora.deltas(weights), lora.dense_deltas(weights)
    assert not lora.warnings
    for layer, (weight, bias) in _done_by_diffusers(path, weights).items():
        if layer not in dense:
            assert not weight.any()
            continue
        torch.testing.assert_close(weight, dense[layer], rtol=1e-4, atol=1e-5)
        ours = deltas[layer].bias()
        torch.testing.assert_close(
            bias, torch.zeros_like(bias) if ours is None else ours, rtol=1e-4, atol=1e-5
        )


def _modules(*layers: str, alpha: float = 3.0):
    ranks = {"to_q": 4, "to_k": 2, "to_v": 3}
    return logical([*layers], lambda name: ranks.get(name.rsplit(".", 1)[-1], 5), lambda _: alpha)


def _written(modules, *, dora: str = "", bias: str = ""):
    """kohya's tensors; modules whose names contain `dora` are DoRA, those with `bias` have one."""
    tensors, _ = DIALECTS["5 kohya split"](modules)
    generator = torch.Generator().manual_seed(5)
    for module in modules:
        name = f"lora_unet_{module.name.replace('.', '_')}"
        if dora and dora in module.name:
            tensors[f"{name}.dora_scale"] = torch.rand(module.up.shape[0], 1, generator=generator)
        if bias and bias in module.name:
            tensors[f"{name}.diff_b"] = torch.randn(module.up.shape[0], generator=generator)
    return lora_from_tensors(tensors)


@pytest.mark.parametrize("more", [{}, {"dora": "layer"}, {"bias": "to_k"}])
@pytest.mark.parametrize("layers", [[QKV, OUT, LAST], [OUT]])
def test_a_converted_file(layers, more, tmp_path):
    weights = _Weights()
    lora = _written(_modules(*layers), **more)
    path = save_lora(tmp_path / "style.safetensors", *convert_lora(lora, weights, "peft"))
    _compare(path, weights)


def test_a_merged_file(tmp_path):
    weights = _Weights()
    loras = [
        (_written(_modules(QKV, OUT), bias="to_"), 0.5),
        (_written(_modules(LAST, OUT), dora="layer"), -1.0),
    ]
    merged = merge_loras(loras, weights, 4, "peft")
    _compare(save_lora(tmp_path / "both.safetensors", merged.tensors, merged.metadata), weights)


def test_dora_with_biases_is_refused():
    with pytest.raises(HswqError, match="no biases beside DoRA"):
        convert_lora(_written(_modules(QKV), dora="layer", bias="to_k"), LAYERS, "peft")


def test_a_file_that_is_dora_in_part_is_refused():
    with pytest.raises(HswqError, match="as a whole or not at all") as refusal:
        convert_lora(_written(_modules(QKV, OUT), dora="to_out"), LAYERS, "peft")
    assert "3 of 4" in str(refusal.value)


def test_settings_name_the_modules():
    _, metadata = convert_lora(_written(_modules(QKV)), {QKV: (3 * D, D)}, "peft")
    settings = json.loads(metadata["lora_adapter_metadata"])
    assert settings["transformer.target_modules"] == [*diffusers_names(QKV)]
