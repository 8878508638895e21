"""A simulator of one training step on devices of their own: what each of them does when (FlexFlow, section 5)."""
