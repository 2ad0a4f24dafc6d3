"""What `grpo_mega.show.status` was called before: `python -m grpo_mega.observe.status` still works."""

import sys

from grpo_mega.show.status import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
