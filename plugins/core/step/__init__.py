"""One optimizer update: accumulation, order, EMA, BatchNorm, precision."""
