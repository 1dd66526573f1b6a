"""What a whole MoE layer takes behind its router, here and elsewhere: bench/layer.py."""
