"""The ComfyUI node against stubs of the interfaces that it uses; nothing here is ComfyUI."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import hswq_lab as hl
from hswq_lab import HswqError
from hswq_lab.checkpoint import write
from hswq_lab.models.synthetic import tensors
from hswq_lab.models.zimage import ZImageConfig

CONFIG = ZImageConfig(
    dim=64, n_layers=2, n_refiners=1, head_dim=32, ffn_dim=128, cap_dim=48, time_dim=64, time_hidden=64
)
NODE = Path(__file__).resolve().parents[1] / "examples" / "comfyui_node"


class StubBase(torch.nn.Module):
    """What ComfyUI's BaseModel does around the network (flow matching): the call, and x0 from its answer."""

    def __init__(self, config):
        super().__init__()
        assert config.unet_config["disable_unet_model_creation"]
        self.model_config = config

    def apply_model(self, x, sigma, c_crossattn, control=None, transformer_options=None, **conditions):
        options = {"cond_or_uncond": [0], "patches": {}} | (transformer_options or {})
        out = self.diffusion_model(
            x.to(self.diffusion_model.dtype),
            sigma.float(),
            context=c_crossattn,
            control=control,
            transformer_options=options,
            **conditions,
        )
        return x - out.float() * sigma.reshape(-1, 1, 1, 1)


class StubConfig:
    def __init__(self, unet_config):
        self.unet_config = dict(unet_config)

    def set_inference_dtype(self, dtype, manual):
        self.dtypes = (dtype, manual)

    def get_model(self, state_dict):
        assert state_dict == {}
        return StubBase(self)


class StubPatcher:
    """The part of ModelPatcher that matters: patches reach only names of the state dict; callbacks run at load."""

    def __init__(self, model, load_device, offload_device, size=0):
        self.model, self.load_device, self.offload_device, self.size = (
            model,
            load_device,
            offload_device,
            size,
        )
        self.patches, self.hook_patches, self.callbacks = {}, {}, []

    def add_callback(self, kind, callback):
        assert kind == "on_load"
        self.callbacks.append(callback)

    def add_patches(self, patches):
        names = {f"diffusion_model.{name}" for name in self.model.diffusion_model.state_dict()}
        self.patches |= {name: value for name, value in patches.items() if name in names}

    def load(self):
        for callback in self.callbacks:
            callback(self, self.load_device, 0, False, True)


@pytest.fixture
def folders(tmp_path):
    """Folders as ComfyUI has them: a 16-bit file, a calibrated pack of it, a LoRA."""
    source = write(tmp_path / "source.safetensors", tensors(CONFIG), {})
    model = hl.load(source, device="cpu")
    pack = hl.pack(model, hl.Plan({"layers.*": "nvfp4"}), "rtn")
    hl.save(pack, tmp_path / "pack.safetensors")
    generator = torch.Generator().manual_seed(3)
    name = "transformer.layers.0.feed_forward.w1"
    lora = {
        f"{name}.lora_A.weight": torch.randn(2, 64, generator=generator),
        f"{name}.lora_B.weight": 0.3 * torch.randn(128, 2, generator=generator),
    }
    save_file(lora, tmp_path / "style.safetensors")
    return tmp_path


@pytest.fixture
def nodes(folders, monkeypatch):
    """The node package, loaded as ComfyUI loads it: by its folder, beside its own modules."""
    management = {
        "get_torch_device": lambda: torch.device("cpu"),
        "unet_offload_device": lambda: torch.device("cpu"),
    }
    stubs = {
        "folder_paths": {
            "get_filename_list": lambda kind: (
                ["style.safetensors"] if kind == "loras" else ["pack.safetensors"]
            ),
            "get_full_path_or_raise": lambda _kind, name: str(folders / name),
        },
        "comfy": {},
        "comfy.model_management": management,
        "comfy.model_patcher": {"ModelPatcher": StubPatcher},
        "comfy.patcher_extension": {"CallbacksMP": SimpleNamespace(ON_LOAD="on_load")},
        "comfy.supported_models": {"ZImage": StubConfig},
    }
    for name, content in stubs.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    where = {"submodule_search_locations": [str(NODE)]}
    spec = importlib.util.spec_from_file_location("comfyui_node", NODE / "__init__.py", **where)
    package = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "comfyui_node", package)
    spec.loader.exec_module(package)
    yield package
    for name in [name for name in sys.modules if name.startswith("comfyui_node.")]:
        monkeypatch.delitem(sys.modules, name)


def call(nodes, name, **inputs):
    node = nodes.NODE_CLASS_MAPPINGS[name]()
    return getattr(node, node.FUNCTION)(**inputs)


def loaded(nodes, mode="auto", uncalibrated="refuse"):
    return call(nodes, "HswqLoadPack", file="pack.safetensors", mode=mode, uncalibrated=uncalibrated)[0]


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def denoised(patcher, **more):
    patcher.load()
    captions = noise(2, 40, 48, seed=1)
    return patcher.model.apply_model(noise(2, 16, 8, 8), torch.tensor([0.7, 0.7]), captions, **more)


def expected(model, lengths=(40, 40)):
    """x0 as the workbench itself computes it."""
    captions = [row[:length] for row, length in zip(noise(2, 40, 48, seed=1), lengths, strict=True)]
    with torch.no_grad():
        velocity = model.network()(noise(2, 16, 8, 8), torch.tensor([0.3, 0.3]), captions)
    return noise(2, 16, 8, 8) + 0.7 * velocity


def test_every_node_says_what_it_takes_and_gives(nodes):
    assert set(nodes.NODE_CLASS_MAPPINGS) == set(nodes.NODE_DISPLAY_NAME_MAPPINGS)
    for node in nodes.NODE_CLASS_MAPPINGS.values():
        assert "required" in node.INPUT_TYPES()
        assert callable(getattr(node, node.FUNCTION))
        assert node.CATEGORY == "HSWQ"
        assert all(isinstance(kind, str) for kind in node.RETURN_TYPES)


@pytest.mark.parametrize(
    ("mode", "uncalibrated"), [("auto", "refuse"), ("parity", "refuse"), ("tc", "dynamic")]
)
def test_a_pack_runs_as_a_model_of_comfyui_with_the_workbench_s_numbers(nodes, folders, mode, uncalibrated):
    pack = loaded(nodes, mode, uncalibrated)
    (patcher,) = call(nodes, "HswqToModel", pack=pack)
    option = None if uncalibrated == "refuse" else uncalibrated
    ours = hl.load(folders / "pack.safetensors", device="cpu", mode=mode, uncalibrated=option)
    assert torch.equal(denoised(patcher), expected(ours))
    assert patcher.size == sum(row.bytes for row in ours.report().layers)
    told = call(nodes, "HswqReport", pack=pack)
    assert ("nvfp4 run as " + ("tc" if mode == "tc" else "parity")) in told["ui"]["text"][0]
    assert {row.calls for row in pack.report().layers} == {1}


def test_padding_of_captions_is_cut_off_by_the_mask(nodes, folders):
    (patcher,) = call(nodes, "HswqToModel", pack=loaded(nodes))
    mask = torch.ones(2, 40)
    mask[1, 30:] = 0
    found = denoised(patcher, attention_mask=mask, num_tokens=40)
    assert torch.equal(found, expected(hl.load(folders / "pack.safetensors", device="cpu"), (40, 30)))


def test_uncalibrated_tc_is_refused_with_the_reason(nodes):
    with pytest.raises(HswqError, match="no input_scale"):
        loaded(nodes, "tc")


@pytest.mark.parametrize(
    ("how", "source"), [("branch", "none"), ("bake", "none"), ("bake_from_source", "source")]
)
def test_a_lora_goes_on_a_copy_and_proves_that_it_arrived(nodes, folders, how, source):
    pack = loaded(nodes)
    before = expected(pack)
    file = "none" if source == "none" else "source.safetensors"
    inputs = {"pack": pack, "lora": "style.safetensors", "strength": 0.8, "how": how, "source": file}
    changed, evidence = call(nodes, "HswqAddLora", **inputs)
    assert ("1 branched of 1" if how == "branch" else "1 baked") in evidence
    (patcher,) = call(nodes, "HswqToModel", pack=changed)
    ours = hl.load(folders / "pack.safetensors", device="cpu")
    origin = None if source == "none" else hl.load(folders / file, device="cpu")
    ours.attach(hl.load_lora(folders / "style.safetensors"), 0.8, how, origin)
    assert torch.equal(denoised(patcher), expected(ours))
    assert torch.equal(expected(pack), before)  # what came in is untouched
    assert not torch.equal(expected(ours), before)


def test_comfyui_s_own_loras_are_refused_at_load(nodes):
    (patcher,) = call(nodes, "HswqToModel", pack=loaded(nodes))
    patcher.add_patches({"diffusion_model.layers.0.attention.qkv.weight": "a delta"})
    with pytest.raises(HswqError, match="HSWQ LoRA") as caught:
        denoised(patcher)
    assert "layers.0.attention.qkv" in caught.value.found


@pytest.mark.parametrize(
    "more",
    [
        {"control": {"input": []}},
        {"ref_latents": [noise(1, 16, 8, 8)]},
        {"transformer_options": {"patches": {"attn1_patch": [print]}}},
        {"transformer_options": {"patches_replace": {"dit": {("block", 0): print}}}},
    ],
)
def test_what_the_network_cannot_take_into_account_is_refused(nodes, more):
    (patcher,) = call(nodes, "HswqToModel", pack=loaded(nodes))
    with pytest.raises(HswqError, match="cannot take that into account"):
        denoised(patcher, **more)


def test_moving_the_model_away_frees_it_and_the_next_picture_is_the_same(nodes):
    pack = loaded(nodes)
    (patcher,) = call(nodes, "HswqToModel", pack=pack)
    before = denoised(patcher)
    patcher.model.to("meta")
    assert pack._network is None
    assert torch.equal(denoised(patcher), before)
