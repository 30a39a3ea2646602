"""ALFWorld: household tasks in text, on generated or official games, in a native or the official engine."""

from envs_text.alfworld.env import ALFWorld

__all__ = ["ALFWorld"]
