"""Number formats and the rotation in plain torch: the definition that every kernel is tested against."""

from __future__ import annotations

from hswq_lab.formats.block_scales import METHODS, Method
from hswq_lab.formats.e2m1 import decode_e2m1, encode_e2m1, pack_nibbles, swap_nibbles, unpack_nibbles
from hswq_lab.formats.e4m3 import decode_e4m3, encode_e4m3
from hswq_lab.formats.fp8 import dequantize_fp8, fp8_scale, quantize_fp8, requantize_fp8
from hswq_lab.formats.gemm import (
    fp4_gemm,
    fp8_weight,
    linear_fp8,
    linear_int8,
    linear_w4a4,
    linear_w4a8,
    linear_w4a16,
)
from hswq_lab.formats.int8 import dequantize_int8, quantize_int8, requantize_int8
from hswq_lab.formats.mxfp8 import dequantize_mxfp8, quantize_mxfp8, requantize_mxfp8
from hswq_lab.formats.nvfp4 import (
    amax,
    dequantize_nvfp4,
    quantize_nvfp4,
    requantize_nvfp4,
    tensor_scale,
    tensor_scale_four_six,
)
from hswq_lab.formats.packed import Fp8Weight, Int8Weight, Mxfp8Weight, Nvfp4Weight, PackedWeight
from hswq_lab.formats.philox import philox4x32_10
from hswq_lab.formats.rotation import GROUPS, group_for, hadamard, rotate, rotate_fp32
from hswq_lab.formats.swizzle import swizzle, swizzled_shape, unswizzle

__all__ = [
    "GROUPS",
    "METHODS",
    "Fp8Weight",
    "Int8Weight",
    "Method",
    "Mxfp8Weight",
    "Nvfp4Weight",
    "PackedWeight",
    "amax",
    "decode_e2m1",
    "decode_e4m3",
    "dequantize_fp8",
    "dequantize_int8",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "encode_e2m1",
    "encode_e4m3",
    "fp4_gemm",
    "fp8_scale",
    "fp8_weight",
    "group_for",
    "hadamard",
    "linear_fp8",
    "linear_int8",
    "linear_w4a4",
    "linear_w4a8",
    "linear_w4a16",
    "pack_nibbles",
    "philox4x32_10",
    "quantize_fp8",
    "quantize_int8",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "requantize_fp8",
    "requantize_int8",
    "requantize_mxfp8",
    "requantize_nvfp4",
    "rotate",
    "rotate_fp32",
    "swap_nibbles",
    "swizzle",
    "swizzled_shape",
    "tensor_scale",
    "tensor_scale_four_six",
    "unpack_nibbles",
    "unswizzle",
]
