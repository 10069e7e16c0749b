"""What many tests share: a tiny random Z-Image, synthetic runs, one torch thread."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from hswq_lab._backends import native
from hswq_lab.checkpoint import Checkpoint, write
from hswq_lab.cli import main
from hswq_lab.loading import MODEL_KEY
from hswq_lab.model import Model
from hswq_lab.models.companion import Companion
from hswq_lab.models.mini import LinearCodec, encode_text
from hswq_lab.models.sampler import Run, noise_hash, sigmas, starting_noise
from hswq_lab.models.zimage import ZImage, ZImageConfig
from hswq_lab.packing import pack_weight

# Tiny tensors on several threads spend their time waiting for each other, the more so on a shared machine.
torch.set_num_threads(1)

INSTRUCTION_SETS = ["baseline", "avx2", "avx512", "amx"]

TINY = ZImageConfig(
    dim=64, n_layers=2, n_refiners=1, head_dim=16, ffn_dim=128, cap_dim=512, time_dim=64, time_hidden=128
)


def random_tensors(config: ZImageConfig, seed: int = 0, dtype: torch.dtype = torch.bfloat16):
    """Every parameter of a Z-Image network under its native name: matrices of unit gain, norms near 1."""
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in ZImage(config).state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            values /= shape[1] ** 0.5
        elif "norm" in name or name == "cap_embedder.0.weight":
            values = 1 + 0.1 * values
        else:
            values *= 0.1
        tensors[name] = values.to(dtype)
    return tensors


@pytest.fixture(params=INSTRUCTION_SETS)
def isa(request):
    """Runs a test once on each instruction set; those that the machine lacks are skipped by name."""
    if (
        native is None
        or request.param not in INSTRUCTION_SETS[: INSTRUCTION_SETS.index(native.hardware_isa()) + 1]
    ):
        pytest.skip(f"no kernels for {request.param} here")
    native.limit_isa(request.param)
    yield request.param
    native.limit_isa("")


@pytest.fixture(scope="session")
def tiny_config():
    """Two blocks of width 64, one refiner of each kind, captions as the mini model's."""
    return TINY


@pytest.fixture(scope="session")
def tiny_tensors():
    """Native name → bf16 tensor of a random network of `tiny_config`."""
    return random_tensors(TINY)


@pytest.fixture
def tiny_checkpoint(tiny_tensors):
    """The same as a 16-bit Checkpoint in memory."""
    return Checkpoint.from_mapping(tiny_tensors, {"made_by": "tests"})


@pytest.fixture(scope="session")
def tiny_companion():
    """Text encoder of the mini model, a random orthonormal codec, twenty prompts, pictures of 16×16."""
    basis = torch.linalg.qr(torch.randn(48, 16, generator=torch.Generator().manual_seed(1))).Q
    return Companion(
        name="tiny",
        encode=encode_text,
        codec=LinearCodec(torch.zeros(48), basis, torch.ones(16)),
        prompts=[f"thing number {i}" for i in range(20)],
        size=(16, 16),
    )


@pytest.fixture
def tiny_model(tiny_checkpoint, tiny_companion):
    """A Model of the tiny checkpoint, fp32 on the CPU."""
    return Model(tiny_checkpoint, name="tiny", companion=tiny_companion)


@pytest.fixture
def tiny_pack(tiny_model):
    """The tiny model as a calibrated hybrid: every other Linear ConvRot NVFP4, the rest ConvRot INT8."""
    values = {}
    for place, layer in enumerate(tiny_model.layers()):
        name = f"{layer}.weight"
        kind = "nvfp4" if place % 2 else "int8_tensorwise"
        packed = pack_weight(tiny_model.checkpoint[name].float(), kind, 64, name=name)
        if kind == "nvfp4":
            packed = packed.with_input_scale(torch.tensor(8 / 2688))
        values[name] = packed
    return tiny_model.with_checkpoint(tiny_model.checkpoint.with_values(values), "tiny pack")


@pytest.fixture
def most_passes_untold(monkeypatch):
    """Runs work(progress) and gives the largest number of passes through a network between two ticks."""

    def measure(work) -> int:
        counts = [0]
        denoise = ZImage.denoise

        def counted(*args):
            counts[-1] += 1
            return denoise(*args)

        def progress(done, total, label):
            assert 0 <= done <= total
            counts.append(0)

        with monkeypatch.context() as patched:
            patched.setattr(ZImage, "denoise", counted)
            work(progress)
        return max(counts)

    return measure


@pytest.fixture
def make_run(tiny_companion):
    """Makes a synthetic Run: a straight way from a seed's noise to a seed's picture, plus an error."""

    def make(seed: int = 42, steps: int = 8, error: float = 0.0, codec: bool = True, **fields) -> Run:
        levels = sigmas(steps, 1.5)
        noise = starting_noise((16, 4, 4), seed)
        clean = starting_noise((16, 4, 4), seed + 1)
        wrong = torch.randn(noise.shape, generator=torch.Generator().manual_seed(7))
        x0 = torch.stack([clean + error * (1 - sigma) * wrong for sigma in levels[1:]])
        latents = torch.stack([s * noise + (1 - s) * each for s, each in zip(levels[1:], x0, strict=True)])
        run = Run(
            model="synthetic",
            mode="auto",
            prompt="a thing",
            seed=seed,
            steps=steps,
            cfg=2.5,
            shift=1.5,
            size=(16, 16),
            sigmas=levels,
            noise_hash=noise_hash(noise),
            latents=latents,
            x0=x0,
            codec=tiny_companion.codec if codec else None,
        )
        return replace(run, **fields)

    return make


@pytest.fixture(scope="session")
def model_file(tmp_path_factory, tiny_tensors):
    """A tiny 16-bit model that uses the mini model's text encoder, codec and prompts."""
    return str(
        write(
            tmp_path_factory.mktemp("model") / "tiny.safetensors",
            tiny_tensors.items(),
            {MODEL_KEY: "mini-zimage"},
        )
    )


@pytest.fixture(scope="session")
def pack_file(tmp_path_factory, model_file):
    """Packed and calibrated by the command itself."""
    folder = tmp_path_factory.mktemp("pack")
    packed, calibrated = str(folder / "packed.safetensors"), str(folder / "calibrated.safetensors")
    kept = ["--keep", "final_layer*=int8", "--scales", "rtn"]
    assert main(["pack", model_file, "-o", packed, "--all", "nvfp4", *kept]) == 0
    assert main(["calibrate", packed, "-o", calibrated, "--model", model_file, "--steps", "1"]) == 0
    return calibrated


@pytest.fixture(scope="session")
def lora_file(tmp_path_factory):
    """A rank-2 LoRA on one layer of the tiny model, ΔW large beside the rounding."""
    generator = torch.Generator().manual_seed(3)
    name = "transformer.layers.0.feed_forward.w1"
    tensors = {
        f"{name}.lora_A.weight": torch.randn(2, 64, generator=generator),
        f"{name}.lora_B.weight": torch.randn(128, 2, generator=generator) * 0.3,
    }
    path = tmp_path_factory.mktemp("lora") / "style.safetensors"
    save_file(tensors, path)
    return str(path)
