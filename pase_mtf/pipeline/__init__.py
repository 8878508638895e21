"""Layers on different devices at the same time: stages over groups of devices, with microbatches through them."""
