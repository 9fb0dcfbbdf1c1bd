"""Of `apex.contrib`: the optimizers of 2018 and 2019, layer norm, cross entropy and clipping, on torch's operators."""
