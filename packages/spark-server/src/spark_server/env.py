"""The only reader of environment variables in this package; docs/environment.md lists them, a test compares."""

import os
from collections.abc import Mapping
from pathlib import Path

RECIPE_PATH = "SPARK_RECIPE_PATH"
LOG_LEVEL = "SPARK_LOG_LEVEL"

# Names that stand for an option; the flag wins. The second part are names that existing deployments set.
OPTION_VARIABLES: Mapping[str, str] = {
    LOG_LEVEL: "log_level",
    "ATLAS_NO_TUI": "no_tui",
    "AVAROK_NO_TUI": "no_tui",
}

VARIABLES = (RECIPE_PATH, *OPTION_VARIABLES)

# Turns that a thread of libgomp waits awake at the end of a parallel region. With its own choice, some milliseconds, a
# step is up to 50 times slower while another process (the HTTP side, a client) wants one of the cores; sleeping at
# once costs two thirds of the speed on idle cores; this costs nothing there (docs/log.md, 2026-11-29).
_SPIN_COUNT = 20_000
# Activations of a prefill chunk stay in the heap instead of being mapped, zeroed and unmapped at each call.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def recipe_folders() -> tuple[Path, ...]:
    """Folders of SPARK_RECIPE_PATH, separated as in PATH, searched after the recipes that spark brings."""
    return tuple(Path(part) for part in os.environ.get(RECIPE_PATH, "").split(os.pathsep) if part)


def option_values() -> dict[str, tuple[str, str]]:
    """Option name → variable and its text, for the variables that are set. The first name of an option wins."""
    found: dict[str, tuple[str, str]] = {}
    for variable, option in OPTION_VARIABLES.items():
        text = os.environ.get(variable)
        if text is not None:
            found.setdefault(option, (variable, text))
    return found


def engine_environment(num_threads: int) -> dict[str, str]:
    """The environment that an engine process starts with: ours, and what its maths libraries and malloc read at start.

    num_threads   of the maths libraries; 0 = their choice
    """
    tuned = {"GOMP_SPINCOUNT": str(_SPIN_COUNT), **_MALLOC} | dict(os.environ)
    if num_threads > 0:
        tuned.update(dict.fromkeys(_THREAD_VARIABLES, str(num_threads)))
    return tuned
