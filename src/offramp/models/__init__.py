"""Networks with exits: the contract, our networks, cascades, their costs, and the registry that builds them by name.

Importing any module of this room registers our networks.
"""

from offramp.models import cascade, collaboration, msdnet, ranet, wrn

__all__ = ["cascade", "collaboration", "msdnet", "ranet", "wrn"]
