"""Vanilla: the untouched start, played with ordinary prompts. Against GRPO: no updates."""

from harness.methods import Method

METHOD = Method(name="vanilla", summary="the untrained policy", advantage=None)
