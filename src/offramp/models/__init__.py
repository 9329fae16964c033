"""Networks with exits: the contract, MSDNet, RANet, their costs, and the registry that builds them by name.

Importing any module of this room registers our networks.
"""

from offramp.models import cascade, collaboration, msdnet, ranet

__all__ = ["cascade", "collaboration", "msdnet", "ranet"]
