"""Generated from proto/ by scripts/stubs. Not to be edited, nor imported by users."""
