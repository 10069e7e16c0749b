"""Make mini-zimage: `data`, `base`, `lora outline`, `lora palette`, `publish`, in this order.

`data` needs npm and cairosvg, the training a GPU (or patience); hswq_lab must be importable. Everything lands
in build/mini until `publish` copies what ships to hswq_lab/assets. Interrupted training of the base goes on
from its state file; --piece stops a run after so many seconds without changing the schedule.

What ships was made on one H200 in about 15 minutes with `base`, `lora outline` and `lora palette --lr 3e-4`,
each with --compile --graph.
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from pathlib import Path

import torch
from mini_training import evaluate, files, publish
from mini_training.adapter import adapting_factory, export
from mini_training.loop import Recipe, Trainer
from mini_training.pictures import Batches, Noto, fit_codec
from safetensors.torch import save_file
from torch import Tensor, nn

from hswq_lab.models.mini import LinearCodec
from hswq_lab.models.zimage import MINI, LinearFactory, ZImage, dense_linear

# The second one's scale (alpha / rank) is 2, so that a loader that forgets alpha shows.
ALPHA = {"outline": 8.0, "palette": 16.0}
WARMUP = {"base": 500, "lora": 1000}


def initialise(network: ZImage) -> None:
    """Linears normal with std 1/sqrt(in), like a real model's; modulations and the last layer zero."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Linear):
            still = "adaLN_modulation" in name or name == "final_layer.linear"
            nn.init.normal_(module.weight, std=0.0 if still else module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    nn.init.normal_(network.cap_pad_token, std=0.02)
    nn.init.normal_(network.x_pad_token, std=0.02)


def rebuilt(weights: dict[str, Tensor], device: torch.device, linear: LinearFactory = dense_linear) -> ZImage:
    """The mini network in fp32 with these values (adapters may be missing), frozen, not compiled."""
    network = ZImage(MINI, linear)
    fp32 = {name: value.float() for name, value in weights.items()}
    missing = network.load_state_dict(fp32, strict=False).missing_keys
    if any("lora_" not in name for name in missing):
        raise SystemExit(f"the weights lack {missing}")
    return network.to(device).requires_grad_(False)


def train(trainer: Trainer, args: argparse.Namespace) -> None:
    """Run the schedule, or the piece of it that was asked for."""
    if args.compile:
        trainer.compile()
    trainer.run(args.piece, graph=args.graph)


def train_base(args: argparse.Namespace, device: torch.device) -> None:
    """Fit the codec; train from scratch, from weights or from a saved state; write and measure the model."""
    noto = Noto.load(args.data, device)
    codec = fit_codec(noto)
    codec.save(args.out / "codec.npz")
    torch.manual_seed(args.seed)
    network = ZImage(MINI)
    initialise(network)
    if args.start is not None:
        network.load_state_dict(
            {name: value.float() for name, value in files.read_weights(args.start).items()}
        )
    trainer = Trainer(network.to(device), Batches(noto, codec, "plain"), recipe_of(args))
    if args.state.exists():
        trainer.resume(args.state)
    print(f"first loss {trainer.first_loss():.4f}", flush=True)
    train(trainer, args)
    trainer.save(args.state)
    averaged = trainer.averaged()
    weights = {name: averaged[name].to(torch.bfloat16) for name in network.state_dict()}
    files.write_weights(args.out, weights)
    plain = rebuilt(weights, device)
    figures = {
        **trainer.figures(),
        **evaluate.measure(plain, codec, noto, "plain", args.captions),
        "background_error_of_255": evaluate.background_errors(plain, codec, noto, min(24, args.captions)),
    }
    files.write_figures(args.out / "base.json", figures)
    evaluate.look(plain, codec, noto, "plain", args.out / "base.png")


def train_lora(args: argparse.Namespace, device: torch.device) -> None:
    """Train adapters for a style on the frozen base, write them in the PEFT dialect, and measure them."""
    noto = Noto.load(args.data, device)
    codec = LinearCodec.load(args.base / "codec.npz")
    weights = files.read_weights(args.base)
    batches = Batches(noto, codec, args.style)
    linear = adapting_factory(ALPHA[args.style])
    torch.manual_seed(args.seed)
    network = rebuilt(weights, device, linear)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("lora_" in name)
    recipe = recipe_of(args, weight_decay=0.0)
    base = Trainer(rebuilt(weights, device).requires_grad_(True), batches, recipe).first_loss()
    trainer = Trainer(network, batches, recipe)
    first = trainer.first_loss()
    print(f"{args.style}: first loss {first:.4f}, of the base on this target {base:.4f}", flush=True)
    if not math.isclose(first, base, rel_tol=0.01):
        raise SystemExit("the adapter changes the network before any step")
    train(trainer, args)
    tensors, metadata = export(network, trainer.averaged(), ALPHA[args.style])
    save_file(tensors, args.out / f"mini_{args.style}.safetensors", metadata=metadata)
    shipped = {name: value.to(torch.bfloat16) for name, value in trainer.averaged().items()}
    styled = rebuilt({**weights, **shipped}, device, linear)
    figures = {
        "style": args.style,
        "lr": args.lr,
        "first_loss": first,
        **trainer.figures(),
        **evaluate.measure(styled, codec, noto, args.style, args.captions),
    }
    files.write_figures(args.out / f"{args.style}.json", figures)
    evaluate.look(styled, codec, noto, args.style, args.out / f"{args.style}.png")


def recipe_of(args: argparse.Namespace, weight_decay: float = 0.01) -> Recipe:
    """The schedule that the arguments ask for."""
    return Recipe(
        args.steps, args.seconds, args.lr, args.batch, weight_decay, WARMUP[args.verb], seed=args.seed
    )


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    defaults = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter}
    build = Path("build/mini")
    data = verbs.add_parser("data", help="fetch and render the data set", **defaults)
    data.add_argument("--out", type=Path, default=build, help="folder to fill")
    ship = verbs.add_parser("publish", help="copy what ships to the package's assets", **defaults)
    ship.add_argument("--run", type=Path, default=build, help="folder that training filled")
    ship.add_argument("--data", type=Path, default=build / "noto.npz", help="the data set")
    ship.add_argument("--out", type=Path, default=Path("hswq_lab/assets"), help="folder to fill")
    for verb, steps, seconds, batch, rate in (
        ("base", 60_000, 410, 512, 1e-3),
        ("lora", 30_000, 150, 256, 4e-4),
    ):
        sub = verbs.add_parser(verb, help=f"train the {verb} on one device", **defaults)
        sub.add_argument("--data", type=Path, default=build / "noto.npz", help="the data set")
        sub.add_argument("--out", type=Path, default=build, help="folder to fill")
        sub.add_argument("--steps", type=int, default=steps, help="end of the schedule in steps …")
        sub.add_argument(
            "--seconds", type=float, default=seconds, help="… or in seconds, whichever comes first"
        )
        sub.add_argument("--piece", type=float, default=math.inf, help="stop this run after so many seconds")
        sub.add_argument("--batch", type=int, default=batch, help="pictures a step")
        sub.add_argument("--lr", type=float, default=rate, help="highest learning rate (palette: 3e-4)")
        sub.add_argument("--seed", type=int, default=0, help="of weights, order and noise")
        sub.add_argument("--captions", type=int, default=512, help="how many captions to evaluate")
        sub.add_argument("--compile", action="store_true", help="compile the blocks")
        sub.add_argument("--graph", action="store_true", help="capture the step in a CUDA graph")
    base, lora = verbs.choices["base"], verbs.choices["lora"]
    base.add_argument("--state", type=Path, default=build / "state.pt", help="gone on from if it exists")
    base.add_argument("--start", type=Path, help="folder with weights to start from")
    lora.add_argument("style", choices=sorted(ALPHA), help="what the LoRA makes of a picture")
    lora.add_argument("--base", type=Path, default=build, help="folder with the base's weights and codec")
    return parser.parse_args()


def main() -> None:
    """Do what the command line says."""
    args = arguments()
    warnings.filterwarnings("ignore", "Mismatch dtype")  # norms under autocast: bf16 values, fp32 weights
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.verb == "data":
        from mini_training import noto  # noqa: PLC0415 (needs cairosvg, which is not where training runs)

        noto.make(args.out)
    elif args.verb == "publish":
        publish.make(args.run, args.data, args.out)
    elif args.verb == "base":
        train_base(args, device)
    else:
        train_lora(args, device)
    print(f"{args.verb} took {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
