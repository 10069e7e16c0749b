"""Same bits: with torch's deterministic mode on, in two processes on one pack, after a fork, from several threads."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from model_state import Declared, fingerprints, fingerprints_made_anew
from safetensors.torch import save_file

import hswq_lab as hl
from hswq_lab.loading import MODEL_KEY


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_tensors):
    """A 16-bit model, a hybrid of it, and a LoRA."""
    place = tmp_path_factory.mktemp("same")
    source = hl.Checkpoint.from_mapping(tiny_tensors, {MODEL_KEY: "mini-zimage"}).save(
        place / "source.safetensors"
    )
    plan = hl.Plan({"*": "int8_tensorwise", "layers.*": "nvfp4"})
    hl.save(hl.pack(hl.load(source), plan, scales="rtn"), place / "pack.safetensors")
    generator = torch.Generator().manual_seed(5)
    name = "diffusion_model.layers.0.feed_forward.w1"
    factors = {
        f"{name}.lora_A.weight": torch.randn(4, 64, generator=generator),
        f"{name}.lora_B.weight": torch.randn(128, 4, generator=generator) * 0.1,
    }
    save_file(factors, place / "style.safetensors")
    return place


@pytest.fixture
def declared(folder):
    return Declared(
        str(folder / "pack.safetensors"), loras=((str(folder / "style.safetensors"), 0.7, "bake"),)
    )


@pytest.fixture
def expected(folder, declared):
    return fingerprints_made_anew(declared, str(folder / "source.safetensors"))


def test_torchs_deterministic_mode_changes_nothing(folder, declared, expected):
    torch.use_deterministic_algorithms(True)
    try:
        assert fingerprints_made_anew(declared, str(folder / "source.safetensors")) == expected
    finally:
        torch.use_deterministic_algorithms(False)


def test_two_notebooks_on_one_pack_do_not_disturb_each_other(folder, declared, expected):
    """Two processes bake, make pictures and save at the same time, from one file."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        jobs = [
            pool.submit(fingerprints_made_anew, declared, str(folder / "source.safetensors"))
            for _ in range(4)
        ]
        assert all(job.result() == expected for job in jobs)


def test_two_writers_of_one_target_leave_one_whole_file(folder, tmp_path):
    code = (
        "import sys, hswq_lab as hl; model = hl.load(sys.argv[1], 'cpu');\n"
        "for _ in range(5): hl.save(model, sys.argv[2])"
    )
    target = tmp_path / "same.safetensors"
    arguments = [sys.executable, "-c", code, str(folder / "pack.safetensors"), str(target)]
    running = [subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate()[1] for process in running]
    # A writer may be told that another one is at work; whatever happens, the target is whole.
    assert any(process.returncode == 0 for process in running), told
    assert all("Traceback" not in text or "HswqError" in text for text in told), told
    assert hl.diff(target, folder / "pack.safetensors").same
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def test_threads_of_one_process_share_a_model(folder, declared, expected):
    model = hl.load(declared.file, "cpu")
    model.attach(
        hl.load_lora(declared.loras[0][0]), 0.7, "bake", source=hl.load(folder / "source.safetensors")
    )
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: fingerprints(model), range(8)))
    assert all(one == expected for one in found)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_worker_gets_the_same_bits(folder, declared, expected):
    fingerprints_made_anew(
        declared, str(folder / "source.safetensors")
    )  # kernels and threads are in use already
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        same = fingerprints_made_anew(declared, str(folder / "source.safetensors")) == expected
        os.write(writer, b"1" if same else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    os.close(writer)
