"""Search-QA: questions answered with a search engine, on a generated encyclopedia or on the field's seven sets."""

from envs_text.search_qa.env import SearchQA

__all__ = ["SearchQA"]
