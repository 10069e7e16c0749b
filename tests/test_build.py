"""The build files agree with each other, and the build does what it says where something is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from hswq_lab import ops

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONDA_NAMES = {"torch": "pytorch", "kaleido": "python-kaleido"}
IN_CHECKOUT = (ROOT / "setup.py").is_file()

pytestmark = pytest.mark.skipif(not IN_CHECKOUT, reason="not run from a checkout")


def requirements(*extras: str) -> dict[str, str]:
    """Name → version range of the dependencies and of these extras."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    parsed = [Requirement(line) for line in lines]
    return {r.name: str(r.specifier) for r in parsed if r.name != "hswq-lab"}


def test_environment_yml_agrees_with_pyproject():
    listed = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    conda = {r.name: str(r.specifier) for r in map(Requirement, listed)}
    wanted = {CONDA_NAMES.get(name, name): spec for name, spec in requirements("export", "notebook").items()}
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    wanted |= {r.name: str(r.specifier) for r in map(Requirement, build)}
    wanted |= {"python": PROJECT["requires-python"], "pip": "", "cxx-compiler": ""}
    assert conda == wanted


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_constraints_pin_every_dependency_inside_its_range():
    pins = {name.lower().replace("_", "-"): version for name, version in constraints().items()}
    assert pins["torch"] == "2.13.0"
    for name, spec in requirements("export", "notebook", "dev").items():
        assert name in pins, f"{name} is not in constraints.txt"
        assert Requirement(f"{name}{spec}").specifier.contains(pins[name]), (
            f"{name} {pins[name]} is not {spec}"
        )


def test_constraints_name_no_place():
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert "@" not in text
    assert "file:" not in text
    assert "+cpu" not in text


def test_package_data_and_script_are_declared():
    assert PROJECT["scripts"]["hswq-lab"] == "hswq_lab.cli:main"
    assert metadata.version("hswq-lab") == __import__("hswq_lab").__version__


def test_ci_runs_the_test_command_of_the_makefile():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"^make .*$", script, re.MULTILINE) == ["make test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for tool in (
        "ruff check",
        "ruff format --check",
        "mypy --strict",
        "clang-format --dry-run -Werror",
        "-m pytest",
    ):
        assert tool in makefile


@pytest.fixture
def copy(tmp_path):
    """What the build needs of the checkout, in a folder of its own; without CUDA, whose compiler takes its time."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "hswq_lab").mkdir()
    for name in ("__init__.py", "errors.py", "_backends.py"):
        shutil.copy(ROOT / "hswq_lab" / name, tmp_path / "hswq_lab" / name)
    return tmp_path


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess:
    path = str(folder / "bin")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    return subprocess.run(
        command,
        cwd=folder,
        env={"PATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def reason_in(folder: Path) -> str:
    # The finder of an editable install would answer for the module that is missing in the folder.
    script = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
        "from hswq_lab._backends import backends; print(backends()['cpu'].why)"
    )
    return subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_without_a_compiler_the_build_succeeds_and_says_so(copy):
    done = build(copy, HSWQ_LAB_CUDA="0")
    assert done.returncode == 0, done.stderr
    assert "was NOT built" in done.stderr
    assert not list(copy.glob("hswq_lab/_C*.so"))
    assert "no C++ compiler" in reason_in(copy)


def test_without_a_compiler_a_required_build_fails(copy):
    done = build(copy, HSWQ_LAB_CUDA="0", HSWQ_LAB_REQUIRE_CPU="1")
    assert done.returncode != 0
    assert "no C++ compiler" in done.stderr


@pytest.fixture
def fake_tools(copy):
    """A C++ compiler that makes empty files at once, and an nvcc that fails like one of another version."""
    tools = copy / "bin"
    tools.mkdir()
    touch = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done; exit 0\n'
    nvcc = f"""case "$1" in
--dryrun) echo "#$ TOP={copy}/cuda" >&2 ;;
--version) echo "Cuda compilation tools, release 13.0, V13.0.88" ;;
--list-gpu-arch) printf 'compute_80\\ncompute_90\\n' ;;
*) echo "unsupported GNU version" >&2; exit 1 ;;
esac
"""
    for name, body in (("c++", touch), ("nvcc", nvcc)):
        (tools / name).write_text("#!/bin/sh\n" + body, encoding="utf-8")
        (tools / name).chmod(0o755)
    (copy / "cuda" / "lib64").mkdir(parents=True)
    (copy / "cuda" / "lib64" / "libcudart_static.a").touch()
    (copy / "cuda" / "include").mkdir()
    (copy / "cuda" / "include" / "cuda_runtime_api.h").touch()
    return tools


@pytest.mark.usefixtures("fake_tools")
def test_a_failing_nvcc_leaves_the_cpu_part_and_a_loud_warning(copy):
    done = build(copy)
    assert done.returncode == 0, done.stderr
    assert "the CUDA part was NOT built" in done.stderr
    assert "unsupported GNU version" in done.stderr
    assert list(copy.glob("hswq_lab/_C*.so"))


@pytest.mark.usefixtures("fake_tools")
def test_a_failing_nvcc_is_fatal_where_cuda_is_required(copy):
    done = build(copy, HSWQ_LAB_REQUIRE_CUDA="1")
    assert done.returncode != 0
    assert "unsupported GNU version" in done.stderr


@pytest.mark.usefixtures("fake_tools")
def test_a_failing_compiler_is_told_to_who_asks_the_back_ends(copy, fake_tools):
    (fake_tools / "c++").write_text(
        "#!/bin/sh\necho 'internal compiler error' >&2; exit 1\n", encoding="utf-8"
    )
    done = build(copy, HSWQ_LAB_CUDA="0")
    assert "internal compiler error" in done.stderr
    assert "was NOT built" in done.stderr
    assert "internal compiler error" in reason_in(copy)


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm to read symbols with")
def test_kernels_of_one_instruction_set_define_nothing_another_could_be_linked_to():
    """A weak symbol compiled for AVX-512 could replace the portable one, and crash older machines."""
    objects = sorted((ROOT / "build" / "objects").glob("kernels_*.o"))
    if not objects:
        pytest.skip("no objects of the build are left here")
    for path in objects:
        symbols = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
        weak = [line for line in symbols.splitlines() if re.search(r" [WVu] ", line)]
        assert [line for line in weak if "DW.ref.__gxx_personality" not in line] == [], path.name


def test_backends_of_this_installation():
    report = ops.backends()
    assert report["cpu"].built, report["cpu"].why
    assert report["cpu"].targets[0] == "baseline"
    if shutil.which("nvcc"):
        assert report["cuda"].built, report["cuda"].why
        assert "80" in report["cuda"].targets
    else:
        assert report["cuda"].built or report["cuda"].why


def test_a_source_distribution_has_what_it_builds_from(tmp_path):
    command = ["setup.py", "-q", "egg_info", "--egg-base", str(tmp_path), "sdist", "-d", str(tmp_path)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert sources <= names
    assert {"hswq_lab/py.typed", "hswq_lab/assets/mini_codec.npz", "constraints.txt", "Makefile"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]
