"""Sections of `full_size.py` about files: the source, packing, loading, calibrating."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from full_size_bench import GIB, Bench
from full_size_measure import bus_rates, disk_rates, seconds, spent

import hswq_lab as hl
from hswq_lab import packing
from hswq_lab.bench.machine import measure_roofline
from hswq_lab.captions import caption_companion, save_captions
from hswq_lab.checkpoint import write
from hswq_lab.model import Model
from hswq_lab.models.synthetic import tensors
from hswq_lab.quantize import observe_for, pack_to_file, with_input_scales

PROBE = "layers.1.attention.out.weight"


def ceilings(bench: Bench) -> None:
    """What the machine can do: the measures of all that follows."""
    roof = measure_roofline(bench.device, torch.bfloat16)
    bench.facts["bf16_tflops"], bench.facts["copy_gb_per_s"] = roof.matmul / 1e12, roof.copy / 1e9
    bench.add("machine", "bf16 product, 8192³", roof.matmul / 1e12, "TFLOP/s")
    bench.add("machine", "copy on the device, read + written", roof.copy / 1e9, "GB/s")
    wrote, read = disk_rates(bench.folder, (1 << 26) if bench.toy else (4 << 30))
    bench.add("machine", "disk, written", wrote / 1e9, "GB/s")
    bench.add("machine", "disk, read", read / 1e9, "GB/s")
    for name, rate in bus_rates(bench.device, (1 << 24) if bench.toy else (1 << 30)).items():
        bench.add("machine", f"bus {name}", rate / 1e9, "GB/s")


def checkpoint(bench: Bench) -> None:
    """The 16-bit file, and captions."""
    with spent(bench.device) as took:
        write(bench.source, tensors(bench.config, 0, bench.device), {"synthetic": "0"})
    bench.add("source", "drawing and writing the 16-bit file", took.seconds, "s")
    bench.add("source", "16-bit file", bench.source.stat().st_size / 1e9, "GB")
    prompts = [f"prompt {number}" for number in range(20)] + [""]
    path = bench.folder / "captions.safetensors"
    save_captions(path, dict(zip(prompts, (value.bfloat16() for value in bench.captions()), strict=True)))


def opened(bench: Bench, path: Path) -> Model:
    """A model of a file, with the captions."""
    plain = hl.load(path, bench.device)
    companion = caption_companion(bench.folder / "captions.safetensors", bench.size)
    return Model(
        plain.checkpoint, name=plain.name, companion=companion, device=plain.device, dtype=plain.dtype
    )


def pack(bench: Bench) -> None:
    """From file to file, on the card, streaming."""
    model = opened(bench, bench.source)
    nbytes = bench.source.stat().st_size
    for name, plan in bench.plans.items():
        for scales in ("rtn", "sweep"):
            path = bench.folder / f"{name}_{scales}.safetensors"
            with spent(bench.device) as took:
                pack_to_file(model, path, plan, scales)
            limits = [("≤ 60 s", took.seconds <= 60), ("≤ 2 GiB", took.host <= 2 * GIB)]
            (time_target, in_time), (host_target, in_host) = limits if scales == "rtn" else [("", None)] * 2
            label = f"{name}, {scales}"
            bench.add("pack", f"{label}: time", took.seconds, "s", target=time_target, met=in_time)
            bench.add("pack", f"{label}: source read at", nbytes / took.seconds / 1e9, "GB/s")
            bench.add(
                "pack", f"{label}: host memory, own", took.host / GIB, "GiB", target=host_target, met=in_host
            )
            bench.add("pack", f"{label}: device memory", took.device / GIB, "GiB")
            if scales == "sweep":
                path.unlink()  # times are all that is wanted of it
    packed = hl.Checkpoint.open(bench.folder / "all_rtn.safetensors")[PROBE]
    on_cpu = packing.pack_weight(model.checkpoint[PROBE], "nvfp4", packed.group, "rtn")
    bench.add("pack", f"{PROBE}: same bits as packed on the CPU", float(packed.same_bits(on_cpu)), "")


def load(bench: Bench) -> None:
    """Opening, building on the card, and what the weights take."""
    files = {"bf16": bench.source, **{name: bench.folder / f"{name}_rtn.safetensors" for name in bench.plans}}
    bf16_bytes = 0
    seconds_16, memory_16 = 0.0, 0.0
    for name, path in files.items():
        with spent(bench.device) as took:
            model = bench.models[name] = opened(bench, path)
            model.network()
        nbytes = sum(row.bytes for row in model.report().layers)
        model.unload()
        if name == "bf16":
            bf16_bytes, seconds_16, memory_16 = nbytes, took.seconds, took.device / GIB
        limit = {"nv90": 0.42, "all": 0.30}.get(name)
        beside: dict[str, Any] = {} if name == "bf16" else {"bf16": seconds_16}
        bench.add("load", f"{name}: open, verify, build", took.seconds, "s", **beside)
        if name != "bf16":
            beside = {"bf16": memory_16, "ratio": took.device / GIB / memory_16 if memory_16 else None}
        bench.add("load", f"{name}: device memory", took.device / GIB, "GiB", **beside)
        ratio = nbytes / bf16_bytes
        told = {} if limit is None else {"target": f"≤ {limit}×", "met": ratio <= limit}
        beside = {} if name == "bf16" else {"bf16": bf16_bytes / 1e9, "ratio": ratio}
        bench.add("load", f"{name}: Linears' weights", nbytes / 1e9, "GB", **beside, **told)


def calibrate(bench: Bench) -> None:
    """All layers, from the 16-bit model's activations, 8 prompts and 4 steps."""
    model = bench.models["bf16"]
    prompts, steps = model.prompts[: 2 if bench.toy else 8], 1 if bench.toy else 4
    plain = seconds(lambda: model.generate(prompts[0], steps=steps, cfg=1.0), bench.device, 2, 1)
    with spent(bench.device) as took:
        ranges = observe_for(bench.models["all"], model, prompts, steps=steps, cfg=1.0)
    what = f"all layers, {len(prompts)} prompts × {steps} steps"
    alone = plain * len(prompts)
    bench.add("calibrate", what, took.seconds, "s", bf16=alone, ratio=took.seconds / alone)
    bench.facts["unreached"] = ranges.unreached
    for name in bench.plans:
        bench.models[name] = with_input_scales(bench.models[name], ranges)
    model.unload()
