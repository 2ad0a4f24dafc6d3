"""Answers before a run begins: memory and hours (`planning/`), this machine (`doctor/`), this job (`dry_run/`), and
all of its ranks without a GPU (`rehearsal/`). The trainer imports none of it."""
