"""What decodes: a sub-layer view of a loaded model, its cache, drafters, planners and the decode loop."""
