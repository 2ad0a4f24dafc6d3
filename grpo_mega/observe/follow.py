"""What `grpo_mega.show.trackers.follow` was called before: `python -m grpo_mega.observe.follow` still works."""

import sys

from grpo_mega.show.trackers.follow import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
