"""hswq-lab sensitivity, pack, calibrate: from a 16-bit checkpoint to a calibrated pack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hswq_lab as hl
from hswq_lab.arguments import positive
from hswq_lab.checkpoint import Checkpoint
from hswq_lab.cli.common import bar, finish, load, say, say_written, table, telling, workers
from hswq_lab.errors import HswqError
from hswq_lab.quantize.calibrate import clipping_warnings, observe_for, with_input_scales
from hswq_lab.quantize.impact import ImpactReport
from hswq_lab.quantize.pack import pack_to_file
from hswq_lab.quantize.plan import KEPT, Plan

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

SHOWN = 12  # rows in a console table; the files have them all


def sensitivity(args: argparse.Namespace) -> int:
    """Measures the layers' impact and shows the most sensitive ones."""
    model = load(args.model, args)
    if not 1 <= args.seeds <= len(model.prompts):
        expected = f"1 to {len(model.prompts)}: the model has a prompt for each"
        raise HswqError("impossible number of seeds", found=args.seeds, expected=expected)
    with bar("sensitivity") as progress, workers(args.workers, str(model.device)) as executor:
        report = hl.sensitivity(
            model,
            prompts=model.prompts[: args.seeds],
            steps=args.steps,
            formats=args.formats,
            scales=args.scales,
            activation_scales=args.activation_scales,
            layers=args.layers,
            resume=args.resume,
            executor=executor,
            progress=progress,
        )
    frame = report.to_frame().sort_values("impact", ascending=False)
    say(table(frame[["layer", "format", "impact", "low", "high"]].head(SHOWN)))
    say(f"the {min(SHOWN, len(frame))} most sensitive of {len(frame)} rows; --json and --save keep them all")
    return finish(args, report)


def pack(args: argparse.Namespace) -> int:
    """Packs a model by the plan that the options describe."""
    impact = ImpactReport.load(args.impact) if args.impact is not None else None
    model = load(args.model, args)
    if impact is not None:
        impact.check_layers(model.layers())
    plan = _plan_of(args, impact)
    with telling(), bar("packing") as progress:
        written = pack_to_file(
            model,
            args.out,
            plan,
            args.scales,
            activation_scales=args.activation_scales,
            max_shard_bytes=args.shard_bytes,
            progress=progress,
        )
    report = model.with_checkpoint(Checkpoint.open(written), written.name).report()
    say(report)
    say_written(written)
    return finish(args, report)


def _plan_of(args: argparse.Namespace, impact: ImpactReport | None) -> Plan:
    """The plan that the options describe; raises HswqError where they contradict each other."""
    goals = {"nvfp4": args.nvfp4, "bits": args.bits, "budget_bytes": args.budget, "final_cos": args.final_cos}
    keep = _pins(args.keep)
    if impact is not None:
        plan = impact.plan(**goals, keep=keep)
        if impact.unmeasured:
            kept = sum(plan.form_of(layer) in (None, KEPT) for layer in impact.unmeasured)
            say(f"warning: {len(impact.unmeasured)} layers were not measured; {kept} of them stay 16-bit")
        return plan
    if any(goal is not None for goal in goals.values()):
        raise HswqError("a goal needs the measured impacts", fix="add --impact FILE, or leave the goal out")
    plan = Plan.load(args.plan) if args.plan is not None else Plan({"*": args.all})
    return plan.with_pins(keep)


def _pins(texts: Sequence[str]) -> dict[str, str]:
    pins = {}
    for text in texts:
        pattern, equals, form = text.rpartition("=")
        if not equals:
            raise HswqError("a pin is written GLOB=FORMAT", found=text)
        pins[pattern] = form
    return pins


def calibrate(args: argparse.Namespace) -> int:
    """Gives a pack its input_scales and says which layers got none."""
    positive(args.headroom, "the headroom")
    packed = load(args.pack, args)
    model = load(args.model, args) if args.model is not None else None
    with bar("calibrating") as progress:
        report = observe_for(packed, model, steps=args.steps, progress=progress)
    calibrated = with_input_scales(packed, report, args.headroom)
    with bar("writing") as progress:
        hl.save(calibrated, args.out, progress=progress)
    for text in [*report.warnings, *clipping_warnings(args.headroom)]:
        say(f"warning: {text}")
    for layer in report.unreached:
        say(f"no scale: {layer} was never reached, or only zeros came")
    say(f"{len(report.rows) - len(report.unreached)} of {len(report.rows)} layers have an input_scale")
    say_written(args.out)
    return finish(args, report)
