"""Coverage-guided fuzzing of what reads safetensors: checkpoints and LoRAs. Needs atheris (pip install atheris).

    python tools/fuzz_coverage.py -max_total_time=600 build/corpus

The fuzzer writes the header's JSON, as bytes and as a tree; its length is always right, and the data behind it are as
long as it says. Only HswqError may come out. Arguments are libFuzzer's; an input that crashes is left where it runs.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["hswq_lab.checkpoint", "hswq_lab.lora", "hswq_lab.formats"]):
    from hswq_lab import HswqError, check, inspect, load_lora
    from hswq_lab.checkpoint import Checkpoint

_LAYERS = ("a", "layers.0.attention.qkv", "layers.0.attention.to_q", "layers_0_attention_to_q")
_PARTS = (
    *(
        "weight",
        "weight_scale",
        "weight_scale_2",
        "input_scale",
        "comfy_quant",
        "scale_weight",
        "alpha",
        "dora_scale",
    ),
    *(
        "lora_up.weight",
        "lora_down.weight",
        "lora_A.weight",
        "lora_B.weight",
        "lokr_w1",
        "lokr_w2",
        "hada_w1_a",
    ),
)
_PREFIXES = ("", "model.diffusion_model.", "lora_unet_", "transformer.")
NAMES = [f"{prefix}{layer}.{part}" for prefix in _PREFIXES for layer in _LAYERS for part in _PARTS]
VALUES = [
    *(0, -1, 1, 16, 64, 2**62, 10**400, 1.5, None, True, "", "U8", "F32", "BF16", "F8_E4M3", "I64", "nvfp4"),
    *([], [0], [16, 8], [128, 4], [0, 0], [0, 128], [128, 640], [0, 32], {}, '{"format": "nvfp4"}'),
    {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
]
FILE = Path(tempfile.mkdtemp()) / "x.safetensors"
LAYERS = {"layers.0.attention.qkv": (48, 16), "layers.0.feed_forward.w1": (32, 16)}
SEEDS = (
    {"a.weight": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [0, 32]}},
    {
        "a.weight": {"dtype": "U8", "shape": [16, 8], "data_offsets": [0, 128]},
        "a.weight_scale": {"dtype": "F8_E4M3", "shape": [128, 4], "data_offsets": [128, 640]},
        "a.weight_scale_2": {"dtype": "F32", "shape": [], "data_offsets": [640, 644]},
        "__metadata__": {
            "_quantization_metadata": json.dumps({"layers": {"a": {"format": "nvfp4", "convrot": True}}})
        },
    },
    {
        "diffusion_model.layers.0.attention.to_q.lora_A.weight": {
            "dtype": "F32",
            "shape": [1, 16],
            "data_offsets": [0, 64],
        },
        "diffusion_model.layers.0.attention.to_q.lora_B.weight": {
            "dtype": "F32",
            "shape": [16, 1],
            "data_offsets": [64, 128],
        },
        "__metadata__": {"lora_adapter_metadata": json.dumps({"r": 1, "lora_alpha": 1})},
    },
)


def one_file(content: bytes) -> None:
    """A header up to the first zero byte, and the byte that follows as all of the data."""
    header, _, data = content.partition(b"\0")
    FILE.write_bytes(len(header).to_bytes(8, "little") + header + (data[:1] or b"\1") * data_size(header))
    with suppress(HswqError):
        checkpoint = Checkpoint.open(FILE)
        inspect(checkpoint)
        for name in checkpoint:
            checkpoint[name]
    str(check(FILE))
    with suppress(HswqError):
        lora = load_lora(FILE)
        str(lora.report(LAYERS))
        lora.deltas(LAYERS, allow_unmatched=True)


def data_size(header: bytes) -> int:
    """What the header says, within reason."""
    with suppress(ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        records = [record for name, record in json.loads(header).items() if name != "__metadata__"]
        return max(0, min(2**16, max(int(record["data_offsets"][1]) for record in records)))
    return 128


def mutate(content: bytes, limit: int, seed: int) -> bytes:
    """Half of the time one node of the JSON tree becomes another one; else bytes change."""
    choose = random.Random(seed)  # noqa: S311 - libFuzzer's seed, so that a run can be repeated
    header, _, data = content.partition(b"\0")
    tree = None
    with suppress(ValueError, RecursionError):
        tree = json.loads(header)
    if not isinstance(tree, dict) or not tree or choose.random() < 0.3:
        return atheris.Mutate(content, limit)
    place, key = tree, choose.choice(list(tree))
    while choose.random() < 0.7 and isinstance(place[key], dict | list) and place[key]:
        place = place[key]
        key = choose.choice(list(place) if isinstance(place, dict) else range(len(place)))
    if isinstance(place, dict) and choose.random() < 0.4:
        place[choose.choice(NAMES)] = place.pop(key)
    else:
        place[key] = choose.choice(VALUES)
    return (json.dumps(tree).encode() + b"\0" + data)[:limit]


def main() -> None:
    """Runs until libFuzzer's limit."""
    for place in (Path(name) for name in sys.argv[1:] if not name.startswith("-")):
        place.mkdir(parents=True, exist_ok=True)
        for number, header in enumerate(SEEDS):
            (place / f"seed{number}").write_bytes(json.dumps(header).encode() + b"\0" + b"\1" * 128)
    atheris.Setup(sys.argv, one_file, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
