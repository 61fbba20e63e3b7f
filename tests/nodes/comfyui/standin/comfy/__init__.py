"""Part of the stand-in for ComfyUI; see its README."""
