"""The one list of cases lives in the package, because `backlight bench` reads it too."""

from backlight.cases import *  # noqa: F403
