"""One rank of tools/rehearse.py, which starts it, in a process whose CUDA libraries are the null GPU.

Writes its numbers to a file: rehearse_rank.py SPECIFICATION OUT.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

from grpo_mega import platform
from grpo_mega.config.derived import skips_old_pass
from grpo_mega.errors import ConfigError, InputError
from grpo_mega.forecast.rehearsal.spec import BAD_SETTINGS, RankSpec


def main(specification: str, out: Path) -> int:
    """Rehearses the rank of a `RankSpec` in JSON, and writes what it measured; returns the exit code."""
    warnings.filterwarnings("ignore")
    spec = RankSpec.from_json(specification)
    here = platform.start()
    # These import Megatron, which needs the platform to be prepared.
    from grpo_mega.forecast.rehearsal.rank import rehearse
    from grpo_mega.stages.step import loss_of

    try:
        skipped = skips_old_pass(spec.config.algorithm, spec.config.distill)
        measured = rehearse(spec, here, loss_of(spec.config.algorithm, skipped), skipped)
    except InputError as error:
        problems = error.problems if isinstance(error, ConfigError) else [error]
        out.write_text(json.dumps([[one.where, one.what, one.fix] for one in problems]))
        return BAD_SETTINGS
    out.write_text(json.dumps(measured))
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
