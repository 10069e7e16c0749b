"""Patterns of module names: PEFT's own meaning, and no pattern that runs for ever."""

from __future__ import annotations

import random
import re
import time

import pytest

from hswq_lab.errors import HswqError
from hswq_lab.lora.patterns import ModulePattern

NAME = "layers.2.attention.to_q"


@pytest.mark.parametrize(
    "pattern",
    [
        NAME,
        "to_q",
        "to_q$",
        "^layers.2.attention.to_q",
        r"^layers\.2\.attention\.to_q$",
        ".*to_q",
        ".*?attention.*",
        r"layers\.\d+\.attention\.to_(q|k|v)",
        r"layers\.[0-3]\.(?:attention|feed_forward)\.to_q",
        r"(layers\.)?\d{1,2}\.attention\.to_[^kv]",
        "to_k|to_q",
    ],
)
def test_what_people_write_matches(pattern):
    assert ModulePattern(pattern, "here").matches(NAME)


@pytest.mark.parametrize(
    "pattern", ["^attention.to_q", "o_q", "layers.2", "to_(k|v)", "layers.2.attention.to_q.", ""]
)
def test_what_peft_does_not_match_does_not(pattern):
    assert not ModulePattern(pattern, "here").matches(NAME)


def test_each_accepted_pattern_means_what_it_means_to_peft():
    """PEFT's get_pattern_key is re.match of (.*\\.)?(pattern)$."""
    draw = random.Random(0)
    pieces = [*"ab1.^$(|)*+?", r"\.", "[ab]", "[^a]", r"\d", r"\w", "(?:", "{1,2}", "{2}", "{1,}", "*?"]
    texts = ["".join(draw.choice("ab.1") for _ in range(draw.randint(0, 7))) for _ in range(200)]
    accepted = 0
    for _ in range(4000):
        pattern = "".join(draw.choice(pieces) for _ in range(draw.randint(1, 8)))
        try:
            ours = ModulePattern(pattern, "here")
        except HswqError:
            continue
        accepted += 1
        peft = re.compile(rf"(.*\.)?({pattern})$")
        for text in draw.sample(texts, 20):
            assert ours.matches(text) == bool(peft.match(text)), (pattern, text)
    assert accepted > 500


@pytest.mark.parametrize(
    "pattern",
    [
        *("(", ")", "a)b", "[", "[]", "*a", "a{", "a{,}", "a{2,1}", "a**", "a*+", "\\"),
        *("([a-z0-9._]+)+!", "(ab)*", "(?i)to_q", "(?=to_q)", r"(a)\1", r"\bto_q", "(?P<n>a)", "[z-a]"),
        *("a" * 5000, "(a|a)" * 30, "(" * 3000),
    ],
)
def test_other_patterns_are_refused_by_name(pattern):
    with pytest.raises(HswqError, match="pattern of module names") as refusal:
        ModulePattern(pattern, "alpha_pattern in the header")
    assert refusal.value.tensor == "alpha_pattern in the header"


@pytest.mark.parametrize("pattern", ["(a|a)" * 20 + "!", ".*" * 100 + "!", "a?" * 200 + "a" * 200 + "!"])
def test_no_accepted_pattern_runs_for_long(pattern):
    started = time.process_time()
    assert not ModulePattern(pattern, "here").matches("a" * 2000)
    assert time.process_time() - started < 5
