"""Which arithmetic a layer runs in, and why: resolved per layer, never per file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from hswq_lab.errors import HswqError

Requested = Literal["auto", "parity", "tc", "tc8"]
Uncalibrated = Literal["dynamic", "unit"]
Fp8Weights = Literal["per_call", "keep"]
LayerMode = Literal["parity", "tc", "tc8", "int8", "fp8", "16-bit"]


@dataclass(frozen=True)
class ModeRequest:
    """What was asked for: the mode, and what to do with a layer that has no input_scale (None: refuse).

    `fp8_weights` says how tc8 multiplies on a card: "per_call" converts the NVFP4 weights at every call, "keep" holds
    them in FP8 as well, one byte more a weight. The numbers are the same. `origin` says who asked ("default",
    "asked for", "HSWQ_ZI_FORCE_TC=1"), for the report.
    """

    mode: Requested = "auto"
    uncalibrated: Uncalibrated | None = None
    origin: str = "default"
    fp8_weights: Fp8Weights = "per_call"

    def __post_init__(self) -> None:
        if self.mode not in get_args(Requested):
            raise HswqError("unknown mode", found=repr(self.mode), expected=" or ".join(get_args(Requested)))
        if self.uncalibrated not in (None, *get_args(Uncalibrated)):
            raise HswqError(
                "unknown treatment of uncalibrated layers",
                found=repr(self.uncalibrated),
                expected="dynamic or unit",
            )
        if self.fp8_weights not in get_args(Fp8Weights):
            raise HswqError(
                "unknown way to hold FP8 weights", found=repr(self.fp8_weights), expected="per_call or keep"
            )


@dataclass(frozen=True)
class Resolved:
    """The mode that a layer runs in, where its activation scale comes from, and the reason in words.

    `fallback` says why FP4 tensor cores do not do the work of a layer that is made for them; "" if they do, or if
    nobody wanted them to.
    """

    mode: LayerMode
    activation_scale: Literal["none", "static", "dynamic", "unit"]
    why: str
    fp8_weights: Fp8Weights = "per_call"
    fallback: str = ""

    @property
    def arithmetic(self) -> str:
        """What multiplies: "FP4", "W4A4 emulated", "W4A16", "W4A8", "INT8" or "16-bit"."""
        if self.mode == "tc":
            return "W4A4 emulated" if self.fallback else "FP4"
        return {"parity": "W4A16", "tc8": "W4A8", "int8": "INT8"}.get(self.mode, "16-bit")


SWITCHES = ("HSWQ_ZI_FORCE_PARITY", "HSWQ_ZI_FORCE_TC")
"""Environment variables that command line and notebooks honour, the stronger first."""


def request_from_environment(environ: Mapping[str, str]) -> tuple[ModeRequest, str | None]:
    """The mode that HSWQ_ZI_FORCE_PARITY=1 (wins) or HSWQ_ZI_FORCE_TC=1 asks for, and a warning if both are set.

    HSWQ_ZI_FORCE_TC runs layers without an input_scale at a scale of 1, as the reference system does. Only the command
    line and the notebooks call this; the library takes no mode from the environment.

    Raises:
        HswqError: a switch is neither 1, 0 nor empty: what it was meant to do is not known.
    """
    parity, tc = (_switch(environ, name) for name in SWITCHES)
    if parity:
        ignored = "HSWQ_ZI_FORCE_TC=1 is ignored: HSWQ_ZI_FORCE_PARITY=1 is set as well" if tc else None
        return ModeRequest("parity", origin="HSWQ_ZI_FORCE_PARITY=1"), ignored
    if tc:
        return ModeRequest("tc", uncalibrated="unit", origin="HSWQ_ZI_FORCE_TC=1"), None
    return ModeRequest(), None


def _switch(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        raise HswqError("this switch is on or off", tensor=name, found=repr(value), expected="1, 0 or unset")
    return value == "1"


def resolve(
    name: str, weight_format: str, request: ModeRequest, *, calibrated: bool, fp4_is_native: bool
) -> Resolved:
    """The mode of one layer.

    Args:
        name: the layer, for the error.
        weight_format: "nvfp4", "int8_tensorwise", "float8_e4m3fn", … or "16-bit".
        request: what was asked for.
        calibrated: whether the layer has an input_scale.
        fp4_is_native: whether this device multiplies FP4 in hardware.

    Raises:
        HswqError: tc or tc8 was asked for, the layer has no input_scale, and nothing was said about that; or a
            format that no arithmetic is known for.
    """
    if weight_format in _AS_THEMSELVES:
        return _AS_THEMSELVES[weight_format]
    if weight_format != "nvfp4":
        raise HswqError("no arithmetic is known for this packed format", tensor=name, found=weight_format)
    if request.mode == "parity":
        return Resolved("parity", "none", request.origin)
    if request.mode == "auto":
        return _automatic(calibrated=calibrated, fp4_is_native=fp4_is_native)
    how = "native FP4" if fp4_is_native else "emulated: same numbers through wider arithmetic"
    fallback = "" if fp4_is_native else _NO_FP4
    if request.mode == "tc8":
        how, fallback = "FP8 activations", ""
    if calibrated:
        return Resolved(request.mode, "static", f"{request.origin} ({how})", request.fp8_weights, fallback)
    if request.uncalibrated is None:
        raise HswqError(
            f"the layer cannot run in mode {request.mode}: it has no input_scale",
            tensor=name,
            fix="calibrate the pack, or ask for uncalibrated='dynamic' (own scale per call) or 'unit' (scale 1)",
        )
    why = f"{request.origin}, no input_scale ({how})"
    return Resolved(request.mode, request.uncalibrated, why, request.fp8_weights, fallback)


_NO_FP4 = "no FP4 tensor cores here"
_AS_ITSELF = "runs as itself in every mode"
_AS_THEMSELVES = {
    "16-bit": Resolved("16-bit", "none", "not packed"),
    "int8_tensorwise": Resolved("int8", "dynamic", _AS_ITSELF),
    "float8_e4m3fn": Resolved("fp8", "none", _AS_ITSELF),
    "float8_e5m2": Resolved("fp8", "none", _AS_ITSELF),
    "mxfp8": Resolved("fp8", "none", _AS_ITSELF),
}


def _automatic(*, calibrated: bool, fp4_is_native: bool) -> Resolved:
    if calibrated and fp4_is_native:
        return Resolved("tc", "static", "calibrated, and FP4 is native here")
    reason = _NO_FP4 if calibrated else "no input_scale"
    return Resolved("parity", "none", f"automatic: {reason}", fallback=_NO_FP4 if calibrated else "")
