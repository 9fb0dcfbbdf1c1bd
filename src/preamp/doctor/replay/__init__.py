"""Replays of a step: where its first non-finite value came from, and what its gradients are in float32."""
