"""What the demo leaves behind: one HTML report, pictures, plots, tables."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont

from hswq_lab import page
from hswq_lab.export import save_figure, static_export, why_no_static_export
from hswq_lab.plots import divergence_figure, impact_figure, layer_map_figure, ranges_figure, retention_figure
from hswq_lab.results import json_ready, write_text
from hswq_lab.tables import retention_table, verdict_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import plotly.graph_objects as go

    from hswq_lab.demo import Demo
    from hswq_lab.models.sampler import Run
    from hswq_lab.progress import Progress
    from hswq_lab.results import Result

_ENLARGE = 3  # the strip's pictures are shown this much larger than the model makes them
_LAYER_COLUMNS = ["layer", "format", "group", "n", "k", "bytes", "mode", "calls", "blocks", "clipped", "why"]
_LABEL, _GAP, _HEAD = 150, 6, 34  # pixels of the strip: width of the row labels, gap, height of the captions


def write_all(demo: Demo, out: Path, progress: Progress) -> str | None:
    """Writes everything; returns why there are no static plots, or None if there are.

    Args:
        demo: what `run_demo` made.
        out: folder.
        progress: told for every part.
    """
    figures = figures_of(demo)
    static = why_no_static_export() is None
    total = 3 + len(figures) * static
    progress(0, total, "tables")
    write_tables(demo, out / "tables")
    progress(1, total, "pictures")
    write_pictures(demo.pictures, out / "pictures")
    progress(2, total, "report.html")
    report_page(demo, figures).write(out / "report.html")
    if static:
        with static_export():
            for done, (name, figure) in enumerate(figures.items(), start=3):
                progress(done, total, f"{name}.png, .svg")
                save_figure(figure, out / "plots" / f"{name}.png")
                save_figure(figure, out / "plots" / f"{name}.svg")
    progress(total, total, "written")
    return why_no_static_export()


def figures_of(demo: Demo) -> dict[str, go.Figure]:
    """The plots by file name."""
    return {
        "divergence": divergence_figure(demo.trajectories),
        "impact": impact_figure(demo.impact, demo.plan),
        "layers": layer_map_figure(demo.load_report),
        "calibration": ranges_figure(demo.calibration),
        "retention": retention_figure(demo.ways),
    }


def write_tables(demo: Demo, folder: Path) -> None:
    """Every result object as CSV and JSON, the plan, and the verdict."""
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Result] = {
        "trajectories": demo.trajectories,
        "impact": demo.impact,
        "layers": demo.load_report,
        "calibration": demo.calibration,
        **{f"lora_{way}": report for way, report in demo.ways.items()},
    }
    for name, result in results.items():
        result.save(folder / f"{name}.csv")
        result.save(folder / f"{name}.json")
    for name, frame in (
        ("verdict", verdict_table(demo.trajectories)),
        ("seeds", demo.trajectories.summary()),
        ("retention", retention_table(demo.ways)),
    ):
        write_text(folder / f"{name}.csv", frame.to_csv(index=False))
        rows = json_ready(frame.to_dict(orient="records"))
        write_text(folder / f"{name}.json", json.dumps(rows, indent=1, allow_nan=False))
    demo.plan.save(folder / "plan.json")


def write_pictures(rows: Mapping[str, Sequence[Run]], folder: Path) -> None:
    """Every picture of the strip as the model made it, and the strip itself."""
    folder.mkdir(parents=True, exist_ok=True)
    for label, runs in rows.items():
        for number, run in enumerate(runs, start=1):
            run.image.save(folder / f"{number:02d}_{label.replace(' + ', '_').replace(' ', '-')}.png")
    strip_picture(rows).save(folder / "strip.png")


def strip_picture(rows: Mapping[str, Sequence[Run]]) -> Image.Image:
    """The strip as one picture: a row a variant, a column a prompt."""
    first = next(iter(rows.values()))
    side = first[0].size[1] * _ENLARGE
    width = _LABEL + len(first) * (side + _GAP)
    strip = Image.new("RGB", (width, _HEAD + len(rows) * (side + _GAP)), "white")
    draw, font = ImageDraw.Draw(strip), ImageFont.load_default(size=15)
    for column, run in enumerate(first):
        x = _LABEL + column * (side + _GAP)
        draw.text((x, 9), fitting(run.prompt, side, font), fill="#444444", font=font)
    for row, (label, runs) in enumerate(rows.items()):
        y = _HEAD + row * (side + _GAP)
        draw.text((8, y + side // 2 - 10), label, fill="#1d2329", font=font)
        for column, run in enumerate(runs):
            picture = run.image.resize((side, side), Image.Resampling.BICUBIC)
            strip.paste(picture, (_LABEL + column * (side + _GAP), y))
    return strip


def fitting(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """As much of a text as fits, with an ellipsis if something is left out."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"


def report_page(demo: Demo, figures: Mapping[str, go.Figure]) -> page.Page:
    """The report; `figures` as `figures_of` gives them."""
    settings, report = demo.settings, demo.trajectories
    made = page.Page(
        "mini-zimage in four bits",
        f"A 16-bit diffusion transformer, packed into {settings.nvfp4} NVFP4 and "
        f"{len(demo.load_report.layers) - settings.nvfp4} INT8 layers, calibrated, given a LoRA, and "
        f"compared with itself on {len(report.seeds)} seeds: what changed, layer by layer, step by step.",
    )
    made.section("In short", page.tiles(_headlines(demo)), *_verdicts(demo))
    made.section("Pictures", page.prose(_PICTURES), _strip(demo.pictures))
    made.section("Where the trajectories go", page.prose(_DIVERGENCE), page.plot(figures["divergence"]))
    made.section("What each layer costs", page.prose(_IMPACT), page.plot(figures["impact"]))
    made.section("The pack", page.prose(_PACK), page.plot(figures["layers"]))
    made.section("Calibration", page.prose(_CALIBRATION), page.plot(figures["calibration"]))
    retention = page.table(retention_table(demo.ways))
    made.section("The LoRA", page.prose(_LORA), page.plot(figures["retention"]), retention)
    layers = demo.load_report.to_frame()[_LAYER_COLUMNS]
    made.section("Every layer", page.prose(_LAYERS), page.table(layers, searchable=True))
    made.section("Every seed", page.table(report.summary()))
    made.section("How this was made", page.code(_HOW), page.note(_times(demo)))
    return made


def _headlines(demo: Demo) -> dict[str, str]:
    before, after = demo.model.report(), demo.load_report
    smaller = sum(row.bytes for row in before.layers) / sum(row.bytes for row in after.layers)
    values = {
        "bits a weight, scales included": f"{after.bits_per_weight:.2f}",
        "smaller than 16 bit (Linears)": f"{smaller:.2f}×",
    }
    for verdict in demo.trajectories.verdict.variants:
        values[f"{verdict.variant}: mean final cosine; worst seed {verdict.minimum:.4f}"] = (
            f"{verdict.mean:.4f}"
        )
    lowest = retention_table({"bake": demo.ways["bake"]})["lowest"].min()
    values["of the LoRA kept by baking, in the layer that keeps least"] = f"{100 * lowest:.1f} %"
    return values


def _verdicts(demo: Demo) -> list[str]:
    return [page.banner(verdict.text, good=verdict.passed) for verdict in demo.trajectories.verdict.variants]


def _strip(rows: Mapping[str, Sequence[Run]]) -> str:
    first = next(iter(rows.values()))
    return page.strip(
        [run.prompt for run in first], {label: [_png(run) for run in runs] for label, runs in rows.items()}
    )


def _png(run: Run) -> bytes:
    buffer = io.BytesIO()
    run.image.save(buffer, "PNG")
    return buffer.getvalue()


def _times(demo: Demo) -> str:
    spent = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in demo.seconds.items())
    return (
        f"Wall times on this machine: {spent}. SSIM by scikit-image with {demo.trajectories.ssim_parameters}."
    )


_PICTURES = (
    "The same prompt and the same starting noise in every column. “parity” multiplies the four-bit "
    "weights with 16-bit activations, “tc” quantises the activations to four bits too, as FP4 tensor "
    "cores do. A picture may differ in detail and still be the same picture; it should not become "
    "another one. The LoRA rows show whether it does on the pack what it does on the 16-bit model."
)
_DIVERGENCE = (
    "One line a seed: how far the pack's latent is from the 16-bit model's after each denoising step, "
    "and below the clean picture that each step predicts. Small errors of the weights add up over the "
    "steps; a sudden jump (a bifurcation) means that the run has turned towards another picture. The "
    "latent early in a run is mostly the common noise, so its cosine flatters: the predicted x0 tells "
    "pictures apart from the first step."
)
_IMPACT = (
    "Each layer was quantised alone, in its real format, and the final latent was compared. The layers "
    "on the left cost next to nothing in four bits; the few on the right would dominate the error, so "
    "the plan keeps them in eight."
)
_PACK = (
    "Weights are stored rotated (Hadamard, groups of 256 where the width allows): an outlier is spread "
    "over its group, and blocks of sixteen values with one scale each lose less."
)
_CALIBRATION = (
    "FP4 tensor cores need the scale of the activations beforehand. It is taken from real prompts, in "
    "the basis in which the activations are quantised: after the rotation. A value above the limit "
    "would be clipped."
)
_LORA = (
    "A LoRA's delta is small beside the rounding steps of four bits, and rounding to nearest would "
    "swallow most of it. As a branch it runs beside the packed weight and is exact. Baked, the weight "
    "is unrotated, the delta added, and the sum rotated and requantised with stochastic rounding: the "
    "delta arrives on average, and its price is the added error. Everything here is measured on the "
    "weights themselves."
)
_LAYERS = "As the pack runs in mode tc, with the activation blocks that the static scales clipped so far."
_HOW = """import hswq_lab as hl

model  = hl.load("mini-zimage")
impact = hl.sensitivity(model)
pack   = hl.calibrate(hl.pack(model, impact.plan(nvfp4=40)), model)
hl.save(pack, "mini_hswq_hybrid_nv40_convrot_nvfp4_calib.safetensors")
pack.attach(hl.load_lora("outline.safetensors"), how="branch")
report = hl.compare(model, {"parity": pack.in_mode("parity"), "tc": pack.in_mode("tc")})
report.save("report.html")"""
