"""tools/synth_zimage.py: the real names and shapes, the same values in every layout, realistic sizes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.models.zimage import FULL, ZImageConfig, linear_layers

TOOL = Path(__file__).resolve().parents[1] / "tools" / "synth_zimage.py"


@pytest.fixture(scope="module")
def synth():
    spec = importlib.util.spec_from_file_location("synth_zimage", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def toy(synth, tmp_path_factory):
    file = tmp_path_factory.mktemp("synth") / "toy.safetensors"
    assert synth.main([str(file)]) == 0
    return Checkpoint.open(file)


def test_the_toy_has_the_real_layers(toy):
    layers = linear_layers(ZImageConfig.from_shapes(toy.shapes()))
    assert layers.keys() == linear_layers(FULL).keys()
    assert len(layers) == 208
    assert sum(name.startswith("layers.") for name in layers) == 180
    assert all(toy.entry(f"{name}.weight").shape == shape for name, shape in layers.items())


def test_the_full_size_needs_no_space_without_values(synth, tmp_path):
    file = tmp_path / "full.safetensors"
    assert synth.main([str(file), "--size", "full", "--empty", "--prefix", ""]) == 0
    checkpoint = Checkpoint.open(file)
    assert sum(torch.Size(shape).numel() for shape in checkpoint.shapes().values()) == 6_154_908_736
    assert checkpoint.prefix == ""
    assert file.stat().st_size > 12.3e9
    assert file.stat().st_blocks * 512 < 1e6
    assert not checkpoint["layers.29.attention.q_norm.weight"].any()


def test_the_same_seed_gives_the_same_values_in_every_layout(synth, toy, tmp_path):
    index = synth.write_diffusers(tmp_path, synth.TOY, 0, part_bytes=500_000)
    assert len(list(index.parent.glob("*.safetensors"))) > 3
    other = Checkpoint.open(tmp_path)
    assert set(other) == set(toy)
    assert all(torch.equal(other[name], toy[name]) for name in toy)
    names = set(other.sources[0].header.tensors)
    assert any(".to_q." in name or "to_out.0" in name for name in names)
    again = dict(synth.tensors(synth.TOY, 1))
    assert not torch.equal(again["layers.0.attention.qkv.weight"], toy["layers.0.attention.qkv.weight"])


def test_weights_have_rows_columns_and_outliers_as_trained_ones(synth):
    config = ZImageConfig(dim=512, n_layers=1, n_refiners=1, head_dim=64, ffn_dim=512, cap_dim=64)
    w = dict(synth.tensors(config))["layers.0.attention.qkv.weight"].float()
    columns, rows = w.std(0), w.std(1)
    assert columns.max() > 3 * columns.median()
    assert 0.15 < rows.log().std() < 0.4
    kurtosis = (w**4).mean() / (w**2).mean() ** 2
    assert kurtosis > 4
    assert 0.3 < w.std() * 512**0.5 < 1.5


def test_errors_are_told_on_the_command_line(synth, tmp_path, capsys):
    assert synth.main([str(tmp_path / "no" / "x.safetensors")]) == 2
    assert "folder does not exist" in capsys.readouterr().err
