"""Shadow execution: in a step that is looked at, every operator also runs on float64 copies of its tensors."""
