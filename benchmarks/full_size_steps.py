"""Sections of `full_size.py` about running: steps, LoRAs, trajectories, other libraries, graphs, torch.compile."""

from __future__ import annotations

import time

import torch
from full_size_bench import GIB, Bench
from full_size_measure import Step, free, measure_step, one_step, seconds, spent
from full_size_peers import peer_rows
from safetensors.torch import save_file

import hswq_lab as hl
from hswq_lab.bench.gemm import fallback_reason
from hswq_lab.declared import Way
from hswq_lab.lora import LoraFile, load_lora
from hswq_lab.model import Model


def variants(bench: Bench) -> dict[str, Model]:
    """Every way to run a step, by name; bf16 first."""
    found = {"bf16": bench.models["bf16"]}
    for name in ("all", "nv90"):
        found |= {f"{name} {mode}": bench.models[name].in_mode(mode) for mode in ("parity", "tc", "tc8")}
        found[f"{name} tc8, kept FP8"] = bench.models[name].in_mode("tc8", fp8_weights="keep")
    return found


SPEED_TARGETS = {
    "all parity": ("≤ 1.12× bf16's time", 1 / 1.12),
    "all tc": ("≤ 1.12× bf16's time", 1 / 1.12),
    "all tc8": ("≥ 1.2× faster", 1.2),
    "all tc8, kept FP8": ("≥ 1.3× faster", 1.3),
    "nv90 tc8, kept FP8": ("≥ 1.15× faster", 1.15),
}


def step(bench: Bench) -> None:
    """One evaluation at 1024² with 256 caption tokens, alone and as a guidance pair."""
    captions = bench.captions()
    reference: dict[int, Step] = {}
    bench.facts["kernels"], bench.facts["fallbacks"] = {}, fallback_reason(bench.device)
    for name, model in variants(bench).items():
        for batch in (1, 2):
            free()
            profile = not bench.toy or name == "bf16"  # on a CPU the profiler takes far longer than the step
            found = measure_step(model, bench.size, captions[:batch], bench.repeats, profile=profile)
            base = reference.setdefault(batch, found)
            label = f"{name}, " + ("batch 1" if batch == 1 else "cfg pair")
            add_step(bench, label, name, found, base)
        model.unload()


def add_step(bench: Bench, label: str, name: str, found: Step, base: Step) -> None:
    """The rows of one way to run a step."""
    speed = base.seconds / found.seconds
    told, limit = SPEED_TARGETS.get(name, ("", 0.0))
    met = speed >= limit if told else None
    bench.add(
        "step", f"{label}: time", found.seconds * 1e3, "ms",
        bf16=base.seconds * 1e3, ratio=speed, target=told, met=met,
    )  # fmt: skip
    if found.peak:
        ratio = found.peak / base.peak
        bound = name.startswith("all") and "kept" not in name
        told, met = ("≤ 0.55×", ratio <= 0.55) if bound else ("", None)
        bench.add(
            "step", f"{label}: peak memory", found.peak / GIB, "GiB",
            bf16=base.peak / GIB, ratio=ratio, target=told, met=met,
        )  # fmt: skip
    wall, peak = found.flop / found.seconds / 1e12, bench.facts.get("bf16_tflops") or 1.0
    bench.add("step", f"{label}: rate on the clock", wall, "TFLOP/s", ratio=wall / peak)
    if found.kernel_seconds:
        rate = found.flop / found.kernel_seconds / 1e12
        bench.add("step", f"{label}: rate over kernel time", rate, "TFLOP/s", ratio=rate / peak)
    bench.facts["kernels"][label] = {"kinds": found.kernels, "top": found.top, "hits": found.hits}


def lora_of(bench: Bench, rank: int = 16) -> LoraFile:
    """A LoRA on all six Linears of every main block, in native names; saved, as real ones are files."""
    generator = torch.Generator().manual_seed(2)
    found = {}
    layers = bench.models["bf16"].layers()
    for name, (n, k) in layers.items():
        if name.startswith("layers."):
            found[f"diffusion_model.{name}.lora_A.weight"] = (
                torch.randn(rank, k, generator=generator) / k**0.5
            )
            found[f"diffusion_model.{name}.lora_B.weight"] = 0.02 * torch.randn(n, rank, generator=generator)
    path = bench.folder / "lora.safetensors"
    save_file({key: value.bfloat16() for key, value in found.items()}, path)
    return load_lora(path)


def lora(bench: Bench) -> None:
    """A LoRA on 180 layers, baked and as a branch: attaching, taking off, and the second generation."""
    file = lora_of(bench)
    captions = bench.captions()
    for name in ("all", "bf16"):
        model = bench.models[name] if name == "bf16" else bench.models[name].in_mode("parity")
        pristine = one_step(model, bench.size, captions[:1])()
        plain = seconds(one_step(model, bench.size, captions[:1]), bench.device, 3)
        for how in ("bake", "branch"):
            add_lora(bench, model, file, how, name, plain, pristine)
        model.unload()


def add_lora(
    bench: Bench, model: Model, file: LoraFile, how: Way, name: str, plain: float, pristine: torch.Tensor
) -> None:
    """The rows of one way to put the LoRA on one model."""
    captions = bench.captions()
    count = sum(layer.startswith("layers.") for layer in model.layers())
    label = f"{name}, {how} on {count} layers"
    with spent(bench.device) as took:
        report = model.attach(file, 0.8, how)
    told = {"target": "≤ 1.0 s", "met": took.seconds <= 1.0} if how == "bake" and name != "bf16" else {}
    bench.add("lora", f"{label}: attach with evidence", took.seconds, "s", **told)
    bench.facts[f"evidence {label}"] = str(report)
    with_lora = one_step(model, bench.size, captions[:1])()
    step_time = seconds(one_step(model, bench.size, captions[:1]), bench.device, 3)
    bench.add("lora", f"{label}: step, beside one without it", step_time * 1e3, "ms", ratio=step_time / plain)
    model.unload()
    free()
    with spent(bench.device) as rebuilt:
        model.network()
    again = one_step(model, bench.size, captions[:1])()
    bench.add("lora", f"{label}: rebuilt after unload", rebuilt.seconds, "s")
    bench.add("lora", f"{label}: second generation, equal bits", float(torch.equal(again, with_lora)), "")
    with spent(bench.device) as took:
        model.detach(file)
    back = one_step(model, bench.size, captions[:1])()
    bench.add("lora", f"{label}: detach", took.seconds, "s")
    bench.add("lora", f"{label}: pristine after it, equal bits", float(torch.equal(back, pristine)), "")


def compare(bench: Bench) -> None:
    """Trajectories of tc and tc8 against bf16, 4 seeds; made-up weights, so the cosines are no verdict on real ones."""
    pack_model = bench.models["all"]
    modes = {mode: pack_model.in_mode(mode) for mode in ("parity", "tc", "tc8")}
    seeds, steps = hl.SEEDS_20[: 1 if bench.toy else 4], 1 if bench.toy else 6
    with spent(bench.device) as took:
        report = hl.compare(bench.models["bf16"], modes, seeds, steps=steps, cfg=2.5)
    bench.add("compare", f"{len(seeds)} seeds × {steps} steps × 4 models, cfg pair", took.seconds, "s")
    for mode in modes:
        rows = report.summary()
        cosine = float(rows[rows["variant"] == mode]["final_cos"].mean())
        bench.add("compare", f"all {mode}: mean final cosine with bf16", cosine, "")
    for model in (bench.models["bf16"], *modes.values()):
        model.unload()


def peers(bench: Bench) -> None:
    """The same Linears through comfy-kitchen and torchao, where they are installed."""
    rows, why = peer_rows(bench.device, toy=bench.toy)
    bench.facts["peers"] = why
    for what, took, plain in rows:
        bench.add("peers", what, took * 1e6, "µs", bf16=plain * 1e6, ratio=plain / took)


def graphs(bench: Bench) -> None:
    """A CUDA graph of one step: what launches cost."""
    captions = bench.captions()
    for name in ("bf16", "all parity", "all tc", "all tc8", "all tc8, kept FP8"):
        model = variants(bench)[name]
        call = one_step(model, bench.size, captions[:1])
        plain = seconds(call, bench.device, 3)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        took = seconds(graph.replay, bench.device, bench.repeats)
        bench.add("graphs", f"{name}: replayed, beside launched", took * 1e3, "ms", ratio=plain / took)
        del graph
        model.unload()
        free()


def compiled(bench: Bench) -> None:
    """torch.compile of every main block (they are alike, so one compilation serves all)."""
    captions = bench.captions()
    for name in ("bf16", "all parity", "all tc8, kept FP8"):
        model = variants(bench)[name]
        call = one_step(model, bench.size, captions[:1])
        plain = seconds(call, bench.device, 3)
        start = time.perf_counter()
        for block in model.network().layers:
            block.compile(dynamic=False)
        call()
        first = time.perf_counter() - start
        took = seconds(call, bench.device, bench.repeats)
        bench.add("compile", f"{name}: step, beside one uncompiled", took * 1e3, "ms", ratio=plain / took)
        bench.add("compile", f"{name}: first step, compilation included", first, "s")
        model.unload()
        free()
