"""The kernels of this library, and what else pplx_garden has in this folder."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
