"""The nodes: thin, so that everything that can go wrong goes wrong in hswq_lab, where it is tested.

Of ComfyUI they use `folder_paths`, `comfy.supported_models.ZImage`, `comfy.model_patcher.ModelPatcher` with its ON_LOAD
callback, and `comfy.model_management`; nothing of it is changed.
"""

from __future__ import annotations

from typing import Any, ClassVar

import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.supported_models
import folder_paths

import hswq_lab as hl
from hswq_lab.modes import Requested

from .diffusion import LabDiffusion

CATEGORY = "HSWQ"
PACK = "HSWQ_PACK"
NO_SOURCE = "none"
REFUSE = "refuse"


class LoadPack:
    """A pack (or a 16-bit checkpoint) in a mode."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 - ComfyUI's own spelling
        """What ComfyUI shows."""
        return {
            "required": {
                "file": (folder_paths.get_filename_list("diffusion_models"),),
                "mode": (["auto", "parity", "tc", "tc8"],),
                "uncalibrated": ([REFUSE, "dynamic", "unit"],),
            }
        }

    RETURN_TYPES: ClassVar = (PACK, "STRING")
    RETURN_NAMES: ClassVar = ("pack", "report")
    FUNCTION = "load"
    CATEGORY = CATEGORY

    def load(self, file: str, mode: Requested, uncalibrated: str) -> tuple[hl.Model, str]:
        """Opens the file; its weights are read when the first picture is made."""
        model = hl.load(
            folder_paths.get_full_path_or_raise("diffusion_models", file),
            comfy.model_management.get_torch_device(),
            mode=mode,
            uncalibrated=None if uncalibrated == REFUSE else uncalibrated,
            origin="asked for in ComfyUI",
        )
        return model, str(model.report())


class AddLora:
    """A LoRA on a pack, with the proof that it arrived."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 - ComfyUI's own spelling
        """What ComfyUI shows."""
        sources = [NO_SOURCE, *folder_paths.get_filename_list("diffusion_models")]
        return {
            "required": {
                "pack": (PACK,),
                "lora": (folder_paths.get_filename_list("loras"),),
                "strength": ("FLOAT", {"default": 1.0, "min": -10.0, "max": 10.0, "step": 0.05}),
                "how": (["branch", "bake", "bake_from_source"],),
                "source": (sources,),
            }
        }

    RETURN_TYPES: ClassVar = (PACK, "STRING")
    RETURN_NAMES: ClassVar = ("pack", "evidence")
    FUNCTION = "add"
    CATEGORY = CATEGORY

    def add(self, pack: hl.Model, lora: str, strength: float, how: Any, source: str) -> tuple[hl.Model, str]:  # noqa: ANN401
        """A view of the pack with the LoRA; the pack that came in stays as it is, as ComfyUI's cache expects."""
        changed = pack.on(pack.device)
        file = hl.load_lora(folder_paths.get_full_path_or_raise("loras", lora))
        origin = (
            None if source == NO_SOURCE else folder_paths.get_full_path_or_raise("diffusion_models", source)
        )
        report = changed.attach(file, strength, how, None if origin is None else hl.Checkpoint.open(origin))
        return changed, str(report)


class ToModel:
    """A pack as the MODEL that ComfyUI's samplers take."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 - ComfyUI's own spelling
        """What ComfyUI shows."""
        return {"required": {"pack": (PACK,)}}

    RETURN_TYPES: ClassVar = ("MODEL",)
    FUNCTION = "convert"
    CATEGORY = CATEGORY

    def convert(self, pack: hl.Model) -> tuple[Any]:
        """ComfyUI's model around our network: its sampling, latent format and conditioning, our arithmetic."""
        config = comfy.supported_models.ZImage({"image_model": "lumina2", "dim": pack.config.dim})
        config.unet_config["disable_unet_model_creation"] = True
        config.set_inference_dtype(pack.dtype, None)
        model = config.get_model({})
        model.diffusion_model = LabDiffusion(pack)
        patcher = comfy.model_patcher.ModelPatcher(
            model,
            load_device=comfy.model_management.get_torch_device(),
            offload_device=comfy.model_management.unet_offload_device(),
            size=sum(row.bytes for row in pack.report().layers),
        )
        patcher.add_callback(comfy.patcher_extension.CallbacksMP.ON_LOAD, refuse_patches)
        return (patcher,)


class Report:
    """What a pack's layers did so far: modes, calls, clipped blocks."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802 - ComfyUI's own spelling
        """What ComfyUI shows; `after` makes it wait for a picture."""
        return {"required": {"pack": (PACK,)}, "optional": {"after": ("LATENT",)}}

    @classmethod
    def IS_CHANGED(cls, **_inputs: object) -> float:  # noqa: N802 - ComfyUI's own spelling
        """Counters change without the inputs changing: never take the answer from the cache."""
        return float("nan")

    RETURN_TYPES: ClassVar = ("STRING",)
    FUNCTION = "tell"
    OUTPUT_NODE = True
    CATEGORY = CATEGORY

    def tell(self, pack: hl.Model, after: object = None) -> dict[str, Any]:  # noqa: ARG002 - it only orders the nodes
        """The report as text, shown on the node."""
        text = str(pack.report())
        return {"ui": {"text": [text]}, "result": (text,)}


def refuse_patches(patcher: Any, *_about_loading: object) -> None:  # noqa: ANN401 - ComfyUI's class
    """Called by ComfyUI when it loads the model: weights that other nodes want to patch cannot be patched.

    Raises:
        HswqError: a LoRA of ComfyUI's own loader, or another weight patch, is on the model.
    """
    if patcher.patches or patcher.hook_patches:
        raise hl.HswqError(
            "ComfyUI's own LoRA nodes cannot change packed weights, and would do nothing",
            found=", ".join(sorted(map(str, patcher.patches))[:3]) or "hook patches",
            fix="use the node HSWQ LoRA, before HSWQ Model",
        )


NODE_CLASS_MAPPINGS = {
    "HswqLoadPack": LoadPack,
    "HswqAddLora": AddLora,
    "HswqToModel": ToModel,
    "HswqReport": Report,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "HswqLoadPack": "HSWQ Load Pack",
    "HswqAddLora": "HSWQ LoRA",
    "HswqToModel": "HSWQ Model",
    "HswqReport": "HSWQ Report",
}
