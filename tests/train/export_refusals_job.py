"""What tools/export.py says to arguments that it refuses; started by run_ranks on one rank.

Usage: export_refusals_job.py JSON: a list of lists of arguments. Prints a list of messages.
"""

import json
import sys

from grpo_mega import platform

HERE = platform.start()
platform.join_processes(HERE)

import torch.distributed as dist  # noqa: E402
from ranks import REPOSITORY  # noqa: E402

sys.path.insert(0, str(REPOSITORY / "tools"))

from export import export, parse  # noqa: E402

said = []
for words in json.loads(sys.argv[1]):
    try:
        said.append("written: " + export(parse(words), "", HERE))
    except (ValueError, FileNotFoundError) as error:
        said.append(str(error))
dist.destroy_process_group()
print(json.dumps(said))
