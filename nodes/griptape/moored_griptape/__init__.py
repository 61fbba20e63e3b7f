"""Nodes of Griptape Nodes that have moored paint: they forward, show and cancel; they hold no weights."""
