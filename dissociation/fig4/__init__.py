"""The import paths that the notebook of the paper uses; each module re-exports what stands elsewhere."""
