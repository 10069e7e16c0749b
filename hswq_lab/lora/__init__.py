"""LoRA: files in any dialect → deltas → the model's layers → side path or bake, with evidence."""

from __future__ import annotations

from hswq_lab.lora.bake import bake_bias, bake_from_source, bake_in_place, total_delta
from hswq_lab.lora.bake_report import BakeReport, KindVerdict
from hswq_lab.lora.branch import BranchStack
from hswq_lab.lora.delta import Branch, LayerDelta
from hswq_lab.lora.evidence import LayerEvidence, branch_evidence
from hswq_lab.lora.file import LoraFile, load_lora, lora_from_tensors
from hswq_lab.lora.report import LoraReport, LoraRow

__all__ = [
    "BakeReport",
    "Branch",
    "BranchStack",
    "KindVerdict",
    "LayerDelta",
    "LayerEvidence",
    "LoraFile",
    "LoraReport",
    "LoraRow",
    "bake_bias",
    "bake_from_source",
    "bake_in_place",
    "branch_evidence",
    "load_lora",
    "lora_from_tensors",
    "total_delta",
]
