"""The command line as a person sees it: every verb with its arguments; nothing here imports torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from hswq_lab import __version__

_MODEL = "mini-zimage, a file, or a diffusers folder"


def build_parser() -> argparse.ArgumentParser:
    """The parser; a verb's namespace says which function of which module of hswq_lab.cli runs it."""
    parser = argparse.ArgumentParser(
        prog="hswq-lab",
        description="A workbench for what 4-bit quantisation does to a diffusion transformer.",
        epilog="Exit code: 0 done and good, 1 done and a gate failed, 2 not done (message on stderr), 130 Ctrl-C.",
    )
    parser.add_argument("--version", action="version", version=f"hswq-lab {__version__}")
    verbs = _Verbs(parser)
    _files(verbs)
    _sensitivity(verbs)
    _pack(verbs)
    _calibrate(verbs)
    _embed(verbs)
    _bake(verbs)
    _lora(verbs)
    _compare(verbs)
    _bench(verbs)
    _workbench(verbs)
    return parser


class _Verbs:
    """The verbs of a parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._subparsers = parser.add_subparsers(metavar="VERB", required=True)

    def plain(self, name: str, module: str, summary: str, description: str) -> argparse.ArgumentParser:
        """A verb without a result object."""
        parser = self._subparsers.add_parser(name, help=summary, description=description)
        parser.set_defaults(module=module, function=name)
        return parser

    def group(self, name: str, summary: str, description: str) -> _Verbs:
        """A verb that has verbs of its own."""
        return _Verbs(self._subparsers.add_parser(name, help=summary, description=description))

    def add(self, name: str, module: str, summary: str, description: str) -> argparse.ArgumentParser:
        """A verb with a result object, which can be written to files."""
        parser = self.plain(name, module, summary, description)
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the result object as JSON")
        parser.add_argument(
            "--save",
            type=Path,
            action="append",
            default=[],
            metavar="FILE",
            help="write the result as .csv, .html, .png, .svg or .pdf, by its suffix (repeatable)",
        )
        return parser


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--out", type=Path, required=True, metavar="OUT", help="the .safetensors file to write"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def _shards(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shard-bytes",
        type=_positive,
        metavar="N",
        help="split OUT into parts of about N bytes, with an index",
    )


def _strengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "loras", nargs="+", metavar="LORA[:STRENGTH]", help="a LoRA file, with a strength other than 1"
    )


def _lora_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--full-lokr-scale",
        choices=("one", "alpha/dim"),
        default="one",
        help="factor of a LoKr with two full factors, on which tools differ: one (LyCORIS, ComfyUI; default), or "
        "alpha/dim with the dim of the header",
    )


def _threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--threads", type=_positive, default=1, metavar="N", help="torch's CPU threads (default 1)"
    )


def _page(text: str) -> Path:
    if not text.lower().endswith(".html"):
        raise argparse.ArgumentTypeError(f"a page is a .html file, not {text}; --save writes the other forms")
    return Path(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number from 1 on is wanted, not {text}")
    return int(text)


def _computing(parser: argparse.ArgumentParser, *, workers: bool = False) -> None:
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: cuda if there is one)")
    _threads(parser)
    if workers:
        parser.add_argument(
            "--workers", type=int, default=0, metavar="N", help="worker processes (default: only this one)"
        )


def _prompting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--captions",
        metavar="FILE",
        help="prompts from `hswq-lab embed`, for models whose text encoder is not here",
    )
    parser.add_argument("--vae", metavar="FOLDER", help="with --captions: the VAE that makes pictures")
    parser.add_argument(
        "--size", nargs=2, type=int, default=(1024, 1024), metavar=("H", "W"), help="with --captions: pixels"
    )


def _files(verbs: _Verbs) -> None:
    inspect = verbs.add(
        "inspect", "files", "say what is in a file", "Reads a checkpoint's or a LoRA's header: what is in it."
    )
    inspect.add_argument("file", help="a checkpoint, mini-zimage, or a LoRA file")
    inspect.add_argument(
        "--model", help=f"for a LoRA: where each of its modules goes in this model: {_MODEL}"
    )
    _lora_reading(inspect)
    _computing(inspect)
    check = verbs.add(
        "check",
        "files",
        "look for faults in a file",
        "Applies every rule to a file; exit code 1 for an error.",
    )
    check.add_argument("file", help="a checkpoint")
    check.add_argument("--source", help="its 16-bit source, to compare the weights with")
    _threads(check)
    convert = verbs.add(
        "convert",
        "files",
        "write a file in another layout",
        "Any producer's checkpoint in our layout, ours in a stock ComfyUI's, a LoRA in another dialect.",
    )
    convert.add_argument("file", help="a checkpoint, or a LoRA file")
    _output(convert)
    _shards(convert)
    convert.add_argument("--to", help="hswq (default) or comfy; for a LoRA: peft, kohya or native")
    convert.add_argument(
        "--producer", help="comfy, modelopt or compressed-tensors, where the file does not tell"
    )
    convert.add_argument("--source", help="the 16-bit source, which tells how to read the file")
    convert.add_argument("--model", default="mini-zimage", help="for a LoRA: the model that it is made for")
    _lora_reading(convert)
    _computing(convert)
    diff = verbs.add(
        "diff", "files", "compare two packs", "Per layer: format, bytes, SQNR, cosine, changed codes."
    )
    diff.add_argument("a", help="a checkpoint")
    diff.add_argument("b", help="another one")
    _threads(diff)


def _sensitivity(verbs: _Verbs) -> None:
    parser = verbs.add(
        "sensitivity",
        "quantize",
        "measure what each layer's quantisation costs",
        "Quantises one layer at a time, in its real format, and measures what that does to the final latent.",
    )
    parser.add_argument("model", help=f"the 16-bit model: {_MODEL}")
    parser.add_argument("--steps", type=int, default=4, help="Euler steps (default 4)")
    parser.add_argument("--seeds", type=int, default=4, metavar="N", help="prompts and seeds (default 4)")
    parser.add_argument("--scales", default="sweep", help="rtn, four_six or sweep (default)")
    _activation_scales(parser)
    parser.add_argument(
        "--formats",
        nargs="+",
        default=["nvfp4"],
        metavar="FORMAT",
        help="to measure, e.g. nvfp4 nvfp4+r16 int8 (default nvfp4)",
    )
    parser.add_argument("--layers", nargs="+", metavar="GLOB", help="only these layers")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="JSON to continue from and to keep up to date"
    )
    _prompting(parser)
    _computing(parser, workers=True)


def _pack(verbs: _Verbs) -> None:
    parser = verbs.add(
        "pack",
        "quantize",
        "make a hybrid NVFP4/INT8 pack",
        "Packs a 16-bit model by a plan: --plan FILE, --all FORMAT, or --impact FILE with one goal.",
    )
    parser.add_argument("model", help=f"the 16-bit model: {_MODEL}")
    _output(parser)
    _shards(parser)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--plan", type=Path, metavar="FILE", help="JSON: layer or glob → format")
    where.add_argument("--all", metavar="FORMAT", help="one format for every layer")
    where.add_argument("--impact", type=Path, metavar="FILE", help="JSON of `hswq-lab sensitivity`")
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--nvfp4", type=int, metavar="K", help="with --impact: the K least sensitive in NVFP4")
    goal.add_argument("--bits", type=float, help="with --impact: mean bits a weight")
    goal.add_argument("--budget", type=int, metavar="BYTES", help="with --impact: bytes of the Linears")
    goal.add_argument("--final-cos", type=float, help="with --impact: smallest plan predicted to reach this")
    parser.add_argument("--keep", nargs="+", default=[], metavar="GLOB=FORMAT", help="pins that win over all")
    parser.add_argument(
        "--scales",
        default="sweep",
        help="rtn, four_six, sweep (default) or gptq",
    )
    _activation_scales(parser)
    _prompting(parser)  # input bases come from running the model
    _computing(parser)


def _activation_scales(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--activation-scales",
        default="rtn",
        help="how W4A4 finds block scales of activations: rtn (default), four_six or sweep",
    )


def _calibrate(verbs: _Verbs) -> None:
    parser = verbs.add(
        "calibrate",
        "quantize",
        "give a pack its input_scales",
        "Runs real prompts and records the range of every layer's rotated inputs: input_scale = amax / 2688.",
    )
    parser.add_argument("pack", help="the pack")
    _output(parser)
    parser.add_argument("--model", help="the 16-bit model whose activations count (default: the pack's own)")
    parser.add_argument("--steps", type=int, default=12, help="Euler steps (default 12)")
    parser.add_argument("--headroom", type=float, default=1.0, help="factor on every scale (default 1)")
    _prompting(parser)
    _computing(parser)


def _embed(verbs: _Verbs) -> None:
    parser = verbs.add(
        "embed",
        "embed",
        "encode prompts for the real Z-Image",
        "Writes the caption features of prompts, from the text encoder of a local diffusers folder of Z-Image: what "
        "--captions of other verbs takes. The empty prompt, which guidance needs, is always added.",
    )
    parser.add_argument("folder", help="diffusers folder with tokenizer/ and text_encoder/")
    _output(parser)
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="text file, a prompt a line")
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt (repeatable)")
    _computing(parser)


def _unmatched(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-unmatched",
        action="store_true",
        help="leave out modules that match no layer; the report says how many",
    )


def _bake(verbs: _Verbs) -> None:
    parser = verbs.add(
        "bake",
        "lora",
        "bake LoRAs into a pack",
        "Bakes LoRAs into a copy of a pack (unrotate, add, rotate, requantise) and proves that they arrived; "
        "exit code 1, and nothing written, if one did not.",
    )
    parser.add_argument("pack", help="the pack")
    _strengths(parser)
    _output(parser)
    parser.add_argument("--source", help="the 16-bit model: quantise the layers anew from it")
    parser.add_argument(
        "--effect",
        action="store_true",
        help="also compare what the LoRAs do to each layer's outputs on real activations with 16 bits",
    )
    _unmatched(parser)
    parser.add_argument(
        "--allow-baked", action="store_true", help="go on although LoRAs are baked into the pack already"
    )
    _lora_reading(parser)
    _prompting(parser)
    _computing(parser)


def _lora(verbs: _Verbs) -> None:
    lora = verbs.group("lora", "convert and merge LoRA files", "LoRA files by themselves.")
    convert = lora.add(
        "convert", "lora", "write a LoRA in another dialect", "The same deltas in another tool's names."
    )
    convert.add_argument("file", metavar="LORA", help="a LoRA file")
    merge = lora.add(
        "merge",
        "lora",
        "several LoRAs as one",
        "Each module's sum of deltas, cut to a rank by singular values; says how much the cut lost.",
    )
    _strengths(merge)
    merge.add_argument("--rank", type=int, required=True, help="of every module of the result")
    _unmatched(merge)
    for parser in (convert, merge):
        _output(parser)
        parser.add_argument(
            "--to",
            choices=("peft", "kohya", "native"),
            default="native",
            help="dialect of the result (default native: ComfyUI's names)",
        )
        parser.add_argument("--model", default="mini-zimage", help=f"the model that it is made for: {_MODEL}")
        _lora_reading(parser)
        _computing(parser)


def _compare(verbs: _Verbs) -> None:
    parser = verbs.add(
        "compare",
        "measure",
        "compare trajectories with a reference",
        "Runs the same seeds through a reference and through packs in one or more modes. Exit code 1 if a "
        "variant fails the gate: mean final cosine ≥ 0.95, no bifurcation, no NaN.",
    )
    parser.add_argument("model", help=f"the reference: {_MODEL}")
    parser.add_argument(
        "--html",
        type=_page,
        action="append",
        dest="save",
        metavar="FILE",
        help="the report as a page, as --save does",
    )
    parser.add_argument("packs", nargs="+", metavar="pack", help="a model to compare with it")
    parser.add_argument(
        "--modes", default="auto", help="comma-separated: auto, parity, tc, tc8 (default auto)"
    )
    parser.add_argument("--uncalibrated", choices=("dynamic", "unit"), help="for layers without input_scale")
    parser.add_argument(
        "--seeds", default="20", metavar="N", help="the first N of the 20 (default 20), or a list: 42,43"
    )
    parser.add_argument("--prompt", help="one prompt for every seed (default: the model's own)")
    parser.add_argument("--steps", type=int, default=12, help="Euler steps (default 12)")
    parser.add_argument("--cfg", type=float, default=2.5, help="guidance scale (default 2.5)")
    _prompting(parser)
    _computing(parser, workers=True)


def _bench(verbs: _Verbs) -> None:
    parser = verbs.add(
        "bench",
        "measure",
        "time products and pictures",
        "Times every mode of a Linear beside torch's own product; with models, times whole pictures instead.",
    )
    parser.add_argument(
        "models", nargs="*", metavar="model", help="models; the first is what others are held to"
    )
    parser.add_argument("--shape", nargs=2, type=int, action="append", metavar=("N", "K"), help="repeatable")
    parser.add_argument("--rows", nargs="+", type=int, metavar="M", help="values of M")
    parser.add_argument("--steps", type=int, default=12, help="with models: Euler steps (default 12)")
    parser.add_argument("--repeats", type=int, help="timed calls (default 20; 3 with models)")
    _prompting(parser)
    _computing(parser)


def _workbench(verbs: _Verbs) -> None:
    verbs.add(
        "doctor",
        "lab",
        "say what this installation can do",
        "Versions, kernels, front end and browser; exit code 1 if something will not work.",
    )
    demo = verbs.plain(
        "demo",
        "demo",
        "the whole path on the small model",
        "Loads mini-zimage, measures, plans, packs, calibrates, saves, puts LoRAs on it and compares it with "
        "the 16-bit model; leaves a report, pictures, plots and tables. Exit code 1 if the gate fails.",
    )
    demo.add_argument("--out", type=Path, default=Path("out/demo"), metavar="DIR", help="default out/demo")
    demo.add_argument("--workers", type=int, default=2, metavar="N", help="worker processes (default 2)")
    lab = verbs.plain(
        "lab",
        "lab",
        "open JupyterLab on the notebooks",
        "JupyterLab on the loopback interface, with a token.",
    )
    lab.add_argument("folder", nargs="?", type=Path, help="notebooks (default: those of the source tree)")
    lab.add_argument("--port", type=int, default=8888, help="first port to try (default 8888)")
    lab.add_argument("--no-browser", action="store_true", help="only print the address")
