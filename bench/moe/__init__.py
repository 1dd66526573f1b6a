"""Times a whole MoE layer behind its router, ours and others': bench/layer.py."""
