"""preamp measured against torch.amp, row by row: `./dev bench`, `./dev gpu`, and scripts of their own."""
