"""Results that anyone can redraw: what is kept of runs, what they show, and the page about them."""
