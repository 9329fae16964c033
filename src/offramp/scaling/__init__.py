"""Millions of images through a bundle on Ray: where one machine is not enough.

A room of its own beside `serve`: it sees `running`, whose `predict` every worker calls, and nothing sees it but the
benchmarks and the command line, so that a box without the extra `ray` loses nothing else. Only cluster.py imports Ray;
places, sources and parts need pyarrow alone and are tried without a cluster.
"""
