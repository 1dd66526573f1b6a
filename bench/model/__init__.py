"""Predicts the library's times on fabrics that cannot be run here: a discrete-event model of hosts' proxies and NICs.

fabrics.py has the costs and where each comes from, published.py what the model is held against; the simulation itself is
C++, and drives the production Proxy.
"""
