"""LoRA: files in any dialect → deltas → the model's layers → side path or bake, with evidence."""

from __future__ import annotations

from hswq_lab.lora.bake import (
    bake_bias,
    bake_from_source,
    bake_in_place,
    change_of,
    put_from_source,
    put_in_place,
    total_bias,
    total_delta,
)
from hswq_lab.lora.bake_report import BakeReport, KindVerdict
from hswq_lab.lora.branch import BranchStack
from hswq_lab.lora.convert import Dialect, convert_lora, save_lora
from hswq_lab.lora.delta import Branch, LayerDelta
from hswq_lab.lora.evidence import LayerEvidence, bias_evidence, branch_evidence, measure
from hswq_lab.lora.file import LoraFile, load_lora, lora_from_tensors
from hswq_lab.lora.matching import Coverage
from hswq_lab.lora.merge import Merged, MergeReport, merge_loras
from hswq_lab.lora.report import LoraReport, LoraRow

__all__ = [
    "BakeReport",
    "Branch",
    "BranchStack",
    "Coverage",
    "Dialect",
    "KindVerdict",
    "LayerDelta",
    "LayerEvidence",
    "LoraFile",
    "LoraReport",
    "LoraRow",
    "MergeReport",
    "Merged",
    "bake_bias",
    "bake_from_source",
    "bake_in_place",
    "bias_evidence",
    "branch_evidence",
    "change_of",
    "convert_lora",
    "load_lora",
    "lora_from_tensors",
    "measure",
    "merge_loras",
    "put_from_source",
    "put_in_place",
    "save_lora",
    "total_bias",
    "total_delta",
]
