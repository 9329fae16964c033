"""A run: its configuration, its recipe, its folder and what evaluation saved there."""
