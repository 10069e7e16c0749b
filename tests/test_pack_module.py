"""pack_module: Linears of our own, diffusers' and anybody's modules packed in place; LoRAs of diffusers' loader."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import FluxTransformer2DModel, ZImageTransformer2DModel
from safetensors.torch import save_file
from torch import nn

import hswq_lab as hl
from hswq_lab import HswqError, packing
from hswq_lab.checkpoint import Checkpoint
from hswq_lab.model import Model
from hswq_lab.models.synthetic import tensors
from hswq_lab.models.zimage import ZImage, ZImageConfig
from hswq_lab.module_linear import ModuleLinear

CONFIG = ZImageConfig(
    dim=64, n_layers=2, n_refiners=1, head_dim=32, ffn_dim=128, cap_dim=48, time_dim=64, time_hidden=64
)


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def shuffled(module, seed=0):
    """Seeded weights: what the constructors leave is small, zero or unset."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        spread = 0.15 if parameter.ndim > 1 else 0.5
        parameter.data = torch.randn(parameter.shape, generator=generator) * spread
    return module.eval()


def zimage():
    axes = {"axes_dims": [8, 12, 12], "axes_lens": [64, 64, 64]}
    sizes = {"dim": 64, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
    return shuffled(ZImageTransformer2DModel(**sizes, **axes, cap_feat_dim=48))


def run_zimage(module):
    with torch.no_grad():
        out = module([noise(16, 1, 8, 8)], torch.tensor([0.4]), [noise(32, 48, seed=1)], return_dict=False)
    return out[0][0]


def flux():
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 4}
    dims = {"in_channels": 16, "joint_attention_dim": 32, "pooled_projection_dim": 32}
    return shuffled(FluxTransformer2DModel(patch_size=1, **sizes, **dims, axes_dims_rope=[4, 6, 6]))


def run_flux(module):
    with torch.no_grad():
        return module(
            hidden_states=noise(1, 16, 16),
            encoder_hidden_states=noise(1, 8, 32, seed=1),
            pooled_projections=noise(1, 32, seed=2),
            timestep=torch.tensor([0.4]),
            img_ids=torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0)),
            txt_ids=torch.zeros(8, 3),
            return_dict=False,
        )[0]


FAMILIES = {"zimage": (zimage, run_zimage), "flux": (flux, run_flux)}


def unpacked(module):
    """A copy whose packed layers are plain Linears with the dequantised values: what packed numbers must agree with."""
    twin = copy.deepcopy(module)
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, ModuleLinear):
                plain = nn.Linear(child.in_features, child.out_features, child.bias is not None)
                plain.weight.data = child.weight.dense()
                if child.bias is not None:
                    plain.bias.data = child.bias.data.clone()
                parent.add_module(name, plain)
    return twin.eval()


def close(a, b, bound):
    return float((a - b).norm() / b.norm()) < bound


def test_our_own_network_becomes_what_hl_pack_makes(tmp_path):
    weights = {name: value.float() for name, value in tensors(CONFIG)}
    plan = hl.Plan({"layers.*": "nvfp4", "*.feed_forward.w2": "int8", "context_refiner.*": "nvfp4"})
    model = Model(Checkpoint.from_mapping(weights), name="toy")
    network = ZImage(CONFIG)
    network.load_state_dict(weights)
    report = hl.pack_module(network.eval(), plan)
    packed = hl.pack(model, plan)
    given = noise(1, 16, 8, 8), torch.tensor([0.3]), [noise(20, 48, seed=1)]
    with torch.no_grad():
        assert torch.equal(network(*given), packed.network()(*given))
    mine = {row.layer: (row.format, row.mode, row.bytes) for row in report.layers if row.format != "16-bit"}
    theirs = {
        row.layer: (row.format, row.mode, row.bytes)
        for row in packed.report().layers
        if row.format != "16-bit"
    }
    assert mine == theirs
    assert {row.calls for row in hl.module_report(network).layers if row.format != "16-bit"} == {1}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["nvfp4", "int8", "float8_e4m3fn"])
def test_diffusers_networks_run_packed(family, form):
    make, run = FAMILIES[family]
    module = make()
    before = run(module)
    report = hl.pack_module(module, {"*": form}, "rtn")
    assert len(report.layers) > 10
    assert {row.format for row in report.layers} == {hl.Plan({"*": form})["*"]}
    after = run(module)
    assert torch.equal(after, run(module))
    assert not torch.equal(after, before)
    # INT8 layers quantise their activations too.
    assert close(after, run(unpacked(module)), 0.03 if form == "int8" else 1e-4)
    assert close(after, before, 0.5)
    assert all(row.calls == 2 for row in hl.module_report(module).layers)


def test_a_plan_in_native_names_fits_diffusers_z_image():
    module = zimage()
    plan = {"layers.0.attention.qkv": "nvfp4", "x_embedder": "int8", "*.to_k": "float8_e4m3fn"}
    formats = {row.layer: row.format for row in hl.pack_module(module, plan).layers}
    assert formats["layers.0.attention.to_q"] == formats["layers.0.attention.to_v"] == "nvfp4"
    assert formats["layers.0.attention.to_k"] == "float8_e4m3fn"  # the later entry wins, whatever the name
    assert formats["all_x_embedder.2-1"] == "int8_tensorwise"
    assert formats["layers.0.feed_forward.w1"] == "16-bit"


@pytest.mark.parametrize("mode", ["tc", "tc8"])
def test_other_modes_run_with_scales_of_the_moment(mode):
    module = zimage()
    before = run_zimage(module)
    report = hl.pack_module(module, {"layers.*": "nvfp4"}, mode=mode, uncalibrated="dynamic")
    assert {row.mode for row in report.layers} == {mode, "16-bit"}
    assert close(run_zimage(module), before, 0.5)


# -- LoRAs of diffusers' own loader ----------------------------------------------------------------------------------


LORA_TARGETS = {
    "zimage": ("layers.0.attention.to_q", "layers.0.feed_forward.w1", "layers.0.attention.to_out.0"),
    "flux": ("transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.proj_mlp"),
}


def lora_of(module, family, rank=4):
    """A LoRA file's tensors for some Linears, in PEFT's names as diffusers saves them."""
    found = {}
    for seed, name in enumerate(LORA_TARGETS[family]):
        n, k = module.get_submodule(name).weight.shape
        found[f"transformer.{name}.lora_A.weight"] = 0.3 * noise(rank, k, seed=2 * seed)
        found[f"transformer.{name}.lora_B.weight"] = 0.3 * noise(n, rank, seed=2 * seed + 1)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_loras_of_diffusers_loader_apply_beside_the_packed_weights(family):
    make, run = FAMILIES[family]
    module = make()
    hl.pack_module(module, {"*": "nvfp4"})
    without = run(module)
    lora = lora_of(module, family)
    module.load_lora_adapter(dict(lora), adapter_name="style", prefix="transformer")
    with_lora = run(module)
    assert not close(with_lora, without, 0.05)
    # The same LoRA, by hand, in a copy of plain Linears with the dequantised weights.
    module.delete_adapters("style")
    twin = unpacked(module)
    for name in LORA_TARGETS[family]:
        linear = twin.get_submodule(name)
        key = f"transformer.{name}.lora_"
        linear.weight.data = linear.weight.data + lora[f"{key}B.weight"] @ lora[f"{key}A.weight"]
    assert close(with_lora, run(twin), 1e-4)
    assert torch.equal(run(module), without)  # deleted: the pristine pack again, bit for bit


def test_a_lora_file_loads_through_the_pipeline(tmp_path):
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline  # noqa: PLC0415 - for one test

    module = zimage()
    hl.pack_module(module, {"*": "nvfp4"})
    save_file(lora_of(module, "zimage"), tmp_path / "style.safetensors")
    pipe = ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=None,
        text_encoder=None,
        tokenizer=None,
        transformer=module,
    )
    without = run_zimage(module)
    pipe.load_lora_weights(tmp_path, weight_name="style.safetensors", adapter_name="style")
    full = run_zimage(module)
    pipe.set_adapters("style", 0.25)
    quarter = run_zimage(module)
    assert not close(full, without, 0.05)
    assert not close(quarter, full, 0.02)
    pipe.unload_lora_weights()
    assert torch.equal(run_zimage(module), without)


@pytest.mark.parametrize("safe", [True, False])
def test_fusing_a_lora_into_packed_weights_is_refused(safe):
    module = zimage()
    hl.pack_module(module, {"*": "nvfp4"})
    module.load_lora_adapter(lora_of(module, "zimage"), adapter_name="style", prefix="transformer")
    before = run_zimage(module)
    with pytest.raises(HswqError, match="the change would be lost") as caught:
        module.fuse_lora(safe_fusing=safe)
    assert "layers.0" in caught.value.tensor
    assert torch.equal(run_zimage(module), before)


def test_a_dora_reads_the_norms_of_the_packed_weight():
    from peft import LoraConfig  # noqa: PLC0415 - for one test

    module = zimage()
    hl.pack_module(module, {"*": "nvfp4"})
    twin = unpacked(module)
    config = LoraConfig(r=4, target_modules=["to_q", "w1"], use_dora=True, init_lora_weights=False)
    for each in (module, twin):
        torch.manual_seed(0)
        each.add_adapter(config, adapter_name="dora")
    assert close(run_zimage(module), run_zimage(twin), 1e-4)


def test_packing_a_module_with_loras_on_it_is_refused():
    module = zimage()
    module.load_lora_adapter(lora_of(module, "zimage"), adapter_name="style", prefix="transformer")
    with pytest.raises(HswqError, match="LoRAs are loaded"):
        hl.pack_module(module, {"*": "nvfp4"})


# -- what others may do with a packed Linear --------------------------------------------------------------------------


def small():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(64, 48), nn.SiLU(), nn.Linear(48, 32, bias=False))
    hl.pack_module(module.eval(), {"*": "nvfp4"})
    return module


def test_the_weight_can_be_read_like_a_tensor():
    linear = small()[0]
    assert isinstance(linear, nn.Linear)
    values = packing.dequantize(linear.layer.weight)
    assert linear.weight.shape == (48, 64)
    assert linear.weight.dtype == torch.float32
    assert torch.equal(linear.weight + 0, values)
    assert torch.equal(linear.weight.data.clone(), values)
    assert torch.equal(linear.weight.T @ torch.ones(48), values.T @ torch.ones(48))
    assert torch.equal(torch.zeros(48, 64).copy_(linear.weight), values)
    assert float(torch.linalg.norm(linear.weight)) == float(torch.linalg.norm(values))


WRITES = {
    "add_": lambda w: w.add_(1),
    "+= on data": lambda w: w.data.__iadd__(1),
    "data = ": lambda w: setattr(w, "data", torch.zeros(48, 64)),
    "detach": lambda w: w.detach().zero_(),
    "copy_": lambda w: w.copy_(torch.zeros(48, 64)),
    "out=": lambda w: torch.add(torch.zeros(48, 64), 1, out=w),
    "index": lambda w: w.__setitem__(0, 0.0),
    "data_ptr": lambda w: w.data_ptr(),
}


@pytest.mark.parametrize("write", WRITES)
def test_the_weight_cannot_be_written_or_saved_by_the_way(write):
    module = small()
    before = module(torch.ones(2, 64))
    with pytest.raises(HswqError, match=r"cannot be written|saved or shared"):
        WRITES[write](module[0].weight)
    with pytest.raises(HswqError, match="cannot be written"):
        module[0].weight = torch.zeros(48, 64)
    assert torch.equal(module(torch.ones(2, 64)), before)


def test_a_state_dict_shows_the_shapes_but_does_not_save_or_load_weights(tmp_path):
    module = small()
    state = module.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "0.weight": (48, 64),
        "0.bias": (48,),
        "2.weight": (32, 48),
    }
    with pytest.raises(HswqError, match="saved or shared"):
        save_file(state, tmp_path / "lost.safetensors")
    with pytest.raises(HswqError, match="cannot be written"):
        module.load_state_dict({"0.weight": torch.zeros(48, 64)}, strict=False)
    module.load_state_dict({"0.bias": torch.full((48,), 7.0)}, strict=False)
    assert torch.equal(module[0](torch.zeros(1, 64)), torch.full((1, 48), 7.0))


def test_moving_and_casting_keep_codes_and_scales():
    module = small()
    codes, scale = module[0].layer.weight.codes.clone(), module[0].layer.weight.scale.clone()
    module.to(torch.bfloat16)
    assert module[0].weight.dtype == torch.bfloat16
    assert module[0].bias.dtype == torch.bfloat16
    assert module(torch.ones(2, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    module.float().to("meta")
    assert module[0].layer.weight.codes.is_meta
    with pytest.raises(HswqError, match="different devices"):
        module(torch.ones(2, 64))
    other = copy.deepcopy(small())
    assert torch.equal(other[0].layer.weight.codes, codes)
    assert torch.equal(other[0].layer.weight.scale, scale)
    assert "nvfp4, group=64, mode=parity" in repr(other)


def test_moving_and_casting_keep_the_counts():
    module = small()
    module(torch.ones(2, 64))
    for move in (lambda: module.to("cpu"), module.bfloat16, module.float):
        move()
        assert [linear.layer.counts.rows for linear in (module[0], module[2])] == [2, 2]
    layer = module[0].layer
    assert module.to("meta")[0].layer is not layer
    assert all(counter.is_meta for counter in module[0].layer._counters)


def test_gradients_are_refused_rather_than_lost():
    module = small()
    x = torch.ones(2, 64, requires_grad=True)
    with pytest.raises(HswqError, match="for inference"):
        module(x)
    with torch.no_grad():
        module(x)


class Shared(nn.Module):
    """One Linear under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.inner = nn.ModuleDict({"again": self.first})

    def forward(self, x):
        return self.inner["again"](self.first(x))


def test_a_shared_linear_stays_shared():
    module = Shared().eval()
    hl.pack_module(module, {"first": "nvfp4"})
    assert isinstance(module.first, ModuleLinear)
    assert module.inner["again"] is module.first


class Special(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_special_linears_are_left_alone_and_named():
    module = nn.Sequential(nn.Linear(32, 32), Special(32, 32)).eval()
    report = hl.pack_module(module, {"*": "nvfp4"})
    assert [row.layer for row in report.layers] == ["0"]
    assert "1: a Special" in report.warnings[0]


def unhappy():
    hooked = nn.Sequential(nn.Linear(32, 32))
    hooked[0].register_forward_hook(lambda *_: None)
    broken = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    broken[1].weight.data[3, 4] = torch.nan
    own = Model(Checkpoint.from_mapping({n: v.float() for n, v in tensors(CONFIG)}), name="toy").network()
    plain = {"mode": "auto"}
    return {
        "a single Linear": (nn.Linear(32, 32), {"*": "nvfp4"}, plain, "single Linear"),
        "an unmatched entry": (
            nn.Sequential(nn.Linear(32, 32)),
            {"layers.*": "nvfp4"},
            plain,
            "does not have",
        ),
        "NaN": (broken, {"*": "nvfp4"}, plain, "not finite"),
        "hooks": (hooked, {"*": "nvfp4"}, plain, "hooks"),
        "tc without scales": (
            nn.Sequential(nn.Linear(32, 32)),
            {"*": "nvfp4"},
            {"mode": "tc"},
            "input_scale",
        ),
        "packed already": (small(), {"*": "nvfp4"}, plain, "packed already"),
        "a workbench network": (own, {"*": "nvfp4"}, plain, "packed already"),
        "meta": (nn.Sequential(nn.Linear(32, 32, device="meta")), {"*": "nvfp4"}, plain, "not loaded"),
        "gptq": (nn.Sequential(nn.Linear(32, 32)), {"*": "nvfp4"}, {"scales": "gptq"}, "only a Model"),
        "a rank": (nn.Sequential(nn.Linear(64, 32)), {"*": "nvfp4+r16"}, plain, "only a Model"),
    }


@pytest.mark.parametrize("case", unhappy())
def test_refused_and_unchanged(case):
    module, plan, options, message = unhappy()[case]
    before = list(module.modules())
    with pytest.raises(HswqError, match=message):
        hl.pack_module(module, plan, **options)
    assert all(now is then for now, then in zip(module.modules(), before, strict=True))


def test_an_empty_plan_is_refused():
    module = nn.Sequential(nn.Linear(64, 64))
    with pytest.raises(HswqError, match="plan is empty"):
        hl.pack_module(module, {})
    assert type(module[0]) is nn.Linear
