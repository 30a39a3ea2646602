"""Sokoban-v1: push every box onto a target, seen as a picture."""

from envs_vision.sokoban.env import Sokoban

__all__ = ["Sokoban"]
