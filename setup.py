"""Builds hswq_lab._C: the CPU kernels always, the CUDA kernels where a usable nvcc is found.

Everything that describes the package stands in pyproject.toml; this file only knows how to compile csrc/.

* csrc/cpu/kernels_*.cpp hold the same mathematics once per instruction set, so each gets flags of its own; which
  one runs is chosen at run time (csrc/cpu/isa.cpp). `-ffp-contract=off`: a fused multiply-add would change bits.
* csrc/bindings.cpp is the only file that sees pybind11, compiled at -O1: its headers dominate the build.
* csrc/cuda/*.cu are compiled by nvcc with a static CUDA runtime; nothing links torch.

Environment: HSWQ_LAB_CUDA=0 leaves CUDA out; HSWQ_LAB_CUDA_TARGETS="90a" builds for that one only (default: all of
CUDA_TARGETS that the compiler knows); HSWQ_LAB_REQUIRE_CUDA=1 makes a missing or failing CUDA part an
error; HSWQ_LAB_REQUIRE_CPU=1 does the same for the C++ part (without it the pure-torch reference serves); NVCC
and CUDA_HOME point at a toolkit.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
BUILD_ERRORS = (CCompilerError, BaseError, OSError, subprocess.SubprocessError)

X86 = platform.machine().lower() in ("x86_64", "amd64")
AVX2 = "-mavx2 -mfma -mf16c -mbmi2"
AVX512 = (
    f"{AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vbmi -mavx512vnni -mavx512bf16"
    " -mprefer-vector-width=512"
)
ISA_FLAGS = {
    "avx2": AVX2.split(),
    "avx512": AVX512.split(),
    "amx": f"{AVX512} -mamx-tile -mamx-int8 -mamx-bf16".split(),
}
MATH_FLAGS = ["-O3", "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
# GCC 12 takes the undefined vectors inside its own intrinsics for mistakes of ours.
WARNINGS = ["-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized"]
COMMON_FLAGS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-g0", *WARNINGS]
# PTX for every card from Ampere on, wgmma on Hopper, FP4 on Blackwell.
CUDA_TARGETS = {
    "80": "arch=compute_80,code=[sm_80,compute_80]",
    "90a": "arch=compute_90a,code=sm_90a",
    "100f": "arch=compute_100f,code=sm_100f",
    "120f": "arch=compute_120f,code=sm_120f",
}


def wanted(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


class Nvcc:
    """One CUDA compiler: where it and its toolkit are, and which of our targets it can generate."""

    def __init__(self, path: str) -> None:
        self.path = path
        dry = subprocess.run([path, "--dryrun", "none.cu"], capture_output=True, text=True, check=False)
        # nvcc on PATH is often a wrapper script elsewhere, so the toolkit's folder is asked for, not guessed.
        top = re.search(r"^#\$ TOP=(.+)$", dry.stderr + dry.stdout, re.MULTILINE)
        if top is None:
            raise OSError(f"{path} does not answer --dryrun as nvcc does")
        self.home = Path(top.group(1).strip())
        listed = subprocess.run([path, "--list-gpu-arch"], capture_output=True, text=True, check=True)
        known = listed.stdout.split()
        major, minor = self.version
        family = (major, minor) >= (12, 9)  # "f" targets (family specific) came with CUDA 12.9
        asked = os.environ.get("HSWQ_LAB_CUDA_TARGETS", "").replace(",", " ").split() or list(CUDA_TARGETS)
        if unknown := set(asked) - set(CUDA_TARGETS):
            raise OSError(f"HSWQ_LAB_CUDA_TARGETS names {unknown}; known are {list(CUDA_TARGETS)}")
        self.targets = [
            name
            for name in asked
            if f"compute_{name.rstrip('af')}" in known and (family or not name.endswith("f"))
        ]

    @property
    def version(self) -> tuple[int, int]:
        text = subprocess.run([self.path, "--version"], capture_output=True, text=True, check=True).stdout
        found = re.search(r"release (\d+)\.(\d+)", text)
        if found is None:
            raise OSError(f"{self.path} --version names no release")
        return int(found.group(1)), int(found.group(2))

    @property
    def static_runtime(self) -> Path:
        for folder in (self.home / "lib64", *self.home.glob("targets/*/lib"), self.home / "lib"):
            if (folder / "libcudart_static.a").is_file():
                return folder / "libcudart_static.a"
        raise OSError(f"no libcudart_static.a under {self.home}")

    @property
    def include(self) -> Path:
        for folder in (self.home / "include", *self.home.glob("targets/*/include")):
            if (folder / "cuda_runtime_api.h").is_file():
                return folder
        raise OSError(f"no cuda_runtime_api.h under {self.home}")

    @classmethod
    def find(cls) -> Nvcc:
        places = [os.environ.get("NVCC"), shutil.which("nvcc")]
        homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
        places += [shutil.which("nvcc", path=str(Path(home) / "bin")) for home in homes if home]
        for place in places:
            if place:
                return cls(place)
        raise OSError("no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda")


class BuildKernels(build_ext):
    """build_ext with flags per file, parallel and incremental, honest about a part that cannot be built."""

    def finalize_options(self) -> None:
        super().finalize_options()
        package = ROOT if self.inplace else Path(self.build_lib)
        self.missing = package / "hswq_lab" / "_C_missing.txt"  # read by hswq_lab/_backends.py

    def build_extension(self, ext: Extension) -> None:
        self.missing.unlink(missing_ok=True)
        try:
            self.build_native(ext)
        except BUILD_ERRORS as error:
            if wanted("HSWQ_LAB_REQUIRE_CPU") or wanted("HSWQ_LAB_REQUIRE_CUDA"):
                raise
            reason = f"{type(error).__name__}: {error}"
            ext.optional = True  # only now: it would hide an error that has to be seen
            loud(f"hswq_lab._C was NOT built; the slow pure-torch reference will serve. {reason}")
            self.missing.parent.mkdir(parents=True, exist_ok=True)
            self.missing.write_text(reason + "\n", encoding="utf-8")

    def build_native(self, ext: Extension) -> None:
        cxx = self.cxx()
        sources = [source for source in sorted(CSRC.glob("cpu/*.cpp")) if X86 or not isa_flags(source)]
        jobs = [(source, [*MATH_FLAGS, *isa_flags(source)], cxx) for source in sources]
        cuda, reason = self.cuda_jobs()
        objects = self.compile_all(jobs)
        try:
            cuda_objects = self.compile_all(cuda)
        except BUILD_ERRORS as error:
            if wanted("HSWQ_LAB_REQUIRE_CUDA"):
                raise
            reason = f"nvcc failed: {error}"
            loud(f"the CUDA part was NOT built, only the CPU part. {reason}")
            cuda, cuda_objects = [], []
        flags = [
            "-O1",
            *self.macros(reason, with_cuda=bool(cuda)),
            *self.binding_includes(with_cuda=bool(cuda)),
        ]
        objects += self.compile_all([(CSRC / "bindings.cpp", flags, cxx)])
        link = [str(self.nvcc.static_runtime), "-ldl", "-lrt", "-lpthread"] if cuda else ["-lpthread"]
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        shared = ["-undefined", "dynamic_lookup", "-bundle"] if sys.platform == "darwin" else ["-shared"]
        run([*cxx, *shared, "-s", *map(str, objects + cuda_objects), *link, "-o", str(output)])

    def cxx(self) -> list[str]:
        command = os.environ.get("CXX", "").split() or next(
            ([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), []
        )
        if not command or not shutil.which(command[0]):
            raise OSError("no C++ compiler (c++, g++, clang++ or CXX)")
        return command

    def cuda_jobs(self) -> tuple[list[tuple[Path, list[str], list[str]]], str]:
        """The nvcc compilations to do, and, where there are none, why."""
        if os.environ.get("HSWQ_LAB_CUDA") == "0":
            return [], "left out on request (HSWQ_LAB_CUDA=0)"
        try:
            self.nvcc = Nvcc.find()
            _ = self.nvcc.static_runtime, self.nvcc.include
        except BUILD_ERRORS as error:
            if wanted("HSWQ_LAB_REQUIRE_CUDA"):
                raise
            return [], str(error)
        codes = [f"-gencode={CUDA_TARGETS[name]}" for name in self.nvcc.targets]
        flags = [*codes, "-O3", "--fmad=false", "-Xcompiler=-fPIC,-fvisibility=hidden", "-cudart=static"]
        return [(source, flags, [self.nvcc.path]) for source in sorted(CSRC.glob("cuda/*.cu"))], ""

    def macros(self, reason: str, *, with_cuda: bool) -> list[str]:
        targets = ",".join(self.nvcc.targets) if with_cuda else ""
        version = ".".join(map(str, self.nvcc.version)) if with_cuda else ""
        clean = re.sub(r"[^ -~]|[\"\\]", " ", reason)
        return [
            f"-DHSWQ_WITH_CUDA={int(with_cuda)}",
            f'-DHSWQ_CUDA_REASON="{clean}"',
            f'-DHSWQ_CUDA_TARGETS="{targets}"',
            f'-DHSWQ_CUDA_VERSION="{version}"',
        ]

    def binding_includes(self, *, with_cuda: bool) -> list[str]:
        import pybind11  # only needed to build, and absent from an installed environment

        paths = [pybind11.get_include(), *self.include_dirs]
        if with_cuda:
            paths.append(str(self.nvcc.include))
        return [f"-I{path}" for path in paths]

    def compile_all(self, jobs: list[tuple[Path, list[str], list[str]]]) -> list[Path]:
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return list(pool.map(lambda job: compile_one(*job), jobs))

    def copy_extensions_to_source(self) -> None:
        """The editable install: rename over the old module; a running process keeps the one it has mapped."""
        build_py = self.get_finalized_command("build_py")
        for ext in self.extensions:
            target, built = map(Path, self._get_inplace_equivalent(build_py, ext))
            if built.exists():
                shutil.copyfile(built, target.with_suffix(".new"))
                target.with_suffix(".new").replace(target)
            else:
                target.unlink(missing_ok=True)


def isa_flags(source: Path) -> list[str]:
    name = source.stem.rpartition("_")[2]
    return ISA_FLAGS.get(name, [])


def compile_one(source: Path, flags: list[str], compiler: list[str]) -> Path:
    """Compile one file, unless an object of the same command is newer than everything it could depend on."""
    common = COMMON_FLAGS if source.suffix == ".cpp" else ["-std=c++17"]
    command = [*compiler, *common, *flags, f"-I{CSRC}", "-c", str(source)]
    digest = hashlib.sha256("\0".join([*command, sys.version]).encode()).hexdigest()[:12]
    target = ROOT / "build" / "objects" / f"{source.stem}-{digest}.o"
    # The CUDA part uses plain structures of csrc/cpu; the CPU part knows nothing of CUDA.
    folders = [CSRC / "cpu"] if source.parent.name == "cpu" else [CSRC]
    headers = [path for top in folders for path in top.rglob("*") if path.suffix in (".h", ".cuh", ".inl")]
    if target.is_file() and all(path.stat().st_mtime < target.stat().st_mtime for path in [source, *headers]):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.o")
    run([*command, "-o", str(partial)])
    partial.replace(target)
    return target


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        shown = " ".join(command)
        raise CCompilerError(f"{shown}\nfailed with {done.returncode}:\n{done.stdout}{done.stderr}")
    if done.stderr:
        sys.stderr.write(done.stderr)


def loud(message: str) -> None:
    bar = "!" * 100
    sys.stderr.write(f"\n{bar}\nhswq_lab: {message}\n{bar}\n\n")


setup(
    ext_modules=[Extension("hswq_lab._C", sources=[])],
    cmdclass={"build_ext": BuildKernels},
)
