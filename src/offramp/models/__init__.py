"""Networks with exits: the contract, MSDNet, RANet, their costs, the registry and how they are stored."""
