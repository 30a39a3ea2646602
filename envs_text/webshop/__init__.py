"""WebShop: buying what a request asks for, in a generated catalogue or the official one."""

from envs_text.webshop.env import WebShop

__all__ = ["WebShop"]
