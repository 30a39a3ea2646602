"""EZPoints-v1: make 12 from two playing cards, seen as a picture."""

from envs_vision.ezpoints.env import EZPoints

__all__ = ["EZPoints"]
