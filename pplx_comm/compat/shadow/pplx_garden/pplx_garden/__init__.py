"""Stands for pplx_garden where this folder's parent is on the path. Its other modules stay its own."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
