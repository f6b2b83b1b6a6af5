"""What tests use of the package's list of cases, under a short name."""

from backlight.cases import (
    BY_NAME,
    CASES,
    EXTREMES,
    FEATURES,
    MASKS,
    NUMERICS,
    PACKED,
    PAIR_BIAS,
    PAIRS,
    SINGLES,
    TAU,
    TOGETHER,
    case_id,
    compatible,
    compose,
    small,
    with_dtypes,
)
from backlight.problems.case import BF16, FP16, FP32, FP64, Case, Problem
from backlight.problems.kink import KINK_MARGIN
from backlight.problems.kink import margin as kink_margin

__all__ = [
    "BF16",
    "BY_NAME",
    "CASES",
    "EXTREMES",
    "FEATURES",
    "FP16",
    "FP32",
    "FP64",
    "KINK_MARGIN",
    "MASKS",
    "NUMERICS",
    "PACKED",
    "PAIRS",
    "PAIR_BIAS",
    "SINGLES",
    "TAU",
    "TOGETHER",
    "Case",
    "Problem",
    "case_id",
    "compatible",
    "compose",
    "kink_margin",
    "small",
    "with_dtypes",
]
