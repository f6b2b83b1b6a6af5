"""References: the float64 oracle with every intermediate, and the two yardsticks that say how much error is normal."""

from backlight.reference.eager import eager
from backlight.reference.flashlike import flashlike
from backlight.reference.oracle import Oracle, max_logit, oracle
from backlight.reference.trace import BACKWARD, FORWARD, GRADIENTS, OUTPUTS, STAGES, Stage, Trace, graph

__all__ = [
    "BACKWARD",
    "FORWARD",
    "GRADIENTS",
    "OUTPUTS",
    "STAGES",
    "Oracle",
    "Stage",
    "Trace",
    "eager",
    "flashlike",
    "graph",
    "max_logit",
    "oracle",
]
