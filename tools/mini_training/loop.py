"""The flow-matching training loop: everything on the device, on CUDA one captured graph a step, resumable."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hswq_lab.models.zimage import ZImage
from mini_training.pictures import Batches


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train; the schedule ends at steps or at seconds, whichever comes first."""

    steps: int
    seconds: float
    lr: float
    batch: int
    weight_decay: float = 0.01
    warmup: int = 500
    ema: float = 0.9995
    clip: float = 1.0
    seed: int = 0

    def rate(self, step: int, elapsed: float) -> float:
        """Linear warm-up, then a cosine to 0 over the part of the schedule that is done."""
        done = min(max(step / self.steps, elapsed / self.seconds), 1.0)
        return self.lr * min(1.0, (step + 1) / self.warmup) * 0.5 * (1 + math.cos(math.pi * done))


def loss_of(network: ZImage, batches: Batches, size: int) -> Tensor:
    """Mean squared error of x0 − ε at sigma = sigmoid(N(0, 1))."""
    clean, features, padding = batches.draw(size)
    noise = torch.randn_like(clean)
    sigma = torch.randn(size, device=clean.device).sigmoid()
    mix = sigma.view(-1, 1, 1, 1)
    tokens = network.cap_embedder(features)
    tokens = torch.where(padding[..., None], network.cap_pad_token.to(tokens.dtype), tokens)
    predicted = network.denoise(mix * noise + (1 - mix) * clean, 1 - sigma, tokens)
    return (predicted.float() - (clean - noise)).square().mean()


class Trainer:
    """One network in training, its optimiser, the mean of its weights, its place in the schedule."""

    def __init__(self, network: ZImage, batches: Batches, recipe: Recipe) -> None:
        self.network, self.batches, self.recipe = network, batches, recipe
        self.device = batches.latents.device
        self.named = {name: p for name, p in network.named_parameters() if p.requires_grad}
        self.parameters = list(self.named.values())
        self.ema = [p.detach().clone() for p in self.parameters]
        self.lr = torch.zeros((), device=self.device)
        self.ema_decay = torch.zeros((), device=self.device)
        self.loss = torch.zeros((), device=self.device)
        on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self.lr,
            betas=(0.9, 0.99),
            weight_decay=recipe.weight_decay,
            fused=on_gpu,
            capturable=on_gpu,
        )
        self.step, self.elapsed = 0, 0.0

    def _one_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            loss = loss_of(self.network, self.batches, self.recipe.batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip, foreach=True)
        self.optimizer.step()
        with torch.no_grad():
            gap = torch._foreach_sub(self.ema, self.parameters)  # noqa: SLF001 (torch has no public name)
            torch._foreach_mul_(gap, self.ema_decay)
            torch._foreach_copy_(self.ema, torch._foreach_add(gap, self.parameters))  # noqa: SLF001
            self.loss.copy_(loss.detach())

    def _captured(self) -> Callable[[], None]:
        """The step as one CUDA graph; the warm-up runs at rate 0 and its traces are wiped."""
        before = self.state()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._one_step()
        torch.cuda.current_stream().wait_stream(side)
        self._restore(before)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._one_step()
        return graph.replay

    def compile(self) -> None:
        """Compile the blocks, one by one: they share their code, so three variants serve all of them."""
        for block in [*self.network.noise_refiner, *self.network.context_refiner, *self.network.layers]:
            block.compile(dynamic=False)

    def first_loss(self, batches: int = 8) -> float:
        """The loss before any step, over a few batches that are the same for every network."""
        torch.manual_seed(self.recipe.seed)
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, cache_enabled=False):
            return (
                sum(float(loss_of(self.network, self.batches, self.recipe.batch)) for _ in range(batches))
                / batches
            )

    def run(self, piece: float = math.inf, *, graph: bool = False, every: int = 500) -> None:
        """Train until the schedule ends or this piece's seconds are over.

        Raises:
            RuntimeError: the loss is no longer finite, or far above where it began.
        """
        torch.manual_seed(self.recipe.seed + 1 + self.step)
        advance = self._captured() if graph else self._one_step
        # The clock starts here: compiling is no part of the schedule.
        began, before, shown, worst = time.monotonic(), self.elapsed, 0.0, math.inf
        while (
            self.step < self.recipe.steps
            and self.elapsed < self.recipe.seconds
            and self.elapsed - before < piece
        ):
            self.lr.fill_(self.recipe.rate(self.step, self.elapsed))
            self.ema_decay.fill_(min(self.recipe.ema, (1 + self.step) / (10 + self.step)))
            advance()
            self.step += 1
            if self.step % 50 == 0:
                loss = float(self.loss)  # also keeps the host from running far ahead of the clock
                shown = loss if shown == 0 else 0.8 * shown + 0.2 * loss
                if worst == math.inf:
                    worst = 1.5 * loss + 0.5
                if not loss < worst:
                    raise RuntimeError(
                        f"step {self.step}: loss {loss:.3f} is above {worst:.3f}: the rate is too high"
                    )
            self.elapsed = before + time.monotonic() - began
            if self.step % every == 0:
                rate = self.step / max(self.elapsed, 1e-9)
                print(f"step {self.step} {self.elapsed:.0f}s loss {shown:.4f} {rate:.1f} steps/s", flush=True)
        print(f"stopped at step {self.step}, {self.elapsed:.0f} s, loss {shown:.4f}", flush=True)

    def figures(self) -> dict[str, float]:
        """What this training was, for the record."""
        return {
            "steps": self.step,
            "seconds": round(self.elapsed, 1),
            "batch": self.recipe.batch,
            "loss": float(self.loss),
        }

    def averaged(self) -> dict[str, Tensor]:
        """The running mean of the trained parameters, by name."""
        return dict(zip(self.named, self.ema, strict=True))

    def state(self) -> dict[str, Any]:
        """Everything that a later piece needs, copied."""
        copies = [p.detach().clone() for p in self.parameters]
        moments = [
            {key: value.clone() for key, value in self.optimizer.state[p].items()}
            if p in self.optimizer.state
            else None
            for p in self.parameters
        ]
        ema = [e.clone() for e in self.ema]
        return {
            "parameters": copies,
            "moments": moments,
            "ema": ema,
            "step": self.step,
            "elapsed": self.elapsed,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, state["parameters"])
            torch._foreach_copy_(self.ema, state["ema"])
            for p, moments in zip(self.parameters, state["moments"], strict=True):
                slots = self.optimizer.state[p]
                for key, value in slots.items():
                    value.zero_() if moments is None else value.copy_(moments[key])
                if not slots and moments is not None:
                    self.optimizer.state[p] = {key: value.to(self.device) for key, value in moments.items()}
        self.step, self.elapsed = state["step"], state["elapsed"]

    def save(self, path: Path) -> None:
        """Write the state for the next piece."""
        torch.save(self.state(), path)

    def resume(self, path: Path) -> None:
        """Go on from a saved state."""
        self._restore(torch.load(path, map_location=self.device))
