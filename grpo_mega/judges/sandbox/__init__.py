"""Runs untrusted programs, such as those a policy writes: contained, within limits, leaving nothing behind.

    sandbox = Sandbox()
    outcome = sandbox.python("print(int(input()) + 1)", stdin=b"41")
    outcome.stdout                                                       # b"42\\n"

No daemon, no privileges, no service: bubblewrap where Linux allows user namespaces, Landlock and seccomp elsewhere.
docs/sandbox.md says what each mechanism contains and what it does not.
"""

from grpo_mega.judges.sandbox.limits import Limits, Outcome
from grpo_mega.judges.sandbox.pool import BoxCall, Sandbox, SandboxUnavailable

__all__ = ["BoxCall", "Limits", "Outcome", "Sandbox", "SandboxUnavailable"]
