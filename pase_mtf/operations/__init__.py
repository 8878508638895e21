"""All that is known of a Mesh-TensorFlow operation, one file per family.

`registry` holds the rules, `facts` reads the operations of a graph by them. The families enter their rules when they
are imported, which is here.
"""

from pase_mtf.operations import (  # noqa: F401  (they register themselves)
    control_flow,
    convolution,
    einsum,
    laid_out,
    pointwise,
    pooling,
    random,
    shape,
    slicewise,
    variables,
    widening,
)
