"""Peak memory and time of `hswq-lab pack` on a synthetic 6 GB checkpoint.

    python benchmarks/pack_memory.py [--layers 13] [--folder DIR] [--readme]

Makes the checkpoint with tools/synth_zimage.py (full width, fewer blocks), packs it in a process of its own, one
thread, and reads that process's memory from /proc (Linux) a hundred times a second. "Own" is RssAnon + RssShmem: what
the process allocated, without pages of files (the code of torch). VmHWM is the peak of everything resident, as the
kernel keeps it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hswq_lab.checkpoint import Checkpoint

ROOT = Path(__file__).resolve().parents[1]
README = Path(__file__).parent / "README.md"
MARKS = ("<!-- pack_memory begin -->", "<!-- pack_memory end -->")
PLAN = {"formats": {"*": "int8", "layers.*": "nvfp4"}}
ASKED = 1.5 * 2**30
INTERVAL = 0.01


@dataclass
class Peak:
    """Bytes and seconds."""

    own: int = 0
    all: int = 0
    seconds: float = 0.0


def watch(command: list[str]) -> Peak:
    """Runs a command; raises CalledProcessError if it fails."""
    peak, start = Peak(), time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
            found = dict(line.split(":", 1) for line in lines)
            sizes = {
                key: 1024 * int(found.get(key, "0").split()[0]) for key in ("RssAnon", "RssShmem", "VmHWM")
            }
            peak.own = max(peak.own, sizes["RssAnon"] + sizes["RssShmem"])
            peak.all = max(peak.all, sizes["VmHWM"])
            time.sleep(INTERVAL)
    peak.seconds = time.monotonic() - start
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return peak


def measure(folder: Path, layers: int) -> tuple[Path, Path, Peak]:
    """Source, pack, and what packing took."""
    source, plan, target = folder / "synthetic.safetensors", folder / "plan.json", folder / "pack.safetensors"
    make = [ROOT / "tools" / "synth_zimage.py", source, "--size", "full", "--layers", layers]
    subprocess.run([sys.executable, *map(str, make)], check=True)
    plan.write_text(json.dumps(PLAN))
    code = "import sys; from hswq_lab.cli import main; sys.exit(main(sys.argv[1:]))"
    pack = ["pack", source, "-o", target, "--plan", plan, "--threads", "1", "--force"]
    return source, target, watch([sys.executable, "-c", code, *map(str, pack)])


def table(source: Path, target: Path, largest: int, peak: Peak) -> str:
    """Markdown."""
    columns = {
        "16 bit GB": f"{source.stat().st_size / 1e9:.2f}",
        "pack GB": f"{target.stat().st_size / 1e9:.2f}",
        "largest tensor MiB": f"{largest / 2**20:.0f}",
        "own memory, peak MiB": f"{peak.own / 2**20:.0f}",
        "beyond the largest tensor": f"{(peak.own - largest) / 2**20:.0f}",
        "asked": f"≤ {ASKED / 2**20:.0f}",
        "VmHWM MiB": f"{peak.all / 2**20:.0f}",
        "s": f"{peak.seconds:.0f}",
    }
    rows = [list(columns), ["---:"] * len(columns), list(columns.values())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    """Prints the table; 1 if the memory is more than what is asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=13, help="main blocks (default 13: 6.1 GB)")
    parser.add_argument("--folder", type=Path, help="where 9 GB fit (default: the temporary folder)")
    parser.add_argument(
        "--readme", action="store_true", help="also replace the table in benchmarks/README.md"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        source, target, peak = measure(Path(folder), arguments.layers)
        largest = max(entry.nbytes for entry in Checkpoint.open(source).entries())
        text = table(source, target, largest, peak)
    print(text)
    if arguments.readme:
        before, rest = README.read_text(encoding="utf-8").split(MARKS[0])
        README.write_text(
            f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.split(MARKS[1])[1]}", encoding="utf-8"
        )
    return int(peak.own - largest > ASKED)


if __name__ == "__main__":
    raise SystemExit(main())
