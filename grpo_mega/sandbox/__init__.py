"""Runs programs that nobody trusts, such as a policy's: contained, within limits, and without leaving anything.

    sandbox = Sandbox()
    outcome = sandbox.python("print(int(input()) + 1)", stdin=b"41")
    outcome.stdout                                                       # b"42\\n"

No daemon, no privileges, no service: bubblewrap where Linux allows user namespaces, Landlock and seccomp elsewhere.
What each mechanism keeps in, and what it does not, is in docs/sandbox.md.
"""

from grpo_mega.sandbox.limits import Limits, Outcome
from grpo_mega.sandbox.pool import Call, Sandbox, SandboxUnavailable

__all__ = ["Call", "Limits", "Outcome", "Sandbox", "SandboxUnavailable"]
