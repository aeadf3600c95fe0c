"""Lessons on torch.distributed: one small program per subject, which checks what it says. The trainer imports none."""
