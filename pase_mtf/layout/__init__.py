"""One mesh shape and layout rules for programs that call mtf.Lowering themselves."""
