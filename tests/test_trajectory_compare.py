"""hl.compare: pairing, refusals, report and files; the same bits on any executor; cancel between steps."""

from __future__ import annotations

import hashlib
import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pandas as pd
import pytest
import torch

from hswq_lab.checkpoint import Checkpoint
from hswq_lab.errors import Cancelled, HswqError
from hswq_lab.executors import local_pool
from hswq_lab.jobs import Job
from hswq_lab.loading import save
from hswq_lab.model import Model
from hswq_lab.tables import verdict_table
from hswq_lab.trajectory import compare
from hswq_lab.trajectory.compare import compare_runs, pair

SEEDS = (42, 137, 5517)


@pytest.fixture
def variants(tiny_pack):
    return {"parity": tiny_pack.in_mode("parity"), "tc": tiny_pack.in_mode("tc")}


@pytest.fixture(scope="module")
def pool():
    with local_pool(2) as made:
        yield made


def bits(report):
    """Everything that was measured, and every latent, as text."""
    runs = [report.reference_runs, *report.variant_runs.values()]
    return json.dumps(report.without_runs().to_dict()), [
        run.latents.numpy().tobytes() + run.x0.numpy().tobytes() for each in runs for run in each
    ]


def test_a_report_has_the_promised_columns_and_rows(tiny_model, variants):
    report = compare(tiny_model, variants, SEEDS, steps=4)
    frame, summary = report.to_frame(), report.summary()
    assert list(frame) == [
        *("variant", "seed", "prompt", "step", "sigma"),
        *("cos_latent", "cos_x0", "mse_latent", "mse_x0"),
    ]
    assert len(frame) == 2 * 3 * 4
    assert list(summary) == [
        *("variant", "seed", "final_cos", "max_drop", "bifurcated", "same_image", "ssim", "psnr"),
    ]
    assert list(summary["variant"]) == ["parity"] * 3 + ["tc"] * 3
    assert list(summary["seed"]) == [*SEEDS] * 2
    first = frame[(frame.variant == "tc") & (frame.seed == 137)]
    assert list(first["step"]) == [0, 1, 2, 3]
    assert list(first["sigma"]) == report.sigmas[:-1]
    assert first["sigma"].iloc[0] == 1
    assert list(first["prompt"].unique()) == ["thing number 1"]
    # Coarser arithmetic strays further; both stay near, since they are the same weights.
    means = summary.groupby("variant")["final_cos"].mean()
    assert 1 > means["parity"] > means["tc"] > 0.9
    assert report.verdict["parity"].passed


def test_equal_models_are_equal_and_a_stranger_is_not(tiny_model, tiny_checkpoint):
    strange = {name: value.flip(0) for name, value in tiny_checkpoint.items() if value.ndim == 2}
    other = tiny_model.with_checkpoint(tiny_checkpoint.with_values(strange))
    report = compare(tiny_model, {"same": tiny_model.on("cpu"), "other": other}, SEEDS, steps=4)
    same = report.summary().query("variant == 'same'")
    assert (same["final_cos"] > 1 - 1e-12).all()
    assert (same["psnr"] == math.inf).all()
    assert report.verdict["same"].same_image
    assert not report.verdict["other"].passed
    assert not report.verdict.passed


def test_a_planted_fault_is_found(tiny_model, tiny_pack):
    """One layer's tensor scale × 8."""
    checkpoint = tiny_pack.checkpoint
    name = next(entry.name for entry in checkpoint.entries() if entry.format == "nvfp4")
    broken = replace(checkpoint[name], scale=checkpoint[name].scale * 8)
    faulty = tiny_pack.with_checkpoint(checkpoint.with_values({name: broken}))
    report = compare(tiny_model, {"good": tiny_pack, "faulty": faulty}, SEEDS, steps=4)
    assert report.verdict["good"].mean > report.verdict["faulty"].mean + 0.01


def test_nan_weights_fail_by_seed_and_stay_out_of_the_json(tiny_model, tiny_checkpoint, tmp_path):
    """E3 and F1"""
    name = "final_layer.linear.weight"
    sick = tiny_checkpoint.with_values({name: torch.full_like(tiny_checkpoint[name], math.nan)})
    report = compare(tiny_model, {"sick": tiny_model.with_checkpoint(sick)}, SEEDS, steps=2)
    assert set(report.verdict["sick"].failed) == set(SEEDS)
    content = json.loads(report.save(tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert content["traces"][0]["cos_latent"] == [None, None]
    assert content["summary"][0]["ssim"] is None
    assert content["verdict"]["variants"][0]["passed"] is False


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_reference_of_nan_is_no_variants_fault(tiny_model, tiny_checkpoint, elsewhere):
    name = "final_layer.linear.weight"
    sick = tiny_checkpoint.with_values({name: torch.full_like(tiny_checkpoint[name], math.nan)})
    reference, told = tiny_model.with_checkpoint(sick, "sick"), []
    with ThreadPoolExecutor(1) as pool, pytest.raises(HswqError) as error:
        compare(
            reference,
            {"well": tiny_model},
            SEEDS,
            steps=2,
            executor=pool if elsewhere else None,
            progress=lambda done, total, label: told.append(label),
        )
    assert re.search(r"reference itself.*tensor: sick, seed 42; found: in step 0 of 2", str(error.value))
    assert elsewhere or not any("well" in label for label in told)


def test_what_a_failed_seed_would_have_done_is_not_known(make_run, tmp_path):
    reference, broken = make_run(), make_run()
    broken.latents[-1, 0, 0, 0] = math.inf
    report = compare_runs([reference], {"tc": [broken]})
    row = report.summary().iloc[0]
    assert math.isnan(row["max_drop"])
    assert row["bifurcated"] is None
    assert not row["same_image"]
    (stored,) = json.loads(report.save(tmp_path / "r.json").read_text())["summary"]
    assert (stored["max_drop"], stored["bifurcated"], stored["same_image"]) == (None, None, False)
    assert verdict_table(report).loc[0, "bifurcated"] == "not known"
    page = report.save(tmp_path / "r.html").read_text()
    assert "tc" in page


def test_the_files_say_how_it_was_measured(tiny_model, variants, tmp_path):
    report = compare(tiny_model, variants, SEEDS[:1], steps=3, cfg=1.5)
    content = json.loads(report.save(tmp_path / "r.json").read_text())
    assert content["ssim_parameters"]["gaussian_weights"] is True
    assert content["ssim_parameters"]["data_range"] == 1.0
    assert (content["steps"], content["cfg"], content["shift"]) == (3, 1.5, tiny_model.default_shift)
    assert content["noise_hashes"] == [report.reference_runs[0].noise_hash]
    assert "reference_runs" not in content
    assert content["verdict"]["passed"] == report.verdict.passed
    assert len(pd.read_csv(report.save(tmp_path / "r.csv"))) == 2 * 3
    dropped = report.without_runs()
    assert dropped.variant_runs == {}
    assert dropped.summary().equals(report.summary())


def test_the_files_say_what_was_judged(tiny_model, tiny_pack, tmp_path):
    path = tmp_path / "stored.safetensors"
    save(tiny_pack, path)
    stored = tiny_model.with_checkpoint(Checkpoint.open(path), "stored")
    report = compare(tiny_model, {"tc": tiny_pack.in_mode("tc"), "file": stored}, [1], steps=1)
    told = json.loads(report.save(tmp_path / "r.json").read_text())["compared"]
    assert list(told) == ["reference", "tc", "file"]
    assert told["reference"]["sha256"] == tiny_model.checkpoint.sha256
    assert told["tc"] == {
        "model": tiny_pack.name,
        "file": "",
        "sha256": tiny_pack.checkpoint.sha256,
        "mode": "tc",
        "loras": [],
    }
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (told["file"]["file"], told["file"]["sha256"]) == (str(path), digest)
    assert str(report).splitlines()[2:] == [
        f"reference: tiny in memory, SHA-256 {tiny_model.checkpoint.sha256}",
        f"tc: {tiny_pack.name} in memory, SHA-256 {tiny_pack.checkpoint.sha256}",
        f"file: {path}, SHA-256 {digest}",
    ]
    assert digest in report.save(tmp_path / "r.html").read_text()


def test_runs_alone_do_not_say_what_made_them(make_run):
    report = compare_runs([make_run()], {"v": [make_run()]})
    assert report.compared == {}
    assert str(report) == report.verdict.text


def test_a_run_does_not_depend_on_what_else_runs(tiny_model, variants):
    together = compare(tiny_model, variants, SEEDS, steps=3)
    alone = compare(tiny_model, {"tc": variants["tc"]}, SEEDS[2:], prompts="thing number 2", steps=3)
    assert torch.equal(alone.variant_runs["tc"][0].latents, together.variant_runs["tc"][2].latents)
    assert alone.of("tc")[0] == together.of("tc")[2]


def test_prompts_pair_with_seeds_or_one_goes_with_all(tiny_model):
    assert pair(tiny_model, [1, 2], None) == [("thing number 0", 1), ("thing number 1", 2)]
    assert pair(tiny_model, [1, 2], "x") == [("x", 1), ("x", 2)]
    assert pair(tiny_model, [1, 2], ["x"]) == [("x", 1), ("x", 2)]
    assert pair(tiny_model, [1, 2], ["x", "y"]) == [("x", 1), ("y", 2)]
    features = torch.zeros(3, 512)
    assert pair(tiny_model, [1, 2], features)[1][0] is features


@pytest.mark.parametrize(
    ("seeds", "prompts", "match"),
    [
        ([1, 2, 3], ["a", "b"], "do not pair"),
        ([1], ["a", "b"], "do not pair"),
        (list(range(21)), None, "do not pair"),
        ([1], [], "do not pair"),
        ([], None, "seeds are needed"),
        ([1, 2, 1], None, "each of them once"),
        ([-1], None, "a seed is a whole number"),
    ],
)
def test_what_does_not_pair_is_refused(tiny_model, variants, seeds, prompts, match):
    with pytest.raises(HswqError, match=match):
        compare(tiny_model, variants, seeds, prompts, steps=1)


def test_shift_and_size_are_the_references_whatever_a_variant_would_take(tiny_model, tiny_checkpoint):
    odd = replace(tiny_model.companion, shift=6.0, size=(32, 32))
    other = Model(tiny_checkpoint, name="odd", companion=odd)
    report = compare(tiny_model, {"odd": other}, SEEDS[:1], steps=2)
    assert (report.shift, report.size) == (tiny_model.default_shift, (16, 16))
    assert report.of("odd")[0].final_cos == pytest.approx(1)
    asked = compare(tiny_model, {"odd": other}, SEEDS[:1], steps=2, shift=2.0, size=(16, 32))
    assert (asked.shift, asked.size) == (2.0, (16, 32))
    assert asked.variant_runs["odd"][0].final.shape == (16, 4, 8)


def test_nothing_to_compare_is_refused(tiny_model):
    for variants in ({}, {"reference": tiny_model}):
        with pytest.raises(HswqError, match="nothing to compare"):
            compare(tiny_model, variants, SEEDS, steps=1)


def test_caption_features_stand_for_prompts(tiny_model):
    features = tiny_model.encode("thing number 0")
    by_text = compare(tiny_model, {"same": tiny_model}, [7], "thing number 0", steps=2)
    by_features = compare(tiny_model, {"same": tiny_model}, [7], features, steps=2)
    assert torch.equal(by_text.reference_runs[0].latents, by_features.reference_runs[0].latents)


def test_runs_made_before_can_be_compared(make_run):
    reference = [make_run(seed) for seed in SEEDS]
    report = compare_runs(reference, {"v": [make_run(seed, error=0.05) for seed in SEEDS]})
    assert report.seeds == list(SEEDS)
    assert report.steps == 8
    with pytest.raises(HswqError, match="one run for each"):
        compare_runs(reference, {"v": reference[:2]})
    with pytest.raises(HswqError, match="one run for each"):
        compare_runs([], {})
    with pytest.raises(HswqError, match="another seed"):
        compare_runs(reference, {"v": reference[::-1]})
    mixed = [make_run(42), make_run(137, steps=9)]
    with pytest.raises(HswqError, match="among the reference's runs"):
        compare_runs(mixed, {"v": mixed})


def test_progress_counts_runs_and_cancels_between_steps(tiny_model, variants):
    ticks = []
    compare(tiny_model, variants, SEEDS[:2], steps=3, progress=lambda *tick: ticks.append(tick))
    assert [done for done, _, _ in ticks] == sorted(done for done, _, _ in ticks)
    assert ticks[0][:2] == (0, 6)
    assert ticks[-1] == (6, 6, "tc, seed 137")

    job = Job(lambda progress: compare(tiny_model, variants, SEEDS, steps=3, progress=progress))
    job.cancel()
    with pytest.raises(Cancelled):
        job.start().wait(30)
    assert job.done == 0


def test_threads_give_the_same_bits(tiny_model, variants):
    serial = compare(tiny_model, variants, SEEDS, steps=3)
    with ThreadPoolExecutor(2) as threads:
        assert bits(compare(tiny_model, variants, SEEDS, steps=3, executor=threads)) == bits(serial)


def test_processes_give_the_same_bits_and_pictures(tiny_model, variants, pool):
    serial = compare(tiny_model, variants, SEEDS, steps=3)
    ticks = []
    spread = compare(
        tiny_model, variants, SEEDS, steps=3, executor=pool, progress=lambda *tick: ticks.append(tick)
    )
    assert bits(spread) == bits(serial)
    assert spread.variant_runs["tc"][0].image.tobytes() == serial.variant_runs["tc"][0].image.tobytes()
    assert ticks[0][:2] == (0, 9)
    assert ticks[-1][:2] == (9, 9)


def test_cancel_stops_a_pool(tiny_model, variants, pool):
    def stop_after_one(done, total, label):
        if done:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        compare(tiny_model, variants, SEEDS, steps=3, executor=pool, progress=stop_after_one)
    # The pool is not harmed.
    assert compare(tiny_model, variants, SEEDS[:1], steps=1, executor=pool).seeds == [42]


def test_an_error_in_a_worker_comes_back_whole(tiny_model, variants, pool):
    with pytest.raises(HswqError, match="does not fit the model") as caught:
        compare(tiny_model, variants, SEEDS, steps=3, size=(17, 16), executor=pool)
    assert "multiples" in str(caught.value.expected)


def test_what_is_no_model_is_refused(tiny_model):
    with pytest.raises(HswqError, match=r"no loaded model.*hl\.load\('x'\)"):
        compare("x", {"tc": tiny_model})
    with pytest.raises(HswqError, match=r"no loaded model.*hl\.load\('pack'\)"):
        compare(tiny_model, {"tc": "pack"})
    with pytest.raises(HswqError, match="models have names"):
        compare(tiny_model, tiny_model)


@pytest.mark.parametrize("prompts", [3, {"a", "b"}])
def test_prompts_that_are_no_list_are_refused(tiny_model, prompts):
    with pytest.raises(HswqError, match="prompts are a text or a list"):
        compare(tiny_model, {"same": tiny_model}, [1, 2], prompts, steps=1)
