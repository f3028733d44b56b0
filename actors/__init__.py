"""Thin Ray actors. Every class is plain; `ray.remote` is applied where it is spawned, so tests construct them directly."""
