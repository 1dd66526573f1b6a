"""Stands for DeepEP where this folder's parent is on the path."""

from pplx_comm.compat.deep_ep import Buffer, Config, EventOverlap, __version__, topk_idx_t

__all__ = ["Buffer", "Config", "EventOverlap", "__version__", "topk_idx_t"]
