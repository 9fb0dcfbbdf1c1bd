"""Shadow execution: in a step that is looked at, every operator also runs on float32 copies of its tensors."""
