"""Sizes of every model, of a few thousand parameters each: presets for `--preset`."""

SIZES = {
    "alexnet": {"image": 12, "fully_connected": [32, 16], "batch": 8, "convolutions": [
        {"channels": 8, "kernel": 3, "stride": 2, "pool": 2}]},
    "biglstm": {"layers": 1, "units": 16, "projection": 16, "length": 4, "vocab": 64, "batch": 8},
    "densenet121": {"image": 8, "blocks": [2, 2], "batch": 8},
    "gnmt": {"layers": 2, "units": 16, "length": 4, "vocab": 64, "batch": 8},
    "inception_v3": {"image": 14, "batch": 8},
    "resnet101": {"image": 8, "blocks": [1, 1], "batch": 8},
    "rnnlm": {"layers": 1, "units": 16, "length": 4, "vocab": 64, "batch": 8},
    "transformer": {"layers": 1, "d_model": 16, "heads": 4, "d_k": 4, "d_ff": 32, "length": 8, "vocab": 64, "batch": 8},
}
