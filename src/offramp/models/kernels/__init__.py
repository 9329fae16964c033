"""Training conv-BN-ReLU with kernels of our own (Triton), for GPUs.

MSDNet's maps are many and thin: 6 to 48 new channels per layer. Libraries pad such channels, change layouts and run
one kernel after another for what is a single sweep over memory.
"""

from offramp.models.kernels.convolution import ALONG, SQUARES, as_filter, convolve
from offramp.models.kernels.filters import filter_gradient
from offramp.models.kernels.maps import as_map, as_rows, join, new_map, row_stride
from offramp.models.kernels.norm import gradient_before_relu, normalise_relu, tangent_after_relu

__all__ = [
    "ALONG",
    "SQUARES",
    "as_filter",
    "as_map",
    "as_rows",
    "convolve",
    "filter_gradient",
    "gradient_before_relu",
    "join",
    "new_map",
    "normalise_relu",
    "row_stride",
    "tangent_after_relu",
]
