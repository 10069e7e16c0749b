"""Which arithmetic a layer runs in: the environment's precedence, refusal without input_scale, reasons."""

from __future__ import annotations

import pytest

from hswq_lab.errors import HswqError
from hswq_lab.modes import ModeRequest, request_from_environment, resolve


def resolved(mode="auto", calibrated=True, native=False, form="nvfp4", uncalibrated=None):
    request = ModeRequest(mode, uncalibrated, "asked for")
    return resolve("layers.0.x", form, request, calibrated=calibrated, fp4_is_native=native)


@pytest.mark.parametrize(
    ("calibrated", "native", "mode", "why"),
    [
        (True, True, "tc", "native"),
        (True, False, "parity", "no FP4 tensor cores"),
        (False, True, "parity", "no input_scale"),
        (False, False, "parity", "no input_scale"),
    ],
)
def test_auto_takes_tc_only_where_it_is_calibrated_and_native(calibrated, native, mode, why):
    found = resolved(calibrated=calibrated, native=native)
    assert found.mode == mode
    assert why in found.why


@pytest.mark.parametrize(
    ("mode", "native", "calibrated", "arithmetic", "falls_back"),
    [
        ("tc", True, True, "FP4", False),
        ("tc", False, True, "W4A4 emulated", True),
        ("auto", False, True, "W4A16", True),
        ("auto", True, False, "W4A16", False),
        ("parity", False, True, "W4A16", False),
        ("tc8", False, True, "W4A8", False),
    ],
)
def test_fallbacks_are_what_fp4_tensor_cores_would_have_done(
    mode, native, calibrated, arithmetic, falls_back
):
    found = resolved(mode, calibrated, native)
    assert found.arithmetic == arithmetic
    assert bool(found.fallback) == falls_back


def test_fp8_weights_are_kept_only_by_a_known_name():
    assert (
        resolve(
            "x", "nvfp4", ModeRequest("tc8", fp8_weights="keep"), calibrated=True, fp4_is_native=False
        ).fp8_weights
        == "keep"
    )
    with pytest.raises(HswqError, match="FP8 weights"):
        ModeRequest("tc8", fp8_weights="sometimes")


@pytest.mark.parametrize("mode", ["tc", "tc8"])
def test_an_uncalibrated_layer_is_refused_by_name_unless_told_what_to_do(mode):
    with pytest.raises(HswqError, match="no input_scale") as caught:
        resolved(mode, calibrated=False)
    assert caught.value.tensor == "layers.0.x"
    for treatment in ("dynamic", "unit"):
        found = resolved(mode, calibrated=False, uncalibrated=treatment)
        assert (found.mode, found.activation_scale) == (mode, treatment)


def test_a_calibrated_layer_keeps_its_scale_whatever_is_said_about_others():
    assert resolved("tc", uncalibrated="unit").activation_scale == "static"


def test_an_explicit_tc_says_whether_it_is_emulated():
    assert "emulated" in resolved("tc", native=False).why
    assert "native FP4" in resolved("tc", native=True).why
    assert "emulated" not in resolved("tc8", native=False).why


@pytest.mark.parametrize(
    ("form", "mode"),
    [
        ("16-bit", "16-bit"),
        ("int8_tensorwise", "int8"),
        ("float8_e4m3fn", "fp8"),
        ("float8_e5m2", "fp8"),
        ("mxfp8", "fp8"),
    ],
)
@pytest.mark.parametrize("request_mode", ["auto", "parity", "tc", "tc8"])
def test_other_formats_run_as_themselves(form, mode, request_mode):
    assert resolved(request_mode, calibrated=False, form=form).mode == mode


def test_unknown_words_are_refused():
    with pytest.raises(HswqError, match="unknown mode"):
        ModeRequest("fast")
    with pytest.raises(HswqError, match="uncalibrated"):
        ModeRequest("tc", "guess")
    with pytest.raises(HswqError, match="no arithmetic"):
        resolved(form="int3_of_tomorrow")


@pytest.mark.parametrize(
    ("environ", "mode", "uncalibrated", "warned"),
    [
        ({}, "auto", None, False),
        ({"HSWQ_ZI_FORCE_PARITY": "1"}, "parity", None, False),
        ({"HSWQ_ZI_FORCE_TC": "1"}, "tc", "unit", False),
        ({"HSWQ_ZI_FORCE_PARITY": "1", "HSWQ_ZI_FORCE_TC": "1"}, "parity", None, True),
        ({"HSWQ_ZI_FORCE_PARITY": "0", "HSWQ_ZI_FORCE_TC": "1"}, "tc", "unit", False),
        ({"HSWQ_ZI_FORCE_TC": ""}, "auto", None, False),
    ],
)
def test_the_environment_parity_wins_over_tc_over_auto(environ, mode, uncalibrated, warned):
    request, warning = request_from_environment(environ)
    assert (request.mode, request.uncalibrated) == (mode, uncalibrated)
    assert (warning is not None) == warned
    if environ.get("HSWQ_ZI_FORCE_TC") == "1":
        assert request.origin.startswith("HSWQ_ZI_FORCE_")


@pytest.mark.parametrize("value", ["yes", "true", "2", " 1"])
@pytest.mark.parametrize("name", ["HSWQ_ZI_FORCE_PARITY", "HSWQ_ZI_FORCE_TC"])
def test_a_switch_that_is_neither_on_nor_off_is_refused_not_ignored(name, value):
    with pytest.raises(HswqError, match="on or off") as caught:
        request_from_environment({name: value})
    assert caught.value.tensor == name
